"""`python -m tilescale_net tune`: finds how calls are made best on this machine, and keeps it."""

import argparse
import os

from tilescale_net.cli.arguments import positive_int

PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("what", choices=(*PRODUCTS, "moe"), help="calls that are tuned")
    text = "ranks on this host (all GPUs; simulator 2); a rank that torchrun or srun has started takes theirs"
    command.add_argument("--ranks", type=positive_int, metavar="N", help=text)
    text = "rows of x on a rank; moe: tokens of a rank (%(default)s)"
    command.add_argument("--rows", type=positive_int, nargs="+", default=[4096], metavar="M", help=text)
    whole = (("k", 7168), ("n", 8192), ("experts", 256), ("hidden", 7168), ("top-k", 8), ("most", 12))
    texts = {"k": "columns of x", "n": "columns of w", "most": "candidates that are tried"}
    for name, default in whole:
        command.add_argument(
            f"--{name}", type=positive_int, default=default, help=f"{texts.get(name, 'moe')} (%(default)s)"
        )
    command.add_argument("--dtype", choices=("bf16", "fp16", "fp8"), default="bf16", help="(%(default)s)")
    command.add_argument("--mode", choices=("throughput", "latency"), default="throughput", help="moe (%(default)s)")
    command.add_argument("--layout", choices=("expert", "rank"), default="expert", help="moe (%(default)s)")
    command.add_argument("--heap", default=None, metavar="BYTES", help="symmetric heap, such as 4G (TSN_HEAP_SIZE)")


def tune(args: argparse.Namespace, words: list[str]) -> int:
    """Start the ranks, which run the same command, or be one of them; the exit code.

    Args:
        words: of the command line, behind "tune".
    """
    from tilescale_net.launch import run
    from tilescale_net.runtime import settings

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _tune(args)
        return 0
    if args.ranks is not None:
        os.environ["GPUS"] = str(args.ranks)
    elif settings.DEVICE.get() != "simulator" and (gpus := run.visible_gpus()):
        os.environ["GPUS"] = str(gpus)
    return run.start(["-m", "tilescale_net", "tune", *words])


def _tune(args: argparse.Namespace) -> None:
    """A rank."""
    import torch

    import tilescale_net as tsn
    from tilescale_net import tuning
    from tilescale_net.runtime import tuned

    tsn.init(args.heap)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[args.dtype]
    for rows in args.rows:
        if args.what == "moe":
            sizes = (args.experts, rows, args.hidden, args.top_k)
            found = tuning.moe(*sizes, dtype, args.mode, layout=args.layout, most=args.most)
        else:
            found = tuning.product(args.what, rows, args.k, args.n, dtype=dtype, most=args.most)
        if tsn.rank() == 0:
            print(found.text(), flush=True)
    if tsn.rank() == 0:
        print(f"kept in {tuned.path_of(tuned.place_of(tsn.world()))}")
    tsn.finalize()
