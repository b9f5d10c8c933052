"""GEMM fused with an all-reduce, next to cuBLAS and NCCL one after the other and to torch's symmetric memory.

    GPUS=4 bash launch.sh benchmark/matmul_all_reduce.py
    GPUS=2 bash launch.sh benchmark/matmul_all_reduce.py --m 2048,8192 --blocks 4,8,16

Every rank has m rows of its own k columns and wants the sum of all ranks' GEMMs with their [k, n]. Without a GPU the
simulator runs the same kernels on small shapes, without NCCL.
"""

import argparse
from typing import Any

from benchmark.common import gemm
from benchmark.common.gemm import Implementations, Operands, difference, gemm_alone, if_works, operands, options_of
from benchmark.common.modules import dist, symmetric_memory, torch

BENCH = dict(quick="--repeat 2")  # see common/suite.py


def implementations(args: argparse.Namespace, m: int, blocks: int | None, group: Any) -> Implementations:
    from tilescale_net.kernels.fused.matmul_all_reduce import MatmulAllReduce

    mine = operands(args, m)
    out, whole = (torch.empty((m, args.n), dtype=torch.bfloat16, device=mine.x.device) for _ in range(2))
    op = MatmulAllReduce(m, args.k, args.n, **options_of(args, "matmul_all_reduce", m, blocks))
    # A row in sixteen, or all of a small GEMM, is compared with the sum in float32.
    step = 16 if m > 1024 else 1
    wanted = mine.exact(slice(None, None, step)).cpu()
    dist.all_reduce(wanted)
    calls: dict[str, Any] = {
        "ours": lambda: op(mine.x, mine.w, out, **mine.scales),
        "matmul": lambda: mine.matmul(whole),
        "tilelang": gemm_alone(op.tiling, mine.x, mine.w, whole, (*mine.scales.values(),)),
    }
    if group is not None:
        reduce = lambda: dist.all_reduce(whole, group=group)  # noqa: E731
        calls |= {"communication": reduce, "sequence": lambda: dist.all_reduce(mine.matmul(whole), group=group)}
        calls |= if_works("torch's symmetric memory", lambda: torchs(mine, args.n, group))
    rounding = 0.04 if mine.scales else 0.02
    is_wrong = lambda: difference(out[::step], wanted.to(out.device), "the sum", rounding)  # noqa: E731
    return Implementations(mine, op, calls, is_wrong, op.free)


def torchs(mine: Operands, n: int, group: Any) -> Any:
    """torch's GEMM and the all-reduce of its symmetric memory; it has no fused operator."""
    shared = symmetric_memory.empty((mine.x.shape[0], n), dtype=torch.bfloat16, device=mine.x.device)
    symmetric_memory.rendezvous(shared, group.group_name)

    def call() -> None:
        result = mine.matmul(shared)
        if result is not shared:
            shared.copy_(result)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group.group_name)

    return call


if __name__ == "__main__":
    args = gemm.parse(__doc__.splitlines()[0], 7168, 8192)
    gemm.run("matmul_all_reduce", args, int(max(args.m) * args.n * 2 * 5.5), implementations)
