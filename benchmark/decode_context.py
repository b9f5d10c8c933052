"""Time of merging partial attention outputs in decode context parallelism, next to two calls of NCCL.

    GPUS=4 bash launch.sh benchmark/decode_context.py
    GPUS=4 bash launch.sh benchmark/decode_context.py --batch 16 --heads 128 --dim 512 --all-heads

Each rank has the outputs and lse of all heads for its part of the KV cache. NCCL gathers the lse, a kernel weights the
outputs, and NCCL reduces and scatters them by heads (with --all-heads all-reduces them), as vLLM does; "calls" are NCCL's two
calls alone. Ours gives the lse too. Data are compared with the formula in float64. Without a GPU the simulator runs the same
kernel, without NCCL.
"""

import argparse
import itertools
from typing import Any

import tilescale_net as tsn
from benchmark.common import BenchmarkParser, Column, median, percentile, us
from benchmark.common.arguments import CALLS, int_list, on_gpu
from benchmark.common.collectives import DTYPES, CollectiveCase, begin
from benchmark.common.measuring import normal_numbers
from benchmark.common.modules import dist, torch

BENCH = dict(ranks=0, quick="--batch 1,16 --repeat 2")  # see common/suite.py


class MergeCase(CollectiveCase):
    heap: list[Any] = []  # tensors are outside of the symmetric heap

    def __init__(self, args: argparse.Namespace, batch: int) -> None:
        super().__init__()
        self._args, self._dtype = args, getattr(torch, args.dtype)
        self._shape = (batch, args.heads, args.dim)
        device, own = tsn.device(), args.heads if args.all_heads else args.heads // self._n
        self._x = torch.empty(self._shape, dtype=self._dtype, device=device)
        self._lse = torch.empty(self._shape[:2], device=device)
        self._out = torch.empty((batch, own, args.dim), dtype=self._dtype, device=device)
        self._out_lse = torch.empty((batch, own), device=device)
        self._by_heads = False  # whether _found is [heads, batch, dim]
        self._found = self._out
        self.nbytes = self._x.nbytes

    def _partial(self, seed: int, rank: int) -> tuple[Any, Any]:
        x = normal_numbers(self._shape, seed + rank, self._dtype, self._x.device)
        return x, normal_numbers(self._shape[:2], seed + 1000 + rank, torch.float32, self._x.device) * 4

    def fill(self, seed: int) -> None:
        for tensor, given in zip((self._x, self._lse), self._partial(seed, self._rank)):
            tensor.copy_(given)
        self._found.zero_()

    def ours(self, choices: dict[str, Any]) -> Any:
        from tilescale_net.kernels.attention_merge import AttentionMerge

        op = AttentionMerge(all_heads=self._args.all_heads, **choices)
        self._by_heads, self._found = False, self._out
        return lambda: op(self._out, self._out_lse, self._x, self._lse), op.free

    def nccl(self, group: Any) -> Any:
        from benchmark.common.weighted_outputs import weighted_outputs
        from tilescale_net.kernels.sums import vector_of

        (batch, heads, dim), everyone = self._shape, self._args.all_heads
        lses = torch.empty((self._n, batch, heads), device=self._x.device)
        weighted = torch.empty(
            (batch, heads, dim) if everyone else (heads, batch, dim), dtype=self._dtype, device=self._x.device
        )
        self._by_heads = not everyone
        self._found = weighted if everyone else weighted.new_empty((heads // self._n, batch, dim))
        kernel, found = weighted_outputs(self._n, self._args.dtype, heads, dim, not everyone), self._found
        vectors = (-1, vector_of(self._args.dtype))

        def calls() -> None:
            dist.all_gather_into_tensor(lses, self._lse[None], group=group)
            if everyone:
                dist.all_reduce(found, group=group)
            else:
                dist.reduce_scatter_tensor(found, weighted, group=group)

        def sequence() -> None:
            dist.all_gather_into_tensor(lses, self._lse[None], group=group)
            kernel(weighted.unflatten(-1, vectors), self._x.unflatten(-1, vectors), self._lse, lses)
            if everyone:
                dist.all_reduce(weighted, group=group)
            else:
                dist.reduce_scatter_tensor(found, weighted, group=group)

        return sequence, calls

    def difference(self, seed: int) -> str | None:
        x, lse = (torch.stack(parts) for parts in zip(*(self._partial(seed, rank) for rank in range(self._n))))
        wanted = (x.double() * lse.double().softmax(0)[..., None]).sum(0)
        if not self._args.all_heads:
            wanted = wanted.chunk(self._n, 1)[self._rank]
        found = self._found.transpose(0, 1) if self._by_heads else self._found
        tolerance = 1e-5 if self._dtype == torch.float32 else 0.02
        wrong = int((~torch.isclose(found.double(), wanted, rtol=tolerance, atol=tolerance)).sum())
        if self._found is self._out:
            total = lse.logsumexp(0)
            total = total if self._args.all_heads else total.chunk(self._n, 1)[self._rank]
            wrong += int((~torch.isclose(self._out_lse, total, rtol=1e-5, atol=1e-5)).sum())
        return f"{wrong} of {wanted.numel()} outputs or lse are wrong" if wrong else None


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], timing=CALLS, check=True)
    parser.option("--batch", int_list(1, 1 << 20), None, "tokens (1,4,16,64,128; simulator 1,4)")
    parser.option("--heads", int, 32 if on_gpu() else 8, "of all ranks together")
    parser.option("--dim", int, 512 if on_gpu() else 64, "elements of a head")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the outputs (bfloat16)")
    parser.option("--threads", int_list(64, 1024), None, "threads per block (288; simulator 64)")
    parser.option("--blocks", int_list(1, 1024), None, "blocks (as many as SMs, at most 128; simulator 8)")
    parser.flag("--all-heads", "every rank gets all heads")
    parser.flag("--no-nccl", "leave NCCL out")
    args = parser.parse_args()
    parser.require_two_ranks("a merge needs")
    args.batch = args.batch or ([1, 4, 16, 64, 128] if on_gpu() else [1, 4])
    args.threads, args.blocks = args.threads or [288 if on_gpu() else 64], args.blocks or [None]
    return args


def main() -> None:
    args = parse()
    shape = (
        f"{args.heads} heads of {args.dim} {args.dtype}, {'all' if args.all_heads else 'a part'} of them to each rank"
    )
    report, group, measured = begin("decode_context", args, "256M" if on_gpu() else "64M", shape=shape)
    keys = [Column("batch", "Batch", ",d")]
    keys += [Column(k, k.capitalize()) for k in ("threads", "blocks") if len(getattr(args, k)) > 1]
    columns = [us("us", "Time"), us("p99", "p99", plotted=False)]
    if group is not None:
        columns += [us("nccl_us", "NCCL"), us("nccl_calls_us", "NCCL's calls"), Column("ratio", "x NCCL", ".2f")]
    table = report.table("decode_context", keys, columns)
    for batch in report.progress(args.batch, "batches"):
        case = MergeCase(args, batch)
        theirs: list[float] = []
        figures = {}
        if group is not None:
            sequence, calls = case.nccl(group)
            theirs = measured(case, sequence, f"NCCL, batch {batch}", alone=args.all_heads)
            alone = measured(case, calls, f"NCCL's calls, batch {batch}", check=False)
            figures = {"nccl_us": median(theirs), "nccl_calls_us": median(alone)}
        for threads, blocks in itertools.product(args.threads, args.blocks):
            call, free = case.ours(dict(threads=threads, blocks=blocks))
            samples = measured(case, call, f"merge, batch {batch}, threads {threads}, blocks {blocks}")
            free()
            row = {"batch": batch, "threads": threads, "blocks": blocks, "us": median(samples), **figures}
            row |= {"p99": percentile(samples, 99)} | ({"ratio": row["nccl_us"] / row["us"]} if theirs else {})
            table.add(row, {"us": samples, "nccl_us": theirs})
    report.finish()


if __name__ == "__main__":
    main()
