"""What calls of an expert-parallel layer take: each kernel by number of blocks, pairs in a CUDA graph, and the host's part.

    GPUS=2 bash launch.sh benchmark/moe_calls.py
    GPUS=2 bash launch.sh benchmark/moe_calls.py --mode throughput --layout expert --dtype fp8 --blocks 8,12,24

Kernels (dispatch, the same with a layout that is known, combine) are timed on the device with cold caches, ranks starting
together. Pairs of dispatch and combine follow one another with warm caches: in a CUDA graph, and launched from Python, where
host is what the calling thread takes for a pair and wall what it takes until all of them have ended. moe_all_to_all.py has
the peers.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from benchmark.common import Column, Report, is_rank_zero, median, positive_int, world_size
from benchmark.common.arguments import MOE_TIMING, MoeParser, on_gpu
from benchmark.common.measuring import SIMULATED, DeviceTimer, gather

BENCH = dict(ranks=0, quick="--mode throughput --layout rank --dtype bf16 --blocks 2 --warmup 1 --repeat 2")

PAIRS = 50  # of dispatch and combine, launched without waiting
IN_GRAPH = 10  # pairs in a CUDA graph
SAMPLES = 7  # of pairs
BLOCKS = {True: [8, 12, 24], False: [2]}  # of throughput mode, on a GPU and in the simulator
COLUMNS = ("dispatch", "cached", "agreeing", "combine", "graph", "host", "wall")


def parse() -> argparse.Namespace:
    parser = MoeParser(__doc__.splitlines()[0])
    parser.add_argument(
        "--blocks",
        type=lambda text: [positive_int(part) for part in text.split(",")],
        metavar="LIST",
        help="of throughput mode (8,12,24; simulator 2)",
    )
    parser.add_argument("--no-quantised", action="store_true", help="leave out rows that travel back as FP8")
    args = parser.parse_args()
    args.blocks = args.blocks or BLOCKS[on_gpu()]
    return args


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The key columns of every row. Rows travel back as FP8 in those with the most blocks alone."""
    found = []
    for mode in args.mode:
        latency = mode == "latency"
        for layout in ["expert"] if latency else args.layout:
            for blocks in [0] if latency else args.blocks:  # 0: as many as there are
                for dtype in args.dtype:
                    back = ["bf16"] + ["fp8"] * (
                        blocks == max(args.blocks) and dtype == "fp8" and not args.no_quantised
                    )
                    found += [dict(mode=mode, layout=layout, blocks=blocks, dtype=dtype, back=b) for b in back]
    return found


class Case:
    """An AllToAll with its inputs, and calls of it that are timed.

    Args:
        everyone: all ranks' inputs.
    """

    def __init__(self, args: argparse.Namespace, case: dict[str, Any], everyone: Any) -> None:
        import torch

        import tilescale_net as tsn
        from benchmark.common.moe import FP8, returned_rows
        from tilescale_net.kernels.moe import AllToAll, Tuning

        self._mine, self._everyone, self._case = everyone[tsn.rank()], everyone, case
        self.throughput, fp8 = case["mode"] == "throughput", case["dtype"] == "fp8"
        tokens, options = len(self._mine.x), {}
        if self.throughput:  # twice the rows of an even spread, not all rows of all ranks
            rows = max(2 * tokens * args.topk, world_size() * tokens)
            options = dict(layout=case["layout"], capacity=rows, tuning=Tuning(blocks=case["blocks"]))
        self.op = AllToAll(
            args.experts, tokens, args.hidden, args.topk, FP8 if fp8 else torch.bfloat16, case["mode"], warm_up=False,
            quantize_combine=case["back"] == "fp8", **options,
        )  # fmt: skip
        self._x = (self._mine.x_fp8, self._mine.scales) if fp8 and self.throughput else self._mine.x
        received = self.dispatch()
        self._y = returned_rows(received)
        self._handle, self._out = received.handle, torch.empty_like(self._mine.x)
        self.combine()
        self.op.check()
        if not args.no_check:
            self._check(received)

    def _check(self, received: Any) -> None:
        import tilescale_net as tsn
        from benchmark.common.moe import check_combine, check_dispatch
        from tilescale_net.kernels.moe.row_ops import dequantise

        case, mine, experts = self._case, self._mine, self.op.config.num_experts
        check_dispatch(received, self._everyone, experts, tsn.rank(), case["mode"], case["layout"])
        if case["back"] == "bf16":
            rows = dequantise(mine.x_fp8, mine.scales).to(self._y.dtype) if case["dtype"] == "fp8" else mine.x
            weighted = case["layout"] == "expert"
            check_combine(self._out, mine, rows, experts, world_size(), weighted, tsn.rank(), self.op.sums_over)

    def dispatch(self) -> Any:
        return self.op.dispatch(self._x, self._mine.topk_idx, self._mine.topk_weights)

    def cached(self) -> Any:
        return self.op.dispatch(self._x, handle=self._handle)

    def combine(self) -> Any:
        return self.op.combine(self._y, self._handle, out=self._out)

    def pair(self) -> Any:
        return self.op.combine(self._y, self.dispatch().handle, out=self._out)

    def kernels(self, timer: DeviceTimer) -> dict[str, list[float]]:
        """Samples of each kernel, or chain of kernels."""
        nothing, found = lambda: None, {}
        found["dispatch"] = timer.kernel(nothing, lambda _: self.dispatch())
        if self.throughput:
            found["cached"] = timer.kernel(nothing, lambda _: self.cached())
            found["combine"] = timer.kernel(nothing, lambda _: self.combine())
        else:  # a combine each for the dispatches before it
            found["combine"] = timer.kernel(
                self.dispatch, lambda received: self.op.combine(self._y, received.handle, out=self._out)
            )
        return found

    def close(self) -> None:
        import tilescale_net as tsn

        self.op.check()
        tsn.barrier()
        self.op.free()


def launched(call: Callable[..., Any], pairs: int) -> tuple[list[float], list[float]]:
    """Microseconds of a call: until it returns, and, of many in a row, until they have ended."""
    import tilescale_net as tsn

    host, wall = [], []
    for _ in range(SAMPLES):
        tsn.synchronize()
        tsn.barrier()
        start = time.perf_counter()
        for _ in range(pairs):
            call()
        returned = time.perf_counter()
        tsn.synchronize()
        host.append((returned - start) / pairs * 1e6)
        wall.append((time.perf_counter() - start) / pairs * 1e6)
    return host, wall


def replayed(call: Callable[..., Any]) -> list[float]:
    """Microseconds of a call in a CUDA graph of several."""
    import torch

    import tilescale_net as tsn

    stream, graph, samples = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    tsn.barrier()
    # Other threads, such as a proxy's, may use CUDA meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(IN_GRAPH):
            call()
    for _ in range(SAMPLES + 1):
        tsn.synchronize()
        tsn.barrier()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        samples.append(before.elapsed_time(after) * 1e3 / IN_GRAPH)
    return samples[1:]


def table_of(report: Report) -> Any:
    keys = [Column(name, name) for name in ("mode", "layout", "blocks", "dtype")] + [Column("back", "combine of")]
    columns = [Column(name, name, better="lower", unit="us") for name in COLUMNS]
    table = report.table("MoE calls", keys, columns)
    table.notes.append(
        "agreeing: on the layout, dispatch less the same with a layout that is known. graph, host, wall: of a "
        "dispatch and its combine. Medians over the samples of a rank, of which the median over ranks is shown. blocks 0: all "
        "SMs."
    )
    return table


def measure(
    args: argparse.Namespace, case: dict[str, Any], everyone: Any, timer: DeviceTimer
) -> dict[str, list[float]]:
    made = Case(args, case, everyone)
    samples = made.kernels(timer)
    if timer.on_gpu:
        samples["host"], samples["wall"] = launched(made.pair, PAIRS)
        samples["graph"] = replayed(made.pair)
    made.close()
    return samples


def main() -> None:
    args = parse()
    import tilescale_net as tsn
    from benchmark.common.moe import make
    from benchmark.moe_all_to_all import heap_bytes

    report = Report("moe_calls", args)
    world = tsn.init(heap_bytes(args, args.tokens_of))
    timer = DeviceTimer(args, world.device_kind == "cuda", MOE_TIMING)
    report.environment |= {
        "shape": f"hidden {args.hidden}, top-{args.topk} of {args.experts} experts, tokens "
        + ", ".join(f"{n} in {mode} mode" for mode, n in args.tokens_of.items()),
        "data": "not verified" if args.no_check else "verified, every byte, but what travels back as FP8",
        "timing": f"median of {timer.repeat}" + ("" if timer.on_gpu else f"; {SIMULATED}"),
    }
    table = table_of(report)
    for case in report.progress(cases(args), "rows"):
        shape = (args.tokens_of[case["mode"]], args.hidden, args.experts, args.topk, case["dtype"] == "fp8", 7)
        everyone = [make(rank, *shape, tsn.device()) for rank in range(tsn.size())]
        samples = measure(args, case, everyone, timer)
        middle = {name: median(gather(median(found))) for name, found in samples.items()}
        if "cached" in middle:
            middle["agreeing"] = middle["dispatch"] - middle["cached"]
        if is_rank_zero():
            table.add({**case, **middle}, samples)
    report.finish()
    tsn.finalize()


if __name__ == "__main__":
    main()
