"""Shared parts of benchmarks of collectives: flags, implementations, verified measurement, the table.

Sizes are bytes per rank of the larger tensor, as in NCCL's tests. Bus bandwidth is the load of the busiest link in one
direction: size / time * (ranks - 1) / ranks, twice that for an all-reduce.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import tilescale_net as tsn
from benchmark.common.arguments import CALLS, BenchmarkParser, int_list, one_of
from benchmark.common.measuring import (
    POISON,
    Timer,
    common_seeds,
    gather,
    gigabytes_per_second,
    leave_default_stream,
    median,
    percentile,
    raise_if_wrong,
    random_bytes,
    repeated,
    start_together,
)
from benchmark.common.modules import dist, torch
from benchmark.common.peers import Peer, nccl_over_nodes, nccl_version
from benchmark.common.plot import format_bytes
from benchmark.common.report import Column, Report, WrongData, rate, us, world_size
from tilescale_net.runtime import settings

# Flags with several values, each measured; also arguments of the kernels' classes.
CHOICES = ("algorithm", "threads", "blocks", "engine", "unroll")
# The same without the setting of TSN_DEPENDENT_LAUNCH.
DEPENDENT = "dependent"
DTYPES = ("bfloat16", "float16", "float32")
# Algorithms whose results are not the sums rounded once.
LOSSY = ("fp8",)


def parse(
    description: str,
    extend: Callable[[BenchmarkParser], object] | None = None,
    sizes: str = "16K..64M",
    simulated: str = "16K..256K",
    blocks: int = 16,
    engines: bool = True,
    algorithms: Sequence[str] = (),
) -> argparse.Namespace:
    """The arguments of a collective's benchmark; exits with 2 if they are wrong. `extend`: adds flags.
    `sizes`, `simulated`, `blocks`: defaults on a GPU and in the simulator. `engines`: whether the kernels have a choice
    of engine, and of vectors in flight. `algorithms`: beside "auto", which chooses by size and place."""
    parser = BenchmarkParser(description, sizes=sizes, simulated=simulated, timing=CALLS, check=True)
    parser.option("--threads", int_list(32, 1024), [512], "threads per block")
    parser.option("--blocks", int_list(1, 1024), [blocks], "blocks")
    parser.set_defaults(engine=["auto"], unroll=[None], dependent=[None])
    if engines:
        parser.option("--engine", one_of("auto", "ldst", "bulk"), ["auto"], "of copies")
        parser.option("--unroll", int_list(1, 64), [None], "16-byte accesses that a thread has in flight (automatic)")
    names = ("auto", *algorithms)
    parser.option("--algorithm", one_of(*names), ["auto"], f"of {', '.join(names)} (auto: by size)")
    parser.flag("--no-nccl", "leave NCCL out")
    if extend:
        extend(parser)
    args = parser.parse_args()
    parser.require_two_ranks("a collective needs")
    return args


def nccl_group(report: Report, args: argparse.Namespace) -> Any:
    """A process group that uses NCCL, or None without NCCL or with --no-nccl. Collective."""
    if args.no_nccl or not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    if tsn.world().device_kind != "cuda":
        return None
    report.environment["NCCL"] = nccl_version() + nccl_over_nodes()
    return dist.new_group(backend="nccl", device_id=tsn.device())


@contextlib.contextmanager
def dependent_launch(wanted: int | None) -> Iterator[None]:
    """Set TSN_DEPENDENT_LAUNCH to 1 or 0 for objects made and first called within; None: unchanged."""
    name = settings.DEPENDENT_LAUNCH.name
    before = os.environ.get(name)
    if wanted is not None:
        os.environ[name] = str(wanted)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


class CollectiveCase:
    """One collective at one size: makes the data, calls the implementations, computes the expected result.

    Attributes:
        nbytes: bytes of the larger tensor.
        passes: how often the bytes of the other ranks' parts pass the links.
        heap: the symmetric tensors.
        in_place: the peers overwrite their input, so only a single call of theirs can be verified.
        peers: implementations beside ours and NCCL.
    """

    nbytes: int
    heap: list[Any]
    passes = 1
    in_place = False
    peers: Sequence[Peer] = ()
    _x: torch.Tensor
    _out: torch.Tensor

    def __init__(self) -> None:
        self._n, self._rank = tsn.size(), tsn.rank()

    def _data(self, seed: int, rank: int) -> torch.Tensor:
        """A rank's input, of bytes."""
        return random_bytes(self._x.numel(), seed + rank, self._x.device).view(self._x.shape)

    def fill(self, seed: int) -> None:
        """Fresh random input on every rank, and a cleared output."""
        self._x.copy_(self._data(seed, self._rank))
        self._out.fill_(POISON)

    def ours(self, choices: dict[str, Any]) -> tuple[Callable[[], None], Callable[[], None]]:
        """A call of our kernel, and a function that frees it. Collective."""
        raise NotImplementedError

    def nccl(self, group: Any) -> Callable[[], object]:
        """The same call of NCCL, on the same tensors."""
        raise NotImplementedError

    def peer(self, peer: Peer, group: Any) -> Callable[[], object] | str:
        """The same call of another implementation, or the reason why there is none. Collective."""
        raise NotImplementedError

    def received(self, seed: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """The data from each rank, and the expected data."""
        raise NotImplementedError

    def difference(self, seed: int) -> str | None:
        """The error of the output, or None."""
        for rank, (found, expected) in enumerate(self.received(seed)):
            if wrong := int((found != expected).sum()):
                return f"{wrong} of {found.numel()} bytes from rank {rank} are wrong"
        return None

    def free(self) -> None:
        """Free symmetric memory. Collective."""
        for tensor in self.heap:
            tsn.free(tensor)


def wrong_sums(
    found: torch.Tensor,
    summands: Iterable[torch.Tensor],
    exact: bool,
    finish: Callable[[torch.Tensor], torch.Tensor] = lambda total: total,
    error: float = 0.0,
) -> str | None:
    """The error of a sum against one in the order of the ranks: any bit, or more than the order explains. `finish`:
    applied to the float32 sum before it is rounded to the dtype. `error`: for lossy algorithms, the limit of the root
    mean square of all errors, relative to the sums'."""
    total = torch.zeros(found.shape, dtype=torch.float32, device=found.device)
    for summand in summands:
        total += summand.float()
    total = finish(total)
    if error:
        mean = lambda x: float(x.double().pow(2).mean().sqrt())  # noqa: E731
        off = mean(found.float() - total) / mean(total)
        return None if off <= error else f"sums are off by {off:.1%} in the mean; {error:.0%} is the most"
    tolerance = 0 if exact else 0.05
    close = torch.isclose(found.float(), total.to(found.dtype).float(), rtol=tolerance, atol=tolerance)
    wrong = int((~close).sum())
    return f"{wrong} of {found.numel()} sums are wrong" if wrong else None


def measure(
    case: CollectiveCase,
    call: Callable[[], object],
    timer: Timer,
    together: Callable[[], None],
    check: bool,
    what: str,
    alone: bool = False,
) -> list[float]:
    """Samples of the slowest rank, in microseconds. Raises WrongData on all ranks when one of them found wrong data.
    `alone`: the call works in place, so it is verified once, before the timing."""
    (seed,) = common_seeds(1)
    case.fill(seed)
    if check and alone:
        call()
        raise_if_wrong(what, case.difference(seed))
    tsn.barrier()
    samples = timer.measure(repeated(call), max(1, min(20, 20 * (4 << 20) // max(1, case.nbytes))), together)
    tsn.barrier()
    raise_if_wrong(what, case.difference(seed) if check and not alone else None)
    return max(gather(samples), key=median)


def begin(
    name: str, args: argparse.Namespace, heap: int | str, **header: str
) -> tuple[Report, Any, Callable[..., list[float]]]:
    """The report, with these lines in its header; NCCL's group or None; and `measure` without timer, barrier and check.
    Joins a world with this heap. Collective."""
    report = Report(name, args)
    world = tsn.init(heap)
    leave_default_stream(world)
    timer = Timer.of(args, world.device_kind == "cuda")
    group = nccl_group(report, args)
    report.environment |= header | {
        "data": "not verified" if args.no_check else "verified",
        "timing": timer.label() + ", slowest rank",
    }
    together = start_together(timer.on_gpu)

    def measured(
        case: Any, call: Callable[[], object], what: str, alone: bool = False, check: bool = True
    ) -> list[float]:
        return measure(case, call, timer, together, check and not args.no_check, what, alone)

    return report, group, measured


def _of_peers(
    case: CollectiveCase, group: Any, measure: Callable[..., list[float]], report: Report
) -> dict[str, list[float]]:
    """Samples of the case's peers by key; missing, unsuitable or wrong ones are noted by name."""
    found = {}
    for peer in case.peers:
        call = case.peer(peer, group)
        try:
            if not isinstance(call, str):
                found[peer.key] = measure(call, peer.title)
                continue
        except (WrongData, RuntimeError) as err:
            call = (str(err) or type(err).__name__).splitlines()[0]
        report.environment.setdefault(peer.title, f"not everywhere; {call}")
    return found


def run(
    name: str,
    args: argparse.Namespace,
    case_of: Callable[[int], CollectiveCase],
    heap_factor: float = 2.5,
    peers: Sequence[Peer] = (),
) -> None:
    """Measure ours, and NCCL and its like on GPUs, at every size and geometry; print the report. `case_of`: makes the
    case for a size in bytes; collective. `heap_factor`: heap bytes per byte of the largest size. `peers`:
    implementations beside ours and NCCL, on one node: they need mapped memory."""
    report, group, measured = begin(name, args, int(max(args.sizes) * heap_factor) + (96 << 20))
    world = tsn.world()
    peers = peers if world.topology.nodes == 1 else ()
    report.environment["path"] = "mapped memory" if world.topology.nodes == 1 else f"{world.topology.nodes} nodes"
    if world.proxy is not None:
        found = world.proxy
        staged = ", staged" if found.staged else ""
        report.environment["proxy"] = f"{found.properties['provider']}{staged}, threads for a PE: {found.peer_threads}"
    varying = [Column(k, k.capitalize()) for k in (*CHOICES, DEPENDENT) if len(getattr(args, k)) > 1]
    columns = [us("us", "Time"), us("p99", "p99", plotted=False), Column("algbw", "Alg BW", unit="GB/s")]
    columns += [rate("busbw", "Bus BW", "GB/s")]
    if group is not None:
        columns += [us("nccl_us", "NCCL"), rate("nccl_busbw", "NCCL Bus BW", "GB/s"), Column("ratio", "x NCCL", ".2f")]
        columns += [us("symm_mem_us", "Symm. memory")] if peers else []
    sizes = Column("bytes", "Size", ",d", unit="Bytes")
    table = report.table(name, [sizes, *varying], columns)
    table.notes.append("p99: of the samples, each of which is a mean over the calls of a batch.")
    others = None
    if group is not None and peers:
        ours = [us("us", "tilescale_net"), us("nccl_us", "NCCL")]
        others = report.table("peers", [sizes], [*ours, *(us(peer.key, peer.title) for peer in peers)])
        others.notes.append("tilescale_net: its best of the table above that is not lossy.")
    for size in report.progress(args.sizes, "sizes", format_bytes):
        case = case_of(size)
        case.peers = peers
        theirs: list[float] = []
        ways: dict[str, list[float]] = {}
        best: list[float] = []
        if group is not None:

            def peer(call: Callable[[], object], what: str, case: Any = case, size: int = size) -> list[float]:
                return measured(case, call, f"{what} {name}, {size} bytes", alone=case.in_place)

            theirs = peer(case.nccl(group), "NCCL")
            ways = _of_peers(case, group, peer, report)
        for *values, dependent in itertools.product(*(getattr(args, choice) for choice in (*CHOICES, DEPENDENT))):
            choices = dict(zip(CHOICES, values))
            with dependent_launch(dependent):
                call, free = case.ours(choices)
                what = f"{name} of {size} bytes, {', '.join(f'{choice} {value}' for choice, value in choices.items())}"
                samples = measured(case, call, what)
            free()
            row = {"bytes": case.nbytes, **choices, DEPENDENT: dependent, **_figures(case, samples, theirs, ways)}
            table.add(row, {"us": samples, "nccl_us": theirs})
            if choices["algorithm"] not in LOSSY and (not best or median(samples) < median(best)):
                best = samples
        if others is not None:
            of_all = {"us": best, "nccl_us": theirs, **ways}
            figures = {key: median(values) for key, values in of_all.items() if values}
            others.add({"bytes": case.nbytes, **figures}, of_all)
        case.free()
    report.finish()


def _figures(
    case: CollectiveCase, samples: list[float], theirs: list[float], ways: dict[str, list[float]]
) -> dict[str, float]:
    per_second = partial(gigabytes_per_second, case.nbytes)
    share, time = case.passes * (world_size() - 1) / world_size(), median(samples)
    figures = {"us": time, "p99": percentile(samples, 99), "algbw": per_second(time), "busbw": per_second(time) * share}
    if theirs:
        other = median(theirs)
        figures |= {"nccl_us": other, "nccl_busbw": per_second(other) * share, "ratio": other / time}
    if torchs := [median(ways[key]) for key in ("symm_one_us", "symm_two_us") if key in ways]:
        figures["symm_mem_us"] = min(torchs)
    return figures
