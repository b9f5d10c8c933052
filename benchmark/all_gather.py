"""Time and bandwidth of all-gather, next to NCCL.

    GPUS=4 bash launch.sh benchmark/all_gather.py
    GPUS=4 bash launch.sh benchmark/all_gather.py --algorithm puts,stores --blocks 16,32,64 --sizes 1M,64M

Size: of the output, in bytes per rank. Without a GPU the simulator runs the same kernel, without NCCL.
"""

from typing import Any

import tilescale_net as tsn
from benchmark.common.arguments import on_gpu
from benchmark.common.collectives import CollectiveCase, parse, run
from benchmark.common.modules import dist, torch

BENCH = dict(ranks=0, quick="--sizes 16K,64K --repeat 2")  # see common/suite.py


class AllGatherCase(CollectiveCase):
    def __init__(self, size: int) -> None:
        super().__init__()
        part = max(16, size // self._n // 16 * 16)
        self.nbytes = part * self._n
        self._x, self._out = tsn.empty(part, torch.uint8), tsn.empty((self._n, part), torch.uint8)
        self.heap = [self._x, self._out]

    def ours(self, choices: dict[str, Any]) -> Any:
        from tilescale_net.kernels.all_gather import AllGather

        op = AllGather(**choices)
        return lambda: op(self._out, self._x), op.free

    def nccl(self, group: Any) -> Any:
        return lambda: dist.all_gather_into_tensor(self._out.view(-1), self._x, group=group)

    def received(self, seed: int) -> Any:
        return ((self._out[rank], self._data(seed, rank)) for rank in range(self._n))


if __name__ == "__main__":
    algorithms = ("puts", "stores")
    args = parse(__doc__.splitlines()[0], algorithms=algorithms, blocks=64 if on_gpu() else 16)
    run("all_gather", args, AllGatherCase)
