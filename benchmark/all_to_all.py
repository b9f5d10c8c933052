"""How fast all ranks exchange rows with all others (all-to-all), next to NCCL.

    GPUS=4 bash launch.sh benchmark/all_to_all.py
    GPUS=4 bash launch.sh benchmark/all_to_all.py --algorithm puts,stores --blocks 16,32,64 --sizes 1M,64M
    GPUS=4 bash launch.sh benchmark/all_to_all.py --uneven

Size is that of the input, in bytes per rank. With --uneven each pair exchanges a random number of rows of 1 KiB, between
half and one and a half times the mean; the splits are in device memory. Without a GPU the simulator runs the same
kernels, without NCCL.
"""

import random
from typing import Any

from benchmark.common.arguments import on_gpu
from benchmark.common.collectives import CollectiveCase, parse, run

BENCH = dict(ranks=0, quick="--sizes 16K,64K --repeat 2")  # see common/suite.py

ROW = 1024  # bytes


class AllToAllCase(CollectiveCase):
    def __init__(self, size: int, uneven: bool) -> None:
        import torch

        import tilescale_net as tsn

        self._n, self._rank, self._uneven = tsn.size(), tsn.rank(), uneven
        row = ROW if uneven else 16
        mean = max(1, size // self._n // row)
        pace = random.Random(size)  # equal on all ranks
        low, high = (mean // 2, mean + mean // 2) if uneven else (mean, mean)
        self._splits = [[pace.randint(low, high) for _ in range(self._n)] for _ in range(self._n)]
        self._sends = self._splits[self._rank]
        self._receives = [self._splits[src][self._rank] for src in range(self._n)]
        most = max(max(sum(s) for s in self._splits), max(sum(s[r] for s in self._splits) for r in range(self._n)))
        self.heap = [tsn.empty((most, row), torch.uint8) for _ in range(2)]
        self._x, self._out = self.heap[0][: sum(self._sends)], self.heap[1][: sum(self._receives)]
        self.nbytes = sum(map(sum, self._splits)) * row // self._n

    def _data(self, seed: int, rank: int) -> Any:
        from benchmark.common.measuring import random_bytes

        row = self._x.shape[1]
        return random_bytes(sum(self._splits[rank]) * row, seed + rank, self._x.device).view(-1, row)

    def fill(self, seed: int) -> None:
        self._x.copy_(self._data(seed, self._rank))
        self._out.fill_(0xA5)

    def ours(self, choices: dict[str, Any]) -> Any:
        import torch

        from tilescale_net.kernels.all_to_all import AllToAll

        op = AllToAll(**choices)
        if not self._uneven:
            return lambda: op(self._out, self._x), op.free
        splits = [torch.tensor(s, dtype=torch.int64, device=self._x.device) for s in (self._receives, self._sends)]
        return lambda: op(self._out, self._x, *splits), op.free

    def nccl(self, group: Any) -> Any:
        import torch.distributed as dist

        receives, sends = (self._receives, self._sends) if self._uneven else (None, None)
        return lambda: dist.all_to_all_single(self._out, self._x, receives, sends, group=group)

    def difference(self, seed: int) -> str | None:
        for rank, found in enumerate(self._out.split(self._receives)):
            wrong = int((found != self._data(seed, rank).split(self._splits[rank])[self._rank]).sum())
            if wrong:
                return f"{wrong} of {found.numel()} bytes from rank {rank} are wrong"
        return None


if __name__ == "__main__":
    args = parse(
        __doc__.splitlines()[0],
        lambda parser: parser.add_argument("--uneven", action="store_true", help="random numbers of rows per pair"),
        algorithms=("puts", "stores"),
        blocks=64 if on_gpu() else 16,
    )
    run("all_to_all", args, lambda size: AllToAllCase(size, args.uneven), heap_factor=3.5)
