"""Matrix product and reduce-scatter at once, next to cuBLAS and NCCL one after the other and to torch's fused operator.

    GPUS=4 bash launch.sh benchmark/matmul_reduce_scatter.py
    GPUS=2 bash launch.sh benchmark/matmul_reduce_scatter.py --m 2048,8192 --blocks 4,8,16

Every rank has m rows of its own k columns and wants m / ranks rows of the sum of all ranks' products with their [k, n].
Without a GPU the simulator runs the same kernels on small shapes, without NCCL.
"""

from benchmark.common.fused import Sides, difference, parse, product_alone, run, tiling_of

BENCH = dict(quick="--repeat 2")  # see common/suite.py


def sides(args, m: int, blocks: int, group) -> Sides:
    import torch
    import torch.distributed as dist

    import tilescale_net as tsn
    from tilescale_net.kernels.fused.matmul_reduce_scatter import MatmulReduceScatter

    size, device, tiling = tsn.size(), tsn.device(), tiling_of(args)
    rows, k, n = m // size, args.k, args.n
    generator = torch.Generator(device=device).manual_seed(tsn.rank())
    x, w = (torch.empty(s, dtype=torch.bfloat16, device=device).normal_(generator=generator) for s in ((m, k), (k, n)))
    out = torch.empty((rows, n), dtype=torch.bfloat16, device=device)
    whole, part = torch.empty((m, n), dtype=torch.bfloat16, device=device), torch.empty_like(out)
    op = MatmulReduceScatter(rows, k, n, tiling=tiling, blocks=blocks)
    # A row in sixteen, or all of a small product, is compared with the sum in float32.
    step = 16 if rows > 1024 else 1
    picked = (x.view(size, rows, k)[:, ::step].reshape(-1, k).float() @ w.float()).cpu()
    dist.all_reduce(picked)
    wanted = picked.view(size, -1, n)[tsn.rank()].to(device)
    calls = {
        "ours": lambda: op(x, w, out),
        "matmul": lambda: torch.mm(x, w, out=whole),
        "tilelang": product_alone(tiling, x, w, whole),
    }
    plain = {"torch"}
    if group is not None:
        scatter = lambda: dist.reduce_scatter_tensor(part, whole, group=group)  # noqa: E731
        calls |= {"communication": scatter, "sequence": lambda: (torch.mm(x, w, out=whole), scatter())}
        calls |= torchs(x, w, group)
    return Sides(calls, plain, lambda: difference(out[::step], wanted, "the sum"), op.free)


def torchs(x, w, group) -> dict:
    """torch's own fused operator, where it works."""
    import torch
    import torch.distributed._symmetric_memory

    call = lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group.group_name)  # noqa: E731
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"torch's fused operator does not work here: {error!r:.200}", flush=True)
        return {}
    return {"torch": call}


if __name__ == "__main__":
    args = parse(__doc__.splitlines()[0], 7168, 8192)
    run("matmul_reduce_scatter", args, int(max(args.m) * args.n * 2 * 3.5), lambda *which: sides(args, *which))
