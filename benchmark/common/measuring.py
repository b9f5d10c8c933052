"""What makes a figure: timing of device operations, statistics, and the proof that what was timed delivered its data.

A launch from Python costs about 5 us, more than a small copy takes; `graph` leaves 0.8 us of it, `loop` nothing. What is
compared must be timed in the same way. In the simulator the wall clock is read; such times show order and nothing else.
"""

from __future__ import annotations

import argparse
import math
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmark.common.arguments import BenchmarkParser, non_negative_int, positive_int
from benchmark.common.report import WrongData, world_size

if TYPE_CHECKING:  # arguments are checked before torch, which takes seconds, is imported
    import torch


def median(samples: Sequence[float]) -> float:
    """The median; of an even number of samples the mean of the middle two. Raises ValueError when there are none."""
    if not samples:
        raise ValueError("the median of no samples is not defined")
    return float(statistics.median(samples))


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that so many percent of all do not exceed; ValueError when there are none."""
    if not samples:
        raise ValueError("a percentile of no samples is not defined")
    return float(sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)])


def gather(value: Any) -> list[Any]:
    """Every rank's `value`. Collective."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def raise_if_wrong(what: str, complaint: str | None) -> None:
    """Raise WrongData on all ranks when one of them has a complaint about `what`. Collective."""
    for rank, text in enumerate(gather(complaint)):
        if text:
            raise WrongData(f"{what}: on rank {rank}, {text}")


def common_seeds(count: int) -> list[int]:
    """Random numbers of 60 bits, equal on all ranks. Collective."""
    return gather([secrets.randbits(60) for _ in range(count)])[0]


GUARD = 256  # bytes behind the destination that must stay as they are
POISON = 0xA5


def random_bytes(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """`count` random bytes (uint8), equal on all ranks for the same seed and kind of device."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    words = torch.randint(
        -(2**63), 2**63 - 1, ((count + 7) // 8,), dtype=torch.int64, generator=generator, device=device
    )
    return words.view(torch.uint8)[:count]


def prepare(src: torch.Tensor, dst: torch.Tensor, count: int, seed: int) -> None:
    """Fill `count` bytes of `src` (uint8) with this seed's data and poison `dst` that far and GUARD bytes beyond."""
    src[:count] = random_bytes(count, seed, src.device)
    dst[: count + GUARD] = POISON


def difference(dst: torch.Tensor, count: int, seed: int) -> str | None:
    """What is wrong with `dst` after `count` bytes of this seed's data were copied to it; None when nothing is."""
    import torch

    expected = random_bytes(count, seed, dst.device)
    if not torch.equal(dst[:count], expected):
        wrong = (dst[:count] != expected).nonzero().flatten()
        first = int(wrong[0])
        state = "was not written" if int(dst[first]) == POISON else f"is {int(dst[first])}"
        return f"{len(wrong)} of {count} bytes are wrong; byte {first} {state}, expected {int(expected[first])}"
    beyond = (dst[count : count + GUARD] != POISON).nonzero().flatten()
    if len(beyond):
        return f"byte {count + int(beyond[0])}, beyond the {count} bytes of the copy, was overwritten"
    return None


MODES = ("launch", "graph", "loop")
SIMULATED = "simulated: times mean nothing but order"
# (warmup, repeat) where the user gives none; in the simulator they only cost time.
ON_GPU, IN_SIMULATOR = (5, 20), (1, 3)


def add_timing_arguments(parser: BenchmarkParser) -> None:
    """Add `--timing`, `--warmup` and `--repeat`; make the parser itself with warmup=None, repeat=None."""
    parser.add_argument(
        "--timing",
        choices=MODES,
        default="graph",
        help="launches from Python, replays of a CUDA graph (default), or a loop inside the kernel; on a GPU",
    )
    text = "untimed runs before the timed ones ({}; in the simulator {})"
    parser.add_argument("--warmup", type=non_negative_int, metavar="N", help=text.format(ON_GPU[0], IN_SIMULATOR[0]))
    text = "timed runs, whose median is shown ({}; in the simulator {})"
    parser.add_argument("--repeat", type=positive_int, metavar="N", help=text.format(ON_GPU[1], IN_SIMULATOR[1]))


def repeated(call: Callable[[], object]) -> Callable[[int], None]:
    """What does the call so many times."""

    def launch(times: int) -> None:
        for _ in range(times):
            call()

    return launch


class Timer:
    """Times one operation at a time on this rank.

    Args:
        mode: one of MODES; the simulator has no graphs and launches instead.
        warmup: untimed repetitions.
        repeat: timed repetitions, each of which is a sample.
        on_gpu: whether kernels run on a GPU.
    """

    def __init__(self, mode: str, warmup: int, repeat: int, on_gpu: bool) -> None:
        if mode not in MODES:
            raise ValueError(f"timing mode {mode!r} is not one of {', '.join(MODES)}")
        self.mode = mode
        self.warmup, self.repeat = warmup, repeat
        self.on_gpu = on_gpu

    @classmethod
    def of(cls, args: argparse.Namespace, on_gpu: bool) -> Timer:
        """The timer for the arguments of `add_timing_arguments`."""
        warmup, repeat = ON_GPU if on_gpu else IN_SIMULATOR
        args.warmup = warmup if args.warmup is None else args.warmup
        args.repeat = repeat if args.repeat is None else args.repeat
        return cls(args.timing, args.warmup, args.repeat, on_gpu)

    def label(self, batch: int = 20) -> str:
        """How the times came about, for the report's header."""
        if not self.on_gpu:
            return f"wall clock, median of {self.repeat}; {SIMULATED}"
        ways = {
            "launch": "launches from Python",
            "graph": "kernels in a CUDA graph",
            "loop": "turns of a loop in the kernel",
        }
        return f"{self.mode}: median of {self.repeat} x {batch} {ways[self.mode]}"

    def measure(
        self, launch: Callable[[int], None], batch: int = 20, together: Callable[[], None] | None = None
    ) -> list[float]:
        """Samples in microseconds per operation.

        Args:
            launch: `launch(n)` starts one kernel, on torch's current stream, that does the operation `n` times.
            batch: operations of one sample on a GPU; 1 in the simulator.
            together: launches a barrier kernel before each sample, so that ranks that are timed at once start at once.
        """
        if not self.on_gpu:
            return self._wall_clock(launch)
        together = together or (lambda: None)
        run = self._prepared(launch, batch)
        for _ in range(self.warmup):
            run()
        samples = []
        for _ in range(self.repeat):
            samples.append(self._sample(run, together) / batch)
        return samples

    def interleaved(
        self, launches: dict[str, Callable[[int], None]], batch: int, together: Callable[[], None], plain: set[str]
    ) -> dict[str, list[float]]:
        """As `measure`, for several operations by turns, so that a clock that changes changes for all; by name.

        Args:
            plain: calls that are launched from Python, because they cannot be captured.
        """
        if not self.on_gpu:
            return {name: self._wall_clock(launch) for name, launch in launches.items()}
        runs = {}
        for name, launch in launches.items():
            runs[name] = (lambda launch=launch: launch(batch)) if name in plain else self._prepared(launch, batch)
            for _ in range(self.warmup):
                runs[name]()
        samples: dict[str, list[float]] = {name: [] for name in launches}
        for _ in range(self.repeat):
            for name, run in runs.items():
                samples[name].append(self._sample(run, together) / batch)
        return samples

    @staticmethod
    def _sample(run: Callable[[], None], together: Callable[[], None]) -> float:
        """Microseconds of one run."""
        import torch

        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()  # keeps the device busy until the timed run is in its queue: the host's delay is not part of it
        together()
        before.record()
        run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e3

    def _prepared(self, launch: Callable[[int], None], batch: int) -> Callable[[], None]:
        """A function that does the operation `batch` times."""
        import torch

        launch(1)  # loads the module, which a graph under capture may not
        torch.cuda.synchronize()
        if self.mode == "loop":
            return lambda: launch(batch)

        def launches() -> None:
            for _ in range(batch):
                launch(1)

        if self.mode == "launch":
            return launches
        graph = torch.cuda.CUDAGraph()
        # Other threads (NVSHMEM's, a proxy's) may use CUDA meanwhile without breaking the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launches()
        return graph.replay

    def _wall_clock(self, launch: Callable[[int], None]) -> list[float]:
        samples = []
        for turn in range(self.warmup + self.repeat):
            start = time.perf_counter()
            launch(1)
            if turn >= self.warmup:
                samples.append((time.perf_counter() - start) * 1e6)
        return samples


class DeviceTimer:
    """Times calls that all ranks make together, each with cold caches.

    Args:
        defaults: warmup and repeat on a GPU, where the user gives none.
    """

    def __init__(self, args: argparse.Namespace, on_gpu: bool, defaults: tuple[int, int]) -> None:
        import torch

        import tilescale_net as tsn
        from tilescale_net.kernels import p2p

        warmup, repeat = defaults if on_gpu else IN_SIMULATOR
        self.warmup, self.repeat = args.warmup or warmup, args.repeat or repeat
        self.on_gpu = on_gpu
        self._torch, self._tsn = torch, tsn
        if on_gpu:
            self._flush = torch.empty(256 << 20, dtype=torch.uint8, device=tsn.device())
            self._meet = p2p.meet()

    def _ready(self) -> None:
        """Cold caches, a device that is busy until the host has launched what follows, and ranks that start together."""
        self._flush.zero_()
        self._torch.cuda._sleep(1_500_000)
        self._meet()

    def kernel(self, prepare: Callable[[], Any], call: Callable[..., Any]) -> list[float]:
        """Microseconds on the device, per repetition; `prepare()` is not timed and its result goes to `call`."""
        if not self.on_gpu:
            return self._wall(prepare, call)
        torch, samples = self._torch, []
        for turn in range(self.warmup + self.repeat):
            given = prepare()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._ready()
            before.record()
            call(given)
            after.record()
            torch.cuda.synchronize()
            if turn >= self.warmup:
                samples.append(before.elapsed_time(after) * 1e3)
        return samples

    def whole(self, prepare: Callable[[], Any], call: Callable[..., Any]) -> list[float]:
        """Microseconds from the call on the host to the end of its work, on an idle device."""
        return self._wall(prepare, call)

    def _wall(self, prepare: Callable[[], Any], call: Callable[..., Any]) -> list[float]:
        samples = []
        for turn in range(self.warmup + self.repeat):
            given = prepare()
            self._tsn.barrier()
            start = time.perf_counter()
            call(given)
            self._tsn.synchronize()
            if turn >= self.warmup:
                samples.append((time.perf_counter() - start) * 1e6)
        return samples


def elapsed(launch: Callable[[], None], on_gpu: bool) -> float:
    """Microseconds of what `launch` starts, for launches that are long compared with their own cost."""
    if not on_gpu:
        start = time.perf_counter()
        launch()
        return (time.perf_counter() - start) * 1e6
    import torch

    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    launch()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e3


def gigabytes_per_second(count: int, microseconds: float) -> float:
    """Bandwidth in GB/s (10^9 bytes a second) of `count` bytes moved in `microseconds`."""
    return count / microseconds / 1e3
