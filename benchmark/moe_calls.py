"""Time of calls of an expert-parallel layer: each kernel by number of blocks, pairs in a CUDA graph, and the host's
part.

    GPUS=2 bash launch.sh benchmark/moe_calls.py
    GPUS=2 bash launch.sh benchmark/moe_calls.py --mode throughput --layout expert --dtype fp8 --blocks 8,12,24

Kernels (dispatch, the same with a known layout, combine) are timed on the device with cold caches, ranks starting
together. Pairs of dispatch and combine follow one another with warm caches: in a CUDA graph, and launched from Python,
where host is the calling thread's time per pair and wall the time until all have ended. moe_all_to_all.py has the
peers.
"""

import argparse
from collections.abc import Callable
from typing import Any

import tilescale_net as tsn
from benchmark.common import Column, is_rank_zero, median, medians, positive_int, us
from benchmark.common import moe as common
from benchmark.common.arguments import on_gpu
from benchmark.common.measuring import DeviceTimer, captured, device_us, gather, host_and_wall, in_turn
from benchmark.common.modules import moe, torch
from benchmark.common.moe import Exchange

BENCH = dict(ranks=0, quick="--mode throughput --layout rank --dtype bf16 --blocks 2 --warmup 1 --repeat 2")

PAIRS = 50  # of dispatch and combine, launched without waiting
IN_GRAPH = 10  # pairs in a CUDA graph
SAMPLES = 7  # of pairs
BLOCKS = {True: [8, 12, 24], False: [2]}  # of throughput mode, on a GPU and in the simulator
COLUMNS = ("dispatch", "cached", "agreeing", "combine", "graph", "host", "wall")


def parse() -> argparse.Namespace:
    parser = common.MoeParser(__doc__.splitlines()[0])
    numbers = lambda text: [positive_int(part) for part in text.split(",")]  # noqa: E731
    parser.option("--blocks", numbers, None, "of throughput mode (8,12,24; simulator 2)")
    parser.flag("--no-quantised", "leave out rows that travel back as FP8")
    args = parser.parse_args()
    args.blocks = args.blocks or BLOCKS[on_gpu()]
    return args


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The key columns of every row. Rows travel back as FP8 in those with the most blocks alone."""
    found = []
    for mode in args.mode:
        latency = mode == "latency"
        for layout in ["expert"] if latency else args.layout:
            for blocks in [0] if latency else args.blocks:  # 0: all of them
                for dtype in args.dtype:
                    both = blocks == max(args.blocks) and dtype == "fp8" and not args.no_quantised
                    for back in ("bf16", "fp8") if both else ("bf16",):
                        found.append(dict(mode=mode, layout=layout, blocks=blocks, dtype=dtype, back=back))
    return found


def replayed(call: Callable[..., Any]) -> list[float]:
    """Microseconds of a call in a CUDA graph of several."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    tsn.barrier()
    replay = captured(call, IN_GRAPH, stream)

    def sample() -> float:
        tsn.synchronize()
        tsn.barrier()
        return device_us(replay) / IN_GRAPH

    return in_turn({"": sample}, 1, SAMPLES)[""]


def measure(args: argparse.Namespace, case: dict[str, Any], timer: DeviceTimer) -> dict[str, list[float]]:
    """Samples of each kernel, or chain of kernels."""
    everyone = common.all_inputs(args, args.tokens_of[case["mode"]], case["dtype"] == "fp8")
    options: dict[str, Any] = {"tuning": moe.Tuning(blocks=case["blocks"])} if case["mode"] == "throughput" else {}
    keys = {name: case[name] for name in ("mode", "layout", "dtype", "back")}
    made = Exchange(args, everyone, **keys, warm_up=False, **options)
    samples = {"dispatch": timer.kernel(made.dispatch)}
    if made.throughput:
        samples |= {"cached": timer.kernel(made.cached), "combine": timer.kernel(made.combine)}
    else:  # a combine each for the dispatches before it
        samples["combine"] = timer.kernel(made.combine, made.handle_of_dispatch)
    if timer.on_gpu:
        host, wall = zip(*(host_and_wall(made.pair, PAIRS) for _ in range(SAMPLES)))
        samples |= {"host": list(host), "wall": list(wall)}
        samples["graph"] = replayed(made.pair)
    made.close()
    return samples


def main() -> None:
    args = parse()
    report, timer = common.start("moe_calls", args, "verified, every byte, except rows returned as FP8")
    tokens = ", ".join(f"{n} in {mode} mode" for mode, n in args.tokens_of.items())
    report.environment["shape"] += f", tokens {tokens}"
    keys = [Column(name, name) for name in ("mode", "layout", "blocks", "dtype")] + [Column("back", "combine of")]
    table = report.table("MoE calls", keys, [us(name, name) for name in COLUMNS])
    table.notes.append(
        "agreeing: on the layout, dispatch less the same with a layout that is known. graph, host, wall: of a "
        "dispatch and its combine. Medians over the samples of a rank, of which the median over ranks is shown. blocks 0: all "
        "SMs."
    )
    for case in report.progress(cases(args), "rows"):
        samples = measure(args, case, timer)
        everyone = gather(medians(samples))
        middle = {name: median([found[name] for found in everyone]) for name in samples}
        if "cached" in middle:
            middle["agreeing"] = middle["dispatch"] - middle["cached"]
        if is_rank_zero():
            table.add({**case, **middle}, samples)
    report.finish()


if __name__ == "__main__":
    main()
