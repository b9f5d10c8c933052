"""Time and bandwidth of all-reduce, next to NCCL, FlashInfer, vLLM and torch.

    GPUS=4 bash launch.sh benchmark/all_reduce.py
    GPUS=4 bash launch.sh benchmark/all_reduce.py --algorithm one_shot --sizes 64K..1M --blocks 32,64
    GPUS=4 bash launch.sh benchmark/all_reduce.py --algorithm auto,fp8 --sizes 16M,64M --staged
    GPUS=4 bash launch.sh benchmark/all_reduce.py --sizes 16K..4M --dependent 0,1 --peers none

Size: of the tensor, in bytes per rank. Our sums are compared bit by bit with a sum in the order of the ranks (for
"fp8", with its rounding in torch); others' sums, whose order differs, only roughly. Peers that are not installed are
skipped by name. Without a GPU the simulator runs the same kernels alone.
"""

from typing import Any

import tilescale_net as tsn
from benchmark.common.arguments import BenchmarkParser, int_list, one_of
from benchmark.common.collectives import DTYPES, CollectiveCase, parse, run, wrong_sums
from benchmark.common.measuring import normal_numbers
from benchmark.common.modules import dist, torch
from benchmark.common.peers import ALL_REDUCE, ALL_REDUCE_FP8, Operands, Peer, made

BENCH = dict(ranks=0, quick="--sizes 16K,64K --repeat 2")  # see common/suite.py

PEERS = {peer.key.removesuffix("_us"): peer for peer in (*ALL_REDUCE, ALL_REDUCE_FP8)}
# Limit of peers' errors with FP8 and one scale per 256 elements: root mean square, relative to the sums'.
FP8_ERROR = 0.06


class AllReduceCase(CollectiveCase):
    passes = 2
    in_place = True

    def __init__(self, size: int, dtype: str, staged: bool) -> None:
        super().__init__()
        self._dtype = getattr(torch, dtype)
        self._count = max(8, size // self._dtype.itemsize // 8 * 8)
        if staged:
            tensors = [torch.empty(self._count, dtype=self._dtype, device=tsn.device()) for _ in range(2)]
        else:
            tensors = [tsn.empty(self._count, self._dtype) for _ in range(2)]
        self._x, self._out = tensors
        self.heap, self.nbytes = [] if staged else tensors, self._x.nbytes
        # The running implementation's input, its result, and the comparison.
        self._reads, self._sums, self._exact, self._error, self._fp8 = self._x, self._out, True, 0.0, False

    def _data(self, seed: int, rank: int) -> Any:
        return normal_numbers((self._count,), seed + rank, self._dtype, self._x.device)

    def fill(self, seed: int) -> None:
        self._sums.zero_()
        self._reads.copy_(self._data(seed, self._rank))

    def ours(self, choices: dict[str, Any]) -> Any:
        from tilescale_net.kernels.all_reduce import AllReduce

        self._reads, self._sums, self._exact, self._error = self._x, self._out, True, 0.0
        self._fp8 = choices["algorithm"] == "fp8"
        op = AllReduce(threads=choices["threads"], blocks=choices["blocks"], algorithm=choices["algorithm"])
        return lambda: op(self._out, self._x), op.free

    def nccl(self, group: Any) -> Any:
        self._reads, self._sums, self._exact = self._out, self._out, False
        return lambda: dist.all_reduce(self._out, group=group)

    def peer(self, peer: Peer, group: Any) -> Any:
        found = made(peer, Operands(self._x, self._out, group))
        if isinstance(found, str):
            return found
        self._reads = self._x if found.x is None else found.x
        self._sums = self._out if found.out is None else found.out
        self._exact, self._error = False, FP8_ERROR if peer is ALL_REDUCE_FP8 else 0.0
        return found.run

    def difference(self, seed: int) -> str | None:
        parts = (self._data(seed, rank) for rank in range(self._n))
        if not self._fp8:
            return wrong_sums(self._sums, parts, self._exact, error=self._error)
        from tilescale_net.kernels.all_reduce_fp8 import rounded_to_fp8, shots_of

        finish = rounded_to_fp8 if shots_of(self._n) == 2 else lambda total: total
        return wrong_sums(self._sums, map(rounded_to_fp8, parts), True, finish)


def extend(parser: BenchmarkParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the tensors (bfloat16)")
    parser.flag("--staged", "tensors outside the symmetric heap")
    parser.option("--peers", one_of(*PEERS, "none"), list(PEERS), "beside ours and NCCL")
    parser.option("--dependent", int_list(0, 1), [None], "programmatic dependent launch, without (0) and with (1)")


if __name__ == "__main__":
    args = parse(
        __doc__.splitlines()[0], extend, sizes="8K..64M", simulated="8K,64K,512K", blocks=64, engines=False,
        algorithms=("one_shot", "two_shot_push", "packets", "two_shot", "two_shot_pull", "fp8"),
    )  # fmt: skip
    run(
        "all_reduce", args, lambda size: AllReduceCase(size, args.dtype, args.staged),
        peers=[peer for name, peer in PEERS.items() if name in args.peers],
    )  # fmt: skip
