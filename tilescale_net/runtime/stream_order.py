"""The order of calls that share buffers and signals, where a program makes them on several CUDA streams."""

import torch


class StreamOrder:
    """Lets calls that are made on different streams run one after the other: they share buffers and signals.

    The first of them comes after what the stream that is current here holds, which may fill those.

    Args:
        device: of the streams.
    """

    def __init__(self, device: torch.device):
        self._device = device
        # Whose calls no later stream has waited for; the last one at the end.
        self._earlier: list[torch.cuda.Stream] = []
        self._key: int | None = None  # of the last stream, which costs little to ask for
        self.follow()

    def follow(self) -> None:
        """What is launched next on the current stream comes after the calls so far.

        A stream that is captured into a CUDA graph, and one that is not, cannot wait for each other: the caller that
        replays the graph orders it.
        """
        if self._device.type != "cuda":
            return
        key = torch._C._cuda_getCurrentRawStream(self._device.index)
        if key == self._key:
            return
        stream = torch.cuda.current_stream(self._device)
        captured, kept = _is_captured(stream), []
        for earlier in self._earlier:
            if earlier == stream:
                continue
            if _is_captured(earlier) == captured:
                stream.wait_stream(earlier)
            else:
                kept.append(earlier)
        self._earlier, self._key = [*kept, stream], key


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
