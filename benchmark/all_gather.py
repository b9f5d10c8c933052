"""How fast all ranks get the parts of all (all-gather), next to NCCL.

    GPUS=4 bash launch.sh benchmark/all_gather.py
    GPUS=4 bash launch.sh benchmark/all_gather.py --algorithm puts,stores --blocks 16,32,64 --sizes 1M,64M

Size is that of the output, in bytes per rank. Without a GPU the simulator runs the same kernel, without NCCL.
"""

from typing import Any

from benchmark.common.arguments import on_gpu
from benchmark.common.collectives import CollectiveCase, parse, run

BENCH = dict(ranks=0, quick="--sizes 16K,64K --repeat 2")  # see common/suite.py


class AllGatherCase(CollectiveCase):
    def __init__(self, size: int) -> None:
        import torch

        import tilescale_net as tsn

        self._n, self._rank = tsn.size(), tsn.rank()
        self._part = max(16, size // self._n // 16 * 16)
        self.nbytes = self._part * self._n
        self._x = tsn.empty(self._part, torch.uint8)
        self._out = tsn.empty((self._n, self._part), torch.uint8)
        self.heap = [self._x, self._out]

    def _data(self, seed: int, rank: int) -> Any:
        from benchmark.common.measuring import random_bytes

        return random_bytes(self._part, seed + rank, self._x.device)

    def fill(self, seed: int) -> None:
        self._x.copy_(self._data(seed, self._rank))
        self._out.fill_(0xA5)

    def ours(self, choices: dict[str, Any]) -> Any:
        from tilescale_net.kernels.all_gather import AllGather

        op = AllGather(**choices)
        return lambda: op(self._out, self._x), op.free

    def nccl(self, group: Any) -> Any:
        import torch.distributed as dist

        return lambda: dist.all_gather_into_tensor(self._out.view(-1), self._x, group=group)

    def difference(self, seed: int) -> str | None:
        for rank in range(self._n):
            wrong = int((self._out[rank] != self._data(seed, rank)).sum())
            if wrong:
                return f"{wrong} of {self._part} bytes from rank {rank} are wrong"
        return None


if __name__ == "__main__":
    algorithms = ("puts", "stores")
    args = parse(__doc__.splitlines()[0], algorithms=algorithms, blocks=64 if on_gpu() else 16)
    run("all_gather", args, AllGatherCase)
