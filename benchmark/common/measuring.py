"""Timing of device operations, statistics, and verification of the timed operations' data.

A launch from Python costs about 5 us, more than a small copy takes; `graph` leaves 0.8 us of it, `loop` nothing.
Compare only figures of one timing. In the simulator times come from the wall clock and show only order.
"""

from __future__ import annotations

import argparse
import math
import secrets
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import partial
from typing import Any, TypeVar

import tilescale_net as tsn
from benchmark.common.arguments import IN_SIMULATOR, ON_GPU, TIMINGS
from benchmark.common.modules import dist, p2p, torch
from benchmark.common.report import WrongData, world_size

Key = TypeVar("Key", bound=Hashable)


def median(samples: Sequence[float]) -> float:
    """The median; of an even number of samples the mean of the middle two. Raises ValueError when there are none."""
    if not samples:
        raise ValueError("the median of no samples is not defined")
    return float(statistics.median(samples))


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that this percentage of all does not exceed; ValueError when there are none."""
    if not samples:
        raise ValueError("a percentile of no samples is not defined")
    return float(sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)])


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median by name."""
    return {name: median(values) for name, values in samples.items()}


def gigabytes_per_second(count: int, microseconds: float) -> float:
    """Bandwidth in GB/s (10^9 bytes a second) of `count` bytes moved in `microseconds`."""
    return count / microseconds / 1e3


def gather(value: Any) -> list[Any]:
    """Every rank's `value`. Collective."""
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def slowest_ranks(samples: dict[Key, list[float]]) -> dict[Key, list[float]]:
    """For each name, the samples of the rank with the highest median. Collective."""
    everyone = gather(samples)
    return {key: max((s[key] for s in everyone), key=median) for key in samples}


# -- data -------------------------------------------------------------------------------------------------------------

GUARD = 256  # bytes behind the destination that must stay unchanged
POISON = 0xA5


def raise_if_wrong(what: str, complaint: str | None) -> None:
    """Raise WrongData on all ranks if one of them has an error of `what`. Collective."""
    for rank, text in enumerate(gather(complaint)):
        if text:
            raise WrongData(f"{what}: on rank {rank}, {text}")


def common_seeds(count: int) -> list[int]:
    """Random numbers of 60 bits, equal on all ranks. Collective."""
    return gather([secrets.randbits(60) for _ in range(count)])[0]


def random_bytes(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """`count` random bytes (uint8), equal on all ranks for the same seed and kind of device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    size = ((count + 7) // 8,)
    words = torch.randint(-(2**63), 2**63 - 1, size, dtype=torch.int64, generator=generator, device=device)
    return words.view(torch.uint8)[:count]


def normal_numbers(shape: Sequence[int], seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal random numbers, equal on all ranks for the same seed and kind of device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.empty(tuple(shape), dtype=dtype, device=device).normal_(generator=generator)


def prepare(src: torch.Tensor, dst: torch.Tensor, count: int, seed: int) -> None:
    """Fill `count` bytes of `src` (uint8) with this seed's data and poison `dst` that far and GUARD bytes beyond."""
    src[:count] = random_bytes(count, seed, src.device)
    dst[: count + GUARD] = POISON


def difference(dst: torch.Tensor, count: int, seed: int) -> str | None:
    """The error of `dst` after a copy of `count` bytes of this seed's data; None without one."""
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


# -- time -------------------------------------------------------------------------------------------------------------

SIMULATED = "simulated: times mean nothing but order"


def in_turn(samplers: Mapping[Key, Callable[[], float]], warmup: int, repeat: int) -> dict[Key, list[float]]:
    """Samples of several operations in turn, so that clock changes affect all; the first turns do not count."""
    samples: dict[Key, list[float]] = {key: [] for key in samplers}
    for turn in range(warmup + repeat):
        for key, sample in samplers.items():
            figure = sample()
            if turn >= warmup:
                samples[key].append(figure)
    return samples


def leave_default_stream(world: Any) -> None:
    """If data between nodes are staged, run the block on another stream: on the default one each launch waits for its
    kernel, see `CudaKernel._supervised`."""
    if world.proxy is not None and world.device_kind == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())


def wall_us(call: Callable[[], object]) -> float:
    """Microseconds of the host's clock until the call returns."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def host_and_wall(call: Callable[[], object], times: int) -> tuple[float, float]:
    """Microseconds per call of a row of calls, which all ranks make at once: until the last has returned, and until
    their work has ended. Collective."""
    tsn.synchronize()
    tsn.barrier()
    start = time.perf_counter()
    for _ in range(times):
        call()
    host = time.perf_counter() - start
    tsn.synchronize()
    wall = time.perf_counter() - start
    return host / times * 1e6, wall / times * 1e6


def device_us(launch: Callable[[], object], on_gpu: bool = True) -> float:
    """Microseconds of the work of `launch`: between two events on a GPU, else of the host's clock."""
    if not on_gpu:
        return wall_us(launch)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    launch()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e3


def captured(call: Callable[[], object], times: int, stream: Any = None) -> Callable[[], None]:
    """The replay of a CUDA graph with this number of calls; the call has been made before."""
    graph = torch.cuda.CUDAGraph()
    # Other threads (NVSHMEM's, a proxy's) may use CUDA meanwhile without breaking the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(times):
            call()
    return graph.replay


def repeated(call: Callable[[], object]) -> Callable[[int], None]:
    """A function that repeats the call."""

    def launch(times: int) -> None:
        for _ in range(times):
            call()

    return launch


def start_together(on_gpu: bool) -> Callable[[], None]:
    """Launches a barrier of all ranks on a GPU; hosts leave a host barrier too far apart for small kernels."""
    return p2p.meet() if on_gpu else lambda: None


class Timer:
    """Times one operation at a time on this rank. `mode`: one of TIMINGS; the simulator has no graphs and launches
    instead. `warmup`: untimed repetitions. `repeat`: timed repetitions, each of which is a sample. `on_gpu`: whether
    kernels run on a GPU."""

    def __init__(self, mode: str, warmup: int, repeat: int, on_gpu: bool) -> None:
        if mode not in TIMINGS:
            raise ValueError(f"timing mode {mode!r} is not one of {', '.join(TIMINGS)}")
        self.mode = mode
        self.warmup, self.repeat = warmup, repeat
        self.on_gpu = on_gpu
        self._meet: Callable[[], None] | None = None

    @classmethod
    def of(cls, args: argparse.Namespace, on_gpu: bool) -> Timer:
        """The timer for the arguments of a parser with `timing`."""
        warmup, repeat = ON_GPU if on_gpu else IN_SIMULATOR
        args.warmup = warmup if args.warmup is None else args.warmup
        args.repeat = repeat if args.repeat is None else args.repeat
        return cls(args.timing, args.warmup, args.repeat, on_gpu)

    def label(self, batch: int = 20) -> str:
        """Description of the timing, for the report's header."""
        if not self.on_gpu:
            return f"wall clock, median of {self.repeat}; {SIMULATED}"
        ways = dict(zip(TIMINGS, ("launches from Python", "kernels in a CUDA graph", "turns of a loop in the kernel")))
        return f"{self.mode}: median of {self.repeat} x {batch} {ways[self.mode]}"

    def measure(
        self, launch: Callable[[int], None], batch: int = 20, together: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Samples in microseconds per operation. `launch`: `launch(n)` starts one kernel, on torch's current stream,
        that does the operation `n` times. `batch`: operations of one sample on a GPU; 1 in the simulator. `together`:
        launches a barrier kernel before each sample, so that ranks that are timed at once start at once."""
        return self.interleaved({"": launch}, batch, together)[""]

    def interleaved(
        self,
        launches: Mapping[str, Callable[[int], None]],
        batch: int,
        together: Callable[[], None] = lambda: None,
        plain: Set[str] = frozenset(),
    ) -> dict[str, list[float]]:
        """As `measure`, for several operations in turn; by name. `plain`: calls that are launched from Python, because
        they cannot be captured."""
        if not self.on_gpu:
            walls = {name: partial(wall_us, partial(launch, 1)) for name, launch in launches.items()}
            return in_turn(walls, self.warmup, self.repeat)
        runs = {}
        for name, launch in launches.items():
            runs[name] = partial(launch, batch) if name in plain else self._prepared(launch, batch)
            for _ in range(self.warmup):
                runs[name]()

        def sample(run: Callable[[], None]) -> float:
            run()  # keeps the device busy until the timed run is queued, which excludes the host's delay
            together()
            return device_us(run) / batch

        return in_turn({name: partial(sample, run) for name, run in runs.items()}, 0, self.repeat)

    def slowest(
        self, calls: Mapping[str, Callable[[], object]], batch: int, plain: Set[str] = frozenset()
    ) -> dict[str, list[float]]:
        """As `interleaved`, for calls that all ranks make at once; of each, the samples of the slowest rank. Collective."""
        self._meet = self._meet or start_together(self.on_gpu)
        launches = {name: repeated(call) for name, call in calls.items()}
        return slowest_ranks(self.interleaved(launches, batch, self._meet, plain))

    def _prepared(self, launch: Callable[[int], None], batch: int) -> Callable[[], None]:
        """A function that does the operation `batch` times."""
        launch(1)  # loads the module, which a graph under capture may not
        torch.cuda.synchronize()
        if self.mode == "loop":
            return partial(launch, batch)
        one = partial(launch, 1)
        return partial(repeated(one), batch) if self.mode == "launch" else captured(one, batch)


class DeviceTimer:
    """Times calls that all ranks make together, each with cold caches. `defaults`: warmup and repeat on a GPU, where
    default."""

    def __init__(self, args: argparse.Namespace, on_gpu: bool, defaults: tuple[int, int]) -> None:
        warmup, repeat = defaults if on_gpu else IN_SIMULATOR
        self.warmup, self.repeat = args.warmup or warmup, args.repeat or repeat
        self.on_gpu = on_gpu
        self._meet = start_together(on_gpu)
        if on_gpu:
            self._flush = torch.empty(256 << 20, dtype=torch.uint8, device=tsn.device())

    def label(self) -> str:
        """Description of the timing, for the report's header."""
        return f"median of {self.repeat}" + ("" if self.on_gpu else f"; {SIMULATED}")

    def kernel(self, call: Callable[..., Any], prepare: Callable[[], Any] = lambda: None) -> list[float]:
        """Microseconds on the device, per repetition; `prepare()` is not timed and its result goes to `call`."""
        if not self.on_gpu:
            return self.whole(call, prepare)

        def sample() -> float:
            prepared = prepare()
            # Cold caches, a device busy until the host has launched the call, ranks that start together.
            self._flush.zero_()
            torch.cuda._sleep(1_500_000)
            self._meet()
            return device_us(lambda: call(prepared))

        return in_turn({"": sample}, self.warmup, self.repeat)[""]

    def whole(self, call: Callable[..., Any], prepare: Callable[[], Any] = lambda: None) -> list[float]:
        """Microseconds from the call on the host to the end of its work, on an idle device."""

        def timed(given: Any) -> None:
            call(given)
            tsn.synchronize()

        def sample() -> float:
            prepared = prepare()
            tsn.barrier()
            return wall_us(partial(timed, prepared))

        return in_turn({"": sample}, self.warmup, self.repeat)[""]
