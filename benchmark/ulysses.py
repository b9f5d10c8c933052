"""Time of exchanging heads for sequence (Ulysses), and of attention by chunks of heads, next to torch's all-to-all.

    GPUS=4 bash launch.sh benchmark/ulysses.py
    GPUS=4 bash launch.sh benchmark/ulysses.py --piece 4M
    GPUS=4 bash launch.sh benchmark/ulysses.py --blocks 16,32,64 --sequence 8192 --uneven

Each rank has a part of the sequence with all heads, and gets the whole sequence with a part of the heads ("scatter"),
or the reverse ("gather"). Torch's all_to_all_single needs a copy before or after each, included in its time, in tensors
allocated once. "Operator" is ops.scatter_heads or gather_heads, from and to ordinary tensors. "attention" is all of it
with torch's attention between: ours in overlapping chunks of heads, torch's sequential. Data are compared. Without a
GPU the simulator runs the same kernels alone.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import tilescale_net as tsn
from benchmark.common import BenchmarkParser, Column, median, percentile, us, world_size
from benchmark.common.arguments import CALLS, byte_count, int_list, on_gpu, positive_int
from benchmark.common.collectives import DTYPES, begin
from benchmark.common.measuring import normal_numbers
from benchmark.common.modules import dist, torch

BENCH = dict(ranks=0, quick="--sequence 1024,8192 --repeat 2")  # see common/suite.py

WAYS = ("scatter", "gather", "attention")


class UlyssesCase:
    """Tensors [batch, sequence, heads, dim] of one size: calls of ours and of torch, and their expected results."""

    def __init__(self, args: argparse.Namespace, way: str, sequence: int) -> None:
        self._n, self._rank, self._way = tsn.size(), tsn.rank(), way
        weights = [p + 1 for p in range(self._n)] if args.uneven else [1] * self._n
        ends = [sequence * part // sum(weights) for part in itertools.accumulate(weights, initial=0)]
        self._starts, self.lengths = ends, [b - a for a, b in zip(ends, ends[1:])]
        self._even = len(set(self.lengths)) == 1
        self._dtype, self._chunks = getattr(torch, args.dtype), args.chunks
        self._whole = (args.batch, sequence, args.heads, args.dim)
        mine, own = self.lengths[self._rank], args.heads // self._n
        self._part = (args.batch, mine, args.heads, args.dim)
        self._own = (args.batch, sequence, own, args.dim)
        shape, result = (self._own, self._part) if way == "gather" else (self._part, self._own)
        result = self._part if way == "attention" else result
        device = tsn.device()
        # Equal sizes on all ranks, for symmetric tensors: between nodes, inputs too.
        room = args.batch * max(max(self.lengths) * args.heads, sequence * own) * args.dim
        self._memory = tsn.empty((2, room), self._dtype)
        source, self._out = (m[: torch.Size(s).numel()].view(s) for m, s in zip(self._memory, (shape, result)))
        self._x = [
            source,
            *(torch.empty(shape, dtype=self._dtype, device=device) for _ in range(2 if way == "attention" else 0)),
        ]
        self._found = self._out
        self.nbytes = max(self._x[0].nbytes, self._out.nbytes)
        self.in_place = False

    def _data(self, seed: int, which: int) -> Any:
        """The whole tensor of all ranks, [batch, sequence, heads, dim]."""
        return normal_numbers(self._whole, seed + which, self._dtype, self._memory.device)

    def _rows(self) -> slice:
        return slice(self._starts[self._rank], self._starts[self._rank + 1])

    def _mine(self, whole: Any, scattered: bool) -> Any:
        """This rank's part of a whole tensor: of the sequence, or of the heads."""
        return whole.chunk(self._n, 2)[self._rank] if scattered else whole[:, self._rows()]

    def fill(self, seed: int) -> None:
        for which, x in enumerate(self._x):
            x.copy_(self._mine(self._data(seed, which), self._way == "gather"))
        self._found.zero_()

    def difference(self, seed: int) -> str | None:
        if self._way == "attention":
            wanted = self._mine(attend(*(self._data(seed, which) for which in range(3))), False)
            close = torch.isclose(self._found.float(), wanted.float(), rtol=0.02, atol=0.02)
        else:
            close = self._found == self._mine(self._data(seed, 0), self._way == "scatter")
        wrong = int((~close).sum())
        return f"{wrong} of {close.numel()} elements are wrong" if wrong else None

    def ours(self, choices: dict[str, Any]) -> tuple[Callable[[], object], Callable[[], None]]:
        from tilescale_net.kernels.all_to_all_transposed import AllToAllTransposed

        op = AllToAllTransposed(**choices)
        axes = (2, 1) if self._way == "scatter" else (1, 2)
        lengths = None if self._even else self.lengths
        self._found = self._out
        return lambda: op(self._out, self._x[0], *axes, lengths=lengths), op.free

    def operator(self) -> Callable[[], object]:
        from tilescale_net import ops

        lengths = None if self._even else self.lengths
        if self._way == "attention":

            def call() -> None:
                self._found = ops.attention_by_heads(attend, *self._x, lengths=lengths, chunks=self._chunks)
        else:
            exchange = ops.scatter_heads if self._way == "scatter" else ops.gather_heads

            def call() -> None:
                self._found = exchange(self._x[0], lengths=lengths)

        return call

    def torchs(self, group: Any) -> Callable[[], object]:
        there, back = self._way != "gather", self._way != "scatter"
        found = torch.empty(
            self._own if self._way == "scatter" else self._part, dtype=self._dtype, device=self._memory.device
        )
        self._found = found
        if not back:
            scatter = self._torchs_scatter(self._x[0], found, group)
            return scatter
        if not there:
            return self._torchs_gather(self._x[0], found, group)
        inside = [torch.empty(self._own, dtype=self._dtype, device=found.device) for _ in range(4)]
        calls = [self._torchs_scatter(x, y, group) for x, y in zip(self._x, inside)]
        last = self._torchs_gather(inside[3], found, group)

        def call() -> None:
            for scatter in calls:
                scatter()
            inside[3].copy_(attend(*inside[:3]))
            last()

        return call

    def _torchs_scatter(self, x: Any, out: Any, group: Any) -> Callable[[], object]:
        """[batch, sequence, ranks, heads, dim] -> [ranks, sequence, batch, heads, dim], in order of arrival."""
        batch, mine, heads, dim = x.shape
        row = (batch, heads // self._n, dim)
        sent = torch.empty((self._n, mine, *row), dtype=x.dtype, device=x.device)
        arrived = (
            out.view(-1, *row) if batch == 1 else torch.empty((self._whole[1], *row), dtype=x.dtype, device=x.device)
        )
        receives, sends = (None, None) if self._even else (self.lengths, [mine] * self._n)
        parts = x.view(batch, mine, self._n, heads // self._n, dim).permute(2, 1, 0, 3, 4)

        def call() -> None:
            sent.copy_(parts)
            dist.all_to_all_single(arrived, sent.view(-1, *row), receives, sends, group=group)
            if batch > 1:
                out.copy_(arrived.transpose(0, 1))

        return call

    def _torchs_gather(self, x: Any, out: Any, group: Any) -> Callable[[], object]:
        batch, whole, own, dim = x.shape
        mine, row = self.lengths[self._rank], (batch, own, dim)
        sent = x.view(-1, *row) if batch == 1 else torch.empty((whole, *row), dtype=x.dtype, device=x.device)
        arrived = torch.empty((self._n * mine, *row), dtype=x.dtype, device=x.device)
        receives, sends = (None, None) if self._even else ([mine] * self._n, self.lengths)
        parts = arrived.view(self._n, mine, *row).permute(2, 1, 0, 3, 4)

        def call() -> None:
            if batch > 1:
                sent.copy_(x.transpose(0, 1))
            dist.all_to_all_single(arrived, sent, receives, sends, group=group)
            out.view(batch, mine, self._n, own, dim).copy_(parts)

        return call

    def free(self) -> None:
        tsn.free(self._memory)


def attend(q: Any, k: Any, v: Any) -> Any:
    """Attention, of [batch, sequence, heads, dim]."""
    return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def parse() -> argparse.Namespace:
    parser = BenchmarkParser(__doc__.splitlines()[0], timing=CALLS, check=True)
    parser.option("--sequence", int_list(1, 1 << 24), None, "of all ranks (1024,4096,16384,65536; simulator 32)")
    parser.option("--attended", positive_int, 1 << 14, "longest sequence whose attention is timed, too")
    parser.option("--batch", positive_int, 1, "sequences")
    parser.option("--heads", positive_int, 32 if on_gpu() else 8, "of all ranks together")
    parser.option("--dim", positive_int, 128 if on_gpu() else 16, "elements of a head")
    parser.option("--chunks", positive_int, 2, "of the heads of a rank, in attention")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the tensors (bfloat16)")
    parser.option("--threads", int_list(32, 1024), [512 if on_gpu() else 64], "threads per block")
    parser.option("--blocks", int_list(1, 1024), [64 if on_gpu() else 4], "blocks")
    parser.option("--piece", byte_count, None, "of a result that operators copy while the next one arrives (16M)")
    parser.flag("--uneven", "a sequence whose parts grow with the rank")
    parser.flag("--no-nccl", "leave torch's all-to-all through NCCL out")
    args = parser.parse_args()
    parser.require_two_ranks("an exchange needs")
    args.sequence = args.sequence or ([1024, 4096, 16384, 65536] if on_gpu() else [32])
    return args


def main() -> None:
    args = parse()
    # Heap for the largest rank's tensor, the operators' buffers, and chunks of attention.
    element = getattr(torch, args.dtype).itemsize
    size = args.batch * max(args.sequence) * args.heads * args.dim * element // (1 if args.uneven else world_size())
    if args.piece is not None:
        from tilescale_net.kernels import all_to_all_transposed

        all_to_all_transposed.PIECE_BYTES = args.piece
    parts = "uneven" if args.uneven else "equal"
    shape = f"batch {args.batch}, {args.heads} heads of {args.dim} {args.dtype}, {parts} parts of the sequence"
    shape += f", attention in {args.chunks} chunks"
    report, group, measured = begin("ulysses", args, 12 * size + (128 << 20), shape=shape)
    keys = [Column("way", "Way"), Column("sequence", "Sequence", ",d")]
    keys += [Column(k, k.capitalize()) for k in ("threads", "blocks") if len(getattr(args, k)) > 1]
    columns = [us("us", "Time"), us("p99", "p99", plotted=False), us("operator_us", "Operator")]
    if group is not None:
        columns += [
            us("nccl_us", "torch, NCCL"),
            Column("ratio", "x torch", ".2f"),
            Column("operator_ratio", "Operator x torch", ".2f"),
        ]
    table = report.table("ulysses", keys, columns)
    table.notes.append("attention: Time is that of the operator in chunks, which has no other form.")
    cases = [(way, s) for way in WAYS for s in args.sequence if way != "attention" or s <= args.attended]
    for way, sequence in report.progress(cases, "rows"):
        case: Any = UlyssesCase(args, way, sequence)
        label = f"{way} of sequence {sequence}"
        theirs = measured(case, case.torchs(group), f"torch, {label}") if group is not None else []
        functional = measured(case, case.operator(), f"operator, {label}")
        for threads, blocks in itertools.product(args.threads, args.blocks):
            samples = functional
            if way != "attention":
                call, free = case.ours(dict(threads=threads, blocks=blocks))
                samples = measured(case, call, f"{label}, threads {threads}, blocks {blocks}")
                free()
            row = {"way": way, "sequence": sequence, "threads": threads, "blocks": blocks, "us": median(samples)}
            row |= {"p99": percentile(samples, 99), "operator_us": median(functional)}
            if theirs:
                other = median(theirs)
                row |= {"nccl_us": other, "ratio": other / row["us"], "operator_ratio": other / row["operator_us"]}
            table.add(row, {"us": samples, "operator_us": functional, "nccl_us": theirs})
        case.free()
    report.finish()


if __name__ == "__main__":
    main()
