"""How fast all ranks get the sum of all ranks' tensors (all-reduce), next to NCCL and torch's symmetric memory.

    GPUS=4 bash launch.sh benchmark/all_reduce.py
    GPUS=4 bash launch.sh benchmark/all_reduce.py --algorithm one_shot --sizes 64K..1M --blocks 32,64

Size is that of the tensor, in bytes per rank. Our sums are compared bit by bit with a sum in the order of the ranks; those
of the others, whose order is their own, only roughly. Of torch's symmetric memory the best way is shown. Without a GPU the
simulator runs the same kernels alone.
"""

from typing import Any

import tilescale_net as tsn
from benchmark.common.arguments import BenchmarkParser
from benchmark.common.collectives import DTYPES, CollectiveCase, parse, run, wrong_sums
from benchmark.common.measuring import normal_numbers
from benchmark.common.modules import dist, symmetric_memory, torch

BENCH = dict(ranks=0, quick="--sizes 16K,64K --repeat 2")  # see common/suite.py

ONE_SHOT_UP_TO = 4 << 20  # bytes; beyond, torch's takes far longer than its other way


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
        # What the implementation that runs works on, and its result where that lies elsewhere.
        self._sums, self._found, self._exact = self._out, None, True

    def _data(self, seed: int, rank: int) -> Any:
        return normal_numbers((self._count,), seed + rank, self._dtype, self._x.device)

    def fill(self, seed: int) -> None:
        self._x.copy_(self._data(seed, self._rank))
        self._sums.copy_(self._x)
        self._found = None

    def ours(self, choices: dict[str, Any]) -> Any:
        from tilescale_net.kernels.all_reduce import AllReduce

        self._sums, self._exact = self._out, True
        op = AllReduce(threads=choices["threads"], blocks=choices["blocks"], algorithm=choices["algorithm"])
        return lambda: op(self._out, self._x), op.free

    def nccl(self, group: Any) -> Any:
        self._sums, self._exact = self._out, False
        return lambda: dist.all_reduce(self._out, group=group)

    def symmetric(self, group: Any) -> Any:
        self._exact = False
        self._sums = symmetric_memory.empty(self._count, dtype=self._dtype, device=self._x.device)
        symmetric_memory.rendezvous(self._sums, group.group_name)
        ops, name = torch.ops.symm_mem, group.group_name

        def one_shot() -> None:
            self._found = ops.one_shot_all_reduce(self._sums, "sum", name)

        ways = {"two-shot": lambda: ops.two_shot_all_reduce_(self._sums, "sum", name)}
        return ways | ({"one-shot": one_shot} if self.nbytes <= ONE_SHOT_UP_TO else {})

    def difference(self, seed: int) -> str | None:
        found = self._sums if self._found is None else self._found
        return wrong_sums(found, (self._data(seed, rank) for rank in range(self._n)), self._exact)


def extend(parser: BenchmarkParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the tensors (bfloat16)")
    parser.flag("--staged", "tensors outside the symmetric heap")


if __name__ == "__main__":
    args = parse(
        __doc__.splitlines()[0], extend, sizes="8K..64M", simulated="8K,64K,512K", blocks=64, engines=False,
        algorithms=("one_shot", "two_shot_push", "packets", "two_shot"),
    )  # fmt: skip
    run("all_reduce", args, lambda size: AllReduceCase(size, args.dtype, args.staged))
