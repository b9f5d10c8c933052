"""What the benchmarks of collective kernels share: flags, implementations, verified measurement, the table.

Sizes are bytes per rank of the larger tensor, as in NCCL's own tests. Bus bandwidth is what the busiest link must carry
in one direction: size / time * (ranks - 1) / ranks, twice that of an all-reduce.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmark.common.arguments import BenchmarkParser, int_list, one_of
from benchmark.common.measuring import (
    Timer,
    add_timing_arguments,
    common_seeds,
    gather,
    gigabytes_per_second,
    median,
    percentile,
    raise_if_wrong,
    repeated,
)
from benchmark.common.plot import format_bytes
from benchmark.common.report import Column, Report, world_size

# Flags whose values are tried one after the other, which are arguments of the kernels' classes too.
CHOICES = ("algorithm", "threads", "blocks", "engine", "unroll")


def parse(
    description: str,
    extend: Callable[[BenchmarkParser], object] | None = None,
    sizes: str = "16K..64M",
    simulated: str = "16K..256K",
    blocks: int = 16,
    engines: bool = True,
    algorithms: Sequence[str] = (),
) -> argparse.Namespace:
    """The arguments of a collective's benchmark; exits with 2 when they are wrong.

    Args:
        extend: adds flags of its own.
        sizes, simulated, blocks: defaults on a GPU and in the simulator.
        engines: whether the kernels have a choice of engine, and of vectors in flight.
        algorithms: beside "auto", which chooses by size and place.
    """
    parser = BenchmarkParser(description, warmup=None, repeat=None, sizes=sizes, simulated=simulated)
    add_timing_arguments(parser)
    add = parser.add_argument
    add("--threads", type=int_list(32, 1024), default=[512], metavar="LIST", help="threads per block (512)")
    add("--blocks", type=int_list(1, 1024), default=[blocks], metavar="LIST", help=f"blocks ({blocks})")
    if engines:
        add("--engine", type=one_of("auto", "ldst", "bulk"), default=["auto"], metavar="LIST", help="of copies (auto)")
        add(
            "--unroll",
            type=int_list(1, 64),
            default=[None],
            metavar="LIST",
            help="16-byte accesses that a thread has in flight",
        )
    else:
        parser.set_defaults(engine=["auto"], unroll=[None])
    names = ("auto", *algorithms)
    add(
        "--algorithm",
        type=one_of(*names),
        default=["auto"],
        metavar="LIST",
        help=f"of {', '.join(names)} (auto: by size)",
    )
    add("--no-check", action="store_true", help="do not verify the data")
    add("--no-nccl", action="store_true", help="leave NCCL out")
    if extend:
        extend(parser)
    args = parser.parse_args()
    if args.timing == "loop":
        parser.error("--timing loop is not offered: a collective is one kernel per call; use graph or launch")
    if world_size() < 2:
        parser.error("a collective needs two ranks or more; start it with GPUS=2 bash launch.sh …")
    return args


def nccl_group(report: Report, args: argparse.Namespace) -> Any:
    """A process group that uses NCCL, or None without NCCL or when none is wanted. Collective."""
    import torch
    import torch.distributed as dist

    if args.no_nccl or not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    import tilescale_net as tsn

    if tsn.world().device_kind != "cuda":
        return None
    report.environment["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return dist.new_group(backend="nccl", device_id=tsn.device())


class CollectiveCase:
    """One collective at one size: makes the data, calls the implementations, computes the expected result.

    Attributes:
        nbytes: bytes of the larger tensor.
        passes: how often the bytes of the other ranks' parts pass the links.
        heap: the symmetric tensors.
        in_place: the peers write their result over their input, so that only a single call of theirs can be verified.
    """

    nbytes: int
    heap: list[Any]
    passes = 1
    in_place = False

    def fill(self, seed: int) -> None:
        """Fresh random input on every rank, and an output that holds none of it."""
        raise NotImplementedError

    def ours(self, geometry: dict[str, Any]) -> tuple[Callable[[], None], Callable[[], None]]:
        """A call of our kernel, and what frees it. Collective."""
        raise NotImplementedError

    def nccl(self, group: Any) -> Callable[[], None]:
        """The same call of NCCL, on the same tensors."""
        raise NotImplementedError

    def symmetric(self, group: Any) -> dict[str, Callable[[], None]]:
        """The same call of torch's symmetric memory, in all its ways. Collective; empty without it."""
        return {}

    def difference(self, seed: int) -> str | None:
        """What is wrong with the output, or None."""
        raise NotImplementedError

    def free(self) -> None:
        """Give symmetric memory back. Collective."""
        import tilescale_net as tsn

        for tensor in self.heap:
            tsn.free(tensor)


def wrong_sums(found: Any, summands: Iterable[Any], exact: bool) -> str | None:
    """What is wrong with a sum, next to that in the order of the ranks: any bit, or what order cannot explain."""
    import torch

    total = torch.zeros(found.shape, dtype=torch.float32, device=found.device)
    for summand in summands:
        total += summand.float()
    tolerance = 0 if exact else 0.05
    close = torch.isclose(found.float(), total.to(found.dtype).float(), rtol=tolerance, atol=tolerance)
    wrong = int((~close).sum())
    return f"{wrong} of {found.numel()} sums are wrong" if wrong else None


def measure(
    case: CollectiveCase, call: Callable[[], None], timer: Timer, together: Any, check: bool, what: str
) -> list[float]:
    """Samples of the slowest rank, in microseconds. Raises WrongData on all ranks when one of them found wrong data."""
    import tilescale_net as tsn

    (seed,) = common_seeds(1)
    case.fill(seed)
    tsn.barrier()
    batch = max(1, min(20, 20 * (4 << 20) // max(1, case.nbytes)))
    samples = timer.measure(repeated(call), batch, together)
    tsn.barrier()
    raise_if_wrong(what, case.difference(seed) if check else None)
    return max(gather(samples), key=median)


def _measure_peer(
    case: CollectiveCase, call: Callable[[], None], timer: Timer, together: Any, check: bool, what: str
) -> list[float]:
    """As `measure`; what works in place is verified in a call of its own."""
    if check and case.in_place:
        seed = 1
        case.fill(seed)
        call()
        raise_if_wrong(what, case.difference(seed))
    return measure(case, call, timer, together, check and not case.in_place, what)


def _symmetric(case: CollectiveCase, group: Any, measure: Callable[..., Any], report: Report) -> dict[str, list[float]]:
    """Samples of torch's symmetric memory by way; what cannot run is noted."""
    samples = {}
    try:
        calls = case.symmetric(group)
    except Exception as err:  # it is private to torch, and not on all machines
        report.environment["torch symmetric memory"] = f"not measured; {str(err)[:80]}"
        return {}
    for way, call in calls.items():
        samples[way] = measure(call, f"torch symmetric memory, {way}")
    return samples


def run(
    name: str, args: argparse.Namespace, case_of: Callable[[int], CollectiveCase], heap_factor: float = 2.5
) -> None:
    """Measure ours, and NCCL on GPUs, at every size and geometry; print the report.

    Args:
        case_of: makes the case for a size in bytes; collective.
        heap_factor: heap bytes per byte of the largest size.
    """
    import tilescale_net as tsn

    report = Report(name, args)
    world = tsn.init(int(max(args.sizes) * heap_factor) + (96 << 20))
    timer = Timer.of(args, world.device_kind == "cuda")
    group = nccl_group(report, args)
    together = None
    if timer.on_gpu:
        from tilescale_net.kernels import p2p

        together = p2p.meet()
    report.environment |= {
        "path": "mapped memory" if world.topology.nodes == 1 else f"{world.topology.nodes} nodes",
        "data": "not verified" if args.no_check else "verified",
        "timing": timer.label() + ", slowest rank",
    }
    table = report.table(name, _keys(args), _columns(group is not None, name))
    table.notes.append("p99: of the samples, each of which is a mean over the calls of a batch.")
    for size in report.progress(args.sizes, "sizes", format_bytes):
        case = case_of(size)
        theirs, ways = None, {}
        if group is not None:

            def peer(call: Callable[..., Any], what: str, case: Any = case, size: int = size) -> Any:
                return _measure_peer(case, call, timer, together, not args.no_check, f"{what} {name}, {size} bytes")

            theirs = peer(case.nccl(group), "NCCL")
            ways = _symmetric(case, group, peer, report)
        for values in itertools.product(*(getattr(args, choice) for choice in CHOICES)):
            choices = dict(zip(CHOICES, values))
            call, free = case.ours(choices)
            what = f"{name} of {size} bytes, {', '.join(f'{choice} {value}' for choice, value in choices.items())}"
            samples = measure(case, call, timer, together, not args.no_check, what)
            free()
            row = {"bytes": case.nbytes, **choices}
            table.add(row | _figures(case, samples, theirs, ways), {"us": samples, "nccl_us": theirs or []})
        case.free()
    report.finish()
    tsn.finalize()


def _keys(args: argparse.Namespace) -> list[Column]:
    varying = [Column(k, k.capitalize()) for k in CHOICES if len(getattr(args, k)) > 1]
    return [Column("bytes", "Size", ",d", unit="Bytes"), *varying]


def _columns(with_nccl: bool, name: str) -> Sequence[Column]:
    columns = [
        Column("us", "Time", better="lower", unit="us"),
        Column("p99", "p99", better="lower", unit="us", plotted=False),
        Column("algbw", "Alg BW", unit="GB/s"),
        Column("busbw", "Bus BW", better="higher", unit="GB/s"),
    ]
    if with_nccl:
        columns += [
            Column("nccl_us", "NCCL", better="lower", unit="us"),
            Column("nccl_busbw", "NCCL Bus BW", better="higher", unit="GB/s"),
            Column("ratio", "x NCCL", ".2f"),
        ]
        if name == "all_reduce":
            columns.append(Column("symm_mem_us", "Symm. memory", better="lower", unit="us"))
    return columns


def _figures(
    case: CollectiveCase, samples: list[float], theirs: list[float] | None, ways: dict[str, Any]
) -> dict[str, Any]:
    nbytes, share = case.nbytes, case.passes * (world_size() - 1) / world_size()
    time = median(samples)
    rate = gigabytes_per_second(nbytes, time)
    figures = {"us": time, "p99": percentile(samples, 99), "algbw": rate, "busbw": rate * share}
    if theirs:
        other = median(theirs)
        figures |= {
            "nccl_us": other,
            "nccl_busbw": gigabytes_per_second(nbytes, other) * share,
            "ratio": other / time,
        }
    if ways:
        figures["symm_mem_us"] = min(median(s) for s in ways.values())
    return figures
