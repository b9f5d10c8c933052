"""All-gather fused with a GEMM, next to cuBLAS and NCCL one after the other and to torch's fused operator.

    GPUS=4 bash launch.sh benchmark/all_gather_matmul.py
    GPUS=2 bash launch.sh benchmark/all_gather_matmul.py --m 2048,8192 --blocks 4,8,16

Every rank has m / ranks rows of k elements and wants all m rows @ its own [k, n]. Without a GPU the
simulator runs the same kernels on small shapes, without NCCL.
"""

import argparse
from typing import Any

import tilescale_net as tsn
from benchmark.common import gemm
from benchmark.common.gemm import Implementations, Operands, difference, gemm_alone, if_works, operands, options_of
from benchmark.common.modules import dist, symmetric_memory, torch

BENCH = dict(quick="--repeat 2")  # see common/suite.py


def gathered(x: Any, group: Any = None) -> Any:
    """The `x` of all ranks, one after the other."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather([p.view(torch.uint8) for p in parts], x.view(torch.uint8), group=group)
    return torch.cat(parts)


def implementations(args: argparse.Namespace, m: int, blocks: int | None, group: Any) -> Implementations:
    from tilescale_net.kernels.fused.all_gather_matmul import AllGatherMatmul, PipelinedAllGatherMatmul

    rows = m // tsn.size()
    mine = operands(args, rows)
    # Between nodes rows are sent from symmetric memory.
    x = tsn.empty(mine.x.shape, mine.x.dtype)
    x.copy_(mine.x)
    scales = (gathered(mine.x_scales, group), mine.w_scales) if mine.scales else ()
    everyone = Operands(gathered(mine.x, group), mine.w, *scales)
    out, whole = (torch.empty((m, args.n), dtype=torch.bfloat16, device=x.device) for _ in range(2))
    op = AllGatherMatmul(rows, args.k, args.n, **options_of(args, "all_gather_matmul", rows, blocks))
    pipelined = PipelinedAllGatherMatmul(rows, args.k, args.n, dtype=mine.x.dtype)
    by_engines = torch.empty_like(out)
    result = everyone.matmul(torch.empty_like(out))
    calls: dict[str, Any] = {
        "ours": lambda: op(x, mine.w, out, **mine.scales),
        "pipelined": lambda: pipelined(x, mine.w, by_engines, **mine.scales),
        "matmul": lambda: everyone.matmul(whole),
        "tilelang": gemm_alone(op.tiling, everyone.x, everyone.w, whole, scales),
    }
    if group is not None:
        gather = lambda: dist.all_gather_into_tensor(everyone.x.view(torch.uint8), x.view(torch.uint8), group=group)  # noqa: E731
        calls |= {"communication": gather, "sequence": lambda: (gather(), everyone.matmul(whole))}
        calls |= if_works("torch's fused operator", lambda: torchs(mine, group))

    def wrong() -> str | None:
        return difference(out, result, "the GEMM") or difference(by_engines, result, "the pipelined GEMM")

    def free() -> None:
        op.free()
        pipelined.free()
        tsn.free(x)

    return Implementations(mine, op, calls, wrong, free)


def torchs(mine: Operands, group: Any) -> Any:
    """A call of torch's fused operator."""
    ops, name = torch.ops.symm_mem, group.group_name
    shard = symmetric_memory.empty(mine.x.shape, dtype=mine.x.dtype, device=mine.x.device)
    symmetric_memory.rendezvous(shard, name)
    shard.copy_(mine.x)
    if mine.x_scales is None or mine.w_scales is None:
        return lambda: ops.fused_all_gather_matmul(shard, [mine.w], 0, name)
    scales = mine.x_scales[:, None], [mine.w_scales[None]]
    rest = 0, name, [None], [None], [torch.bfloat16], [True]
    return lambda: ops.fused_all_gather_scaled_matmul(shard, [mine.w], *scales, *rest)


if __name__ == "__main__":
    args = gemm.parse(__doc__.splitlines()[0], 8192, 14336)
    gemm.run("all_gather_matmul", args, int(max(args.m) * args.k * 2 * 3.5), implementations)
