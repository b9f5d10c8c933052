"""08: the package's collectives: by class, in a CUDA graph, and as operators with gradients.

The earlier tutorials wrote kernels. The package has all-gather, reduce-scatter and all-reduce: as classes, for code that
keeps its tensors and needs no copy, and as operators of torch, for code that needs gradients.

1. **By class.** All ranks construct an object once: it agrees on its launch, and owns the signals and staging memory of
   its calls. A call names the result first, runs on torch's current stream, and returns before the result is complete.
   `AllGather` writes into the memory of the peers, so `out` is symmetric (`tsn.empty`); sources and results of the
   reductions may be any tensors, and symmetric ones are read in place.
2. **In a CUDA graph.** The arguments of a call do not depend on the number of earlier calls, so a graph can replay a
   captured call: the data may change, the addresses may not. Make each call once before the capture: it compiles
   kernels, and ranks agree on shapes. All ranks replay the graph equally often. The simulator has no graphs and repeats
   the calls.
3. **By operator, with a gradient.** `ops.all_gather` returns a new tensor; its gradient is the reduce-scatter of the
   result's gradient, and the reverse. Each rank keeps a part of a weight and gathers it in forward; backward returns the
   gradient of this part, summed over all ranks. `ops.all_reduce` sums the loss.

All ranks make the same calls in the same order, backward too. The results of the reductions have the same bits on all
ranks: sums are made in float32 in the order of the ranks, and rounded once.
"""

import torch

import tilescale_net as tsn
from tilescale_net import ops
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.reduce_scatter import ReduceScatter

N, ROWS, COLUMNS = 1000, 8, 16


class Calls:
    """Three collectives and their tensors: every rank's `x` together, the sum of all, and this rank's part of a sum."""

    def __init__(self):
        size = tsn.size()
        self.gather, self.reduce, self.scatter = AllGather(), AllReduce(), ReduceScatter()
        self.x, self.everyone, self.parts = tsn.zeros(N), tsn.zeros((size, N)), tsn.zeros((size, N))
        self.total = torch.zeros(N, device=tsn.device())  # no other rank accesses it: an ordinary tensor
        self.part = torch.zeros(N, device=tsn.device())

    def fill(self, value):
        """Set this rank's input: `value` in `x`, and `value + p` in the part for rank p."""
        self.x.fill_(value)
        self.parts.copy_((value + torch.arange(tsn.size(), device=tsn.device()))[:, None])

    def __call__(self):
        self.gather(self.everyone, self.x)
        self.reduce(self.total, self.x)
        self.scatter(self.part, self.parts)

    def told(self):
        return f"everyone {self.everyone[:, 0].tolist()}, total {self.total[0].item()}, part {self.part[0].item()}"

    def check(self, values):
        """The results for these values of the ranks."""
        values = torch.tensor(values, dtype=torch.float32, device=tsn.device())
        assert torch.equal(self.everyone, values[:, None].expand(-1, N)), "the all-gather is wrong"
        assert (self.total == values.sum()).all(), "the all-reduce is wrong"
        assert (self.part == (values + tsn.rank()).sum()).all(), "the reduce-scatter is wrong"


def captured(calls):
    """A function that makes the calls once more: a replay of a graph on GPUs, the calls themselves elsewhere."""
    if tsn.device().type != "cuda":
        return calls
    graph = torch.cuda.CUDAGraph()
    # Other threads of this process may use CUDA meanwhile, for the job's progress.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        calls()
    return graph.replay


def sharded_step():
    """One step of a linear layer whose weight is sharded over the ranks: the gradient's largest error, the mean loss."""
    size, rank, device = tsn.size(), tsn.rank(), tsn.device()
    generator = torch.Generator().manual_seed(1)  # the same numbers on all ranks: each can check them
    weight = torch.randn((ROWS * size, COLUMNS), generator=generator).to(device)
    x = torch.randn((size, 4, ROWS * size), generator=generator).to(device)

    part = weight[rank * ROWS : (rank + 1) * ROWS].clone().requires_grad_()
    loss = (x[rank] @ ops.all_gather(part)).square().mean()
    loss.backward()  # all ranks: the gradient of an all-gather is a reduce-scatter
    mean = ops.all_reduce(loss.detach().view(1)) / size

    whole = weight.clone().requires_grad_()
    sum((mine @ whole).square().mean() for mine in x).backward()
    wanted = whole.grad[rank * ROWS : (rank + 1) * ROWS]
    return ((part.grad - wanted).abs().max() / wanted.abs().max()).item(), mean.item()


def main():
    tsn.init()
    rank, size = tsn.rank(), tsn.size()
    calls = Calls()
    calls.fill(rank + 1)
    calls()
    calls.check([r + 1 for r in range(size)])
    if rank == 0:
        print("once:", calls.told())

    again = captured(calls)
    for turn in (10, 20):
        calls.fill(turn + rank)
        again()  # no barrier: a call waits until the others have ended the call before
        calls.check([turn + r for r in range(size)])
        if rank == 0:
            print(f"again with {turn}:", calls.told())

    error, mean = sharded_step()
    assert error < 1e-4, f"the gradient is off by {error}"
    if rank == 0:
        print(f"a sharded weight: mean loss {mean:.1f}, its gradient is that of all ranks' losses")
    tsn.finalize()


if __name__ == "__main__":
    main()
