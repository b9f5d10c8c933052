"""Timing of device operations: host launches, replays of a CUDA graph, or a loop inside the kernel.

A launch from Python costs about 5 us, more than a small copy takes; `graph` leaves 0.8 us of it, `loop` nothing. Whoever
is compared must be timed in the same way. In the simulator the wall clock is read; such times show order and nothing else.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from benchmark.common.arguments import BenchmarkParser, non_negative_int, positive_int

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


class Timer:
    """Times one operation at a time on this rank.

    Args:
        mode: one of MODES; the simulator knows no graphs and launches instead.
        warmup: untimed repetitions.
        repeat: timed repetitions, each of which is a sample.
        on_gpu: whether kernels run on a GPU.
    """

    def __init__(self, mode: str, warmup: int, repeat: int, on_gpu: bool):
        if mode not in MODES:
            raise ValueError(f"timing mode {mode!r} is not one of {', '.join(MODES)}")
        self.mode = mode
        self.warmup, self.repeat = warmup, repeat
        self.on_gpu = on_gpu

    @classmethod
    def of(cls, args: argparse.Namespace, on_gpu: bool) -> Timer:
        """The timer that the arguments of `add_timing_arguments` ask for."""
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
            plain: those that are launched from Python, because they cannot be captured.
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
