"""Matrix product and all-reduce at once, next to cuBLAS and NCCL one after the other and to torch's symmetric memory.

    GPUS=4 bash launch.sh benchmark/matmul_all_reduce.py
    GPUS=2 bash launch.sh benchmark/matmul_all_reduce.py --m 2048,8192 --blocks 4,8,16

Every rank has m rows of its own k columns and wants the sum of all ranks' products with their [k, n]. Without a GPU the
simulator runs the same kernels on small shapes, without NCCL.
"""

from benchmark.common.fused import Sides, difference, parse, product_alone, run, tiling_of

BENCH = dict(quick="--repeat 2")  # see common/suite.py


def sides(args, m: int, blocks: int, group) -> Sides:
    import torch
    import torch.distributed as dist

    import tilescale_net as tsn
    from tilescale_net.kernels.fused.matmul_all_reduce import MatmulAllReduce

    device, tiling, k, n = tsn.device(), tiling_of(args), args.k, args.n
    generator = torch.Generator(device=device).manual_seed(tsn.rank())
    x, w = (torch.empty(s, dtype=torch.bfloat16, device=device).normal_(generator=generator) for s in ((m, k), (k, n)))
    out, whole = (torch.empty((m, n), dtype=torch.bfloat16, device=device) for _ in range(2))
    op = MatmulAllReduce(m, k, n, tiling=tiling, blocks=blocks)
    # A row in sixteen, or all of a small product, is compared with the sum in float32.
    step = 16 if m > 1024 else 1
    wanted = (x[::step].float() @ w.float()).cpu()
    dist.all_reduce(wanted)
    calls = {
        "ours": lambda: op(x, w, out),
        "matmul": lambda: torch.mm(x, w, out=whole),
        "tilelang": product_alone(tiling, x, w, whole),
    }
    if group is not None:
        reduce = lambda: dist.all_reduce(whole, group=group)  # noqa: E731
        calls |= {"communication": reduce, "sequence": lambda: (torch.mm(x, w, out=whole), reduce())}
        calls |= torchs(x, w, group)
    return Sides(calls, {"torch"}, lambda: difference(out[::step], wanted.to(device), "the sum"), op.free)


def torchs(x, w, group) -> dict:
    """torch's product and the all-reduce of its symmetric memory, where they work; it has no fused operator."""
    import torch
    import torch.distributed._symmetric_memory as symmetric

    try:
        shared = symmetric.empty((x.shape[0], w.shape[1]), dtype=x.dtype, device=x.device)
        symmetric.rendezvous(shared, group.group_name)

        def call() -> None:
            torch.mm(x, w, out=shared)
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group.group_name)

        call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"torch's symmetric memory does not work here: {error!r:.200}", flush=True)
        return {}
    return {"torch": call}


if __name__ == "__main__":
    args = parse(__doc__.splitlines()[0], 7168, 8192)
    run("matmul_all_reduce", args, int(max(args.m) * args.n * 2 * 5.5), lambda *which: sides(args, *which))
