"""All-gather and matrix product at once, next to cuBLAS and NCCL one after the other and to torch's fused operator.

    GPUS=4 bash launch.sh benchmark/all_gather_matmul.py
    GPUS=2 bash launch.sh benchmark/all_gather_matmul.py --m 2048,8192 --blocks 4,8,16

Every rank has m / ranks rows of k elements and wants the product of all m rows with its own [k, n]. Without a GPU the
simulator runs the same kernels on small shapes, without NCCL.
"""

from benchmark.common.fused import Sides, difference, parse, product_alone, run, tiling_of

BENCH = dict(quick="--repeat 2")  # see common/suite.py


def sides(args, m: int, blocks: int, group) -> Sides:
    import torch

    import tilescale_net as tsn
    from tilescale_net.kernels.fused.all_gather_matmul import AllGatherMatmul

    size, device = tsn.size(), tsn.device()
    rows, k, n = m // size, args.k, args.n
    tiling = tiling_of(args)
    generator = torch.Generator(device=device).manual_seed(tsn.rank())
    x = tsn.empty((rows, k), torch.bfloat16)
    x.normal_(generator=generator)
    w = torch.empty((k, n), dtype=torch.bfloat16, device=device).normal_(generator=generator)
    out, whole = (torch.empty((m, c), dtype=torch.bfloat16, device=device) for c in (n, k))
    op = AllGatherMatmul(rows, k, n, tiling=tiling, blocks=blocks)
    parts = [torch.empty_like(x) for _ in range(size)]
    torch.distributed.all_gather(parts, x.clone()) if group is None else None
    if group is None:
        whole.copy_(torch.cat(parts))
    else:
        torch.distributed.all_gather_into_tensor(whole, x, group=group)
    result, second = torch.mm(whole, w), torch.empty_like(out)
    calls = {
        "ours": lambda: op(x, w, out),
        "matmul": lambda: torch.mm(whole, w, out=second),
        "tilelang": product_alone(tiling, whole, w, second),
    }
    if group is not None:
        gather = lambda: torch.distributed.all_gather_into_tensor(whole, x, group=group)  # noqa: E731
        calls |= {"communication": gather, "sequence": lambda: (gather(), torch.mm(whole, w, out=second))}
        calls |= torchs(x, w, group)

    def free():
        op.free()
        tsn.free(x)

    return Sides(calls, {"torch"}, lambda: difference(out, result, "the product"), free)


def torchs(x, w, group) -> dict:
    """torch's own fused operator, where it works."""
    import torch
    import torch.distributed._symmetric_memory as symmetric

    try:
        shard = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
        symmetric.rendezvous(shard, group.group_name)
        shard.copy_(x)
        call = lambda: torch.ops.symm_mem.fused_all_gather_matmul(shard, [w], 0, group.group_name)  # noqa: E731
        call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"torch's fused operator does not work here: {error!r:.200}", flush=True)
        return {}
    return {"torch": call}


if __name__ == "__main__":
    args = parse(__doc__.splitlines()[0], 8192, 14336)
    heap = int(max(args.m) * args.k * 2 * 3.5)
    run("all_gather_matmul", args, heap, lambda *which: sides(args, *which))
