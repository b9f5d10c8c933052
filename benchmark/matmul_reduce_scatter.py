"""GEMM fused with a reduce-scatter, next to cuBLAS and NCCL one after the other and to torch's fused operator.

    GPUS=4 bash launch.sh benchmark/matmul_reduce_scatter.py
    GPUS=2 bash launch.sh benchmark/matmul_reduce_scatter.py --m 2048,8192 --blocks 4,8,16

Every rank has m rows of its own k columns and wants m / ranks rows of the sum of all ranks' GEMMs with their [k, n].
Without a GPU the simulator runs the same kernels on small shapes, without NCCL.
"""

import argparse
import importlib
from typing import Any

import tilescale_net as tsn
from benchmark.common import gemm
from benchmark.common.gemm import Implementations, Operands, difference, gemm_alone, if_works, operands, options_of
from benchmark.common.modules import dist, torch

BENCH = dict(quick="--repeat 2")  # see common/suite.py


def implementations(args: argparse.Namespace, m: int, blocks: int | None, group: Any) -> Implementations:
    from tilescale_net.kernels.fused.matmul_reduce_scatter import MatmulReduceScatter

    size, rows = tsn.size(), m // tsn.size()
    mine = operands(args, m)
    out, part = (torch.empty((rows, args.n), dtype=torch.bfloat16, device=mine.x.device) for _ in range(2))
    whole = torch.empty((m, args.n), dtype=torch.bfloat16, device=mine.x.device)
    op = MatmulReduceScatter(rows, args.k, args.n, **options_of(args, "matmul_reduce_scatter", m, blocks))
    # A row in sixteen, or all of a small GEMM, is compared with the sum in float32.
    step = 16 if rows > 1024 else 1
    picked = torch.cat([mine.exact(slice(p * rows, (p + 1) * rows, step)) for p in range(size)]).cpu()
    dist.all_reduce(picked)
    wanted = picked.view(size, -1, args.n)[tsn.rank()].to(out.device)
    calls: dict[str, Any] = {
        "ours": lambda: op(mine.x, mine.w, out, **mine.scales),
        "matmul": lambda: mine.matmul(whole),
        "tilelang": gemm_alone(op.tiling, mine.x, mine.w, whole, (*mine.scales.values(),)),
    }
    if group is not None:
        scatter = lambda: dist.reduce_scatter_tensor(part, whole, group=group)  # noqa: E731
        sequence = lambda: dist.reduce_scatter_tensor(part, mine.matmul(whole), group=group)  # noqa: E731
        calls |= {"communication": scatter, "sequence": sequence}
        calls |= if_works("torch's fused operator", lambda: torchs(mine, group))
    rounding = 0.04 if mine.scales else 0.02
    is_wrong = lambda: difference(out[::step], wanted, "the sum", rounding)  # noqa: E731
    return Implementations(mine, op, calls, is_wrong, op.free)


def torchs(mine: Operands, group: Any) -> Any:
    """A call of torch's fused operator."""
    importlib.import_module("torch.distributed._symmetric_memory")  # which registers it
    ops, name = torch.ops.symm_mem, group.group_name
    if mine.x_scales is None or mine.w_scales is None:
        return lambda: ops.fused_matmul_reduce_scatter(mine.x, mine.w, "sum", 0, name)
    scales, shape = (mine.x_scales[:, None], mine.w_scales[None]), [mine.x.shape[0], mine.w.shape[1]]
    rest = "sum", 0, 0, name, shape, None, None, torch.bfloat16, True
    return lambda: ops.fused_scaled_matmul_reduce_scatter(mine.x, mine.w, *scales, *rest)


if __name__ == "__main__":
    args = gemm.parse(__doc__.splitlines()[0], 7168, 8192)
    gemm.run("matmul_reduce_scatter", args, int(max(args.m) * args.n * 2 * 3.5), implementations)
