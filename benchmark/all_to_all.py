"""Time and bandwidth of all-to-all, next to NCCL.

    GPUS=4 bash launch.sh benchmark/all_to_all.py
    GPUS=4 bash launch.sh benchmark/all_to_all.py --algorithm puts,stores --blocks 16,32,64 --sizes 1M,64M
    GPUS=4 bash launch.sh benchmark/all_to_all.py --uneven

Size: of the input, in bytes per rank. With --uneven each pair exchanges a random number of rows of 1 KiB, between
half and one and a half times the mean; the splits are in device memory. Without a GPU the simulator runs the same
kernels, without NCCL.
"""

import random
from typing import Any

import tilescale_net as tsn
from benchmark.common.arguments import on_gpu
from benchmark.common.collectives import CollectiveCase, parse, run
from benchmark.common.measuring import random_bytes
from benchmark.common.modules import dist, torch

BENCH = dict(ranks=0, quick="--sizes 16K,64K --repeat 2")  # see common/suite.py

ROW = 1024  # bytes


class AllToAllCase(CollectiveCase):
    def __init__(self, size: int, uneven: bool) -> None:
        super().__init__()
        ranks, self._uneven = range(self._n), uneven
        row = ROW if uneven else 16
        mean = max(1, size // self._n // row)
        pace = random.Random(size)  # equal on all ranks
        low, high = (mean // 2, mean + mean // 2) if uneven else (mean, mean)
        self._splits = [[pace.randint(low, high) for _ in ranks] for _ in ranks]
        self._sends, self._receives = self._splits[self._rank], [split[self._rank] for split in self._splits]
        most = max(max(map(sum, self._splits)), max(map(sum, zip(*self._splits))))
        self.heap = [tsn.empty((most, row), torch.uint8) for _ in range(2)]
        self._x, self._out = self.heap[0][: sum(self._sends)], self.heap[1][: sum(self._receives)]
        self.nbytes = sum(map(sum, self._splits)) * row // self._n

    def _data(self, seed: int, rank: int) -> Any:
        row = self._x.shape[1]
        return random_bytes(sum(self._splits[rank]) * row, seed + rank, self._x.device).view(-1, row)

    def ours(self, choices: dict[str, Any]) -> Any:
        from tilescale_net.kernels.all_to_all import AllToAll

        op = AllToAll(**choices)
        if not self._uneven:
            return lambda: op(self._out, self._x), op.free
        splits = [torch.tensor(s, dtype=torch.int64, device=self._x.device) for s in (self._receives, self._sends)]
        return lambda: op(self._out, self._x, *splits), op.free

    def nccl(self, group: Any) -> Any:
        receives, sends = (self._receives, self._sends) if self._uneven else (None, None)
        return lambda: dist.all_to_all_single(self._out, self._x, receives, sends, group=group)

    def received(self, seed: int) -> Any:
        for rank, found in enumerate(self._out.split(self._receives)):
            yield found, self._data(seed, rank).split(self._splits[rank])[self._rank]


if __name__ == "__main__":
    args = parse(
        __doc__.splitlines()[0],
        lambda parser: parser.flag("--uneven", "random numbers of rows per pair"),
        algorithms=("puts", "stores"),
        blocks=64 if on_gpu() else 16,
    )
    run("all_to_all", args, lambda size: AllToAllCase(size, args.uneven), heap_factor=3.5)
