"""Time and bandwidth of reduce-scatter, next to NCCL.

    GPUS=4 bash launch.sh benchmark/reduce_scatter.py
    GPUS=4 bash launch.sh benchmark/reduce_scatter.py --dtype float32 --blocks 16,32

Size: of the input, in bytes per rank. Our sums are compared bit by bit with a sum in the order of the ranks; NCCL's,
whose order differs, only roughly. Without a GPU the simulator runs the same kernel, without NCCL.
"""

from typing import Any

import tilescale_net as tsn
from benchmark.common.arguments import BenchmarkParser
from benchmark.common.collectives import DTYPES, CollectiveCase, parse, run, wrong_sums
from benchmark.common.measuring import normal_numbers
from benchmark.common.modules import dist, torch

BENCH = dict(ranks=0, quick="--sizes 16K,64K --repeat 2")  # see common/suite.py


class ReduceScatterCase(CollectiveCase):
    def __init__(self, size: int, dtype: str) -> None:
        super().__init__()
        self._dtype = getattr(torch, dtype)
        self._count = max(8, size // self._n // self._dtype.itemsize // 8 * 8)
        self._x = tsn.empty((self._n, self._count), self._dtype)
        self.heap, self.nbytes = [self._x], self._x.nbytes
        self._out = torch.empty(self._count, dtype=self._dtype, device=tsn.device())
        self._exact = True

    def _part(self, seed: int, rank: int, part: int) -> Any:
        return normal_numbers((self._count,), seed + rank * self._n + part, self._dtype, self._x.device)

    def fill(self, seed: int) -> None:
        for part in range(self._n):
            self._x[part] = self._part(seed, self._rank, part)
        self._out.fill_(float("nan"))

    def ours(self, choices: dict[str, Any]) -> Any:
        from tilescale_net.kernels.reduce_scatter import ReduceScatter

        self._exact = True
        op = ReduceScatter(**choices)
        return lambda: op(self._out, self._x), op.free

    def nccl(self, group: Any) -> Any:
        self._exact = False
        return lambda: dist.reduce_scatter_tensor(self._out, self._x.view(-1), group=group)

    def difference(self, seed: int) -> str | None:
        return wrong_sums(self._out, (self._part(seed, r, self._rank) for r in range(self._n)), self._exact)


def extend(parser: BenchmarkParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the tensors (bfloat16)")


if __name__ == "__main__":
    args = parse(__doc__.splitlines()[0], extend, algorithms=("push", "pull"))
    run("reduce_scatter", args, lambda size: ReduceScatterCase(size, args.dtype))
