"""A tensor-parallel MLP: rows of the activations and columns of the weights are sharded over the ranks.

Rank r has rows r of `x`, columns r of `up` and rows r of `down`. The first GEMM needs all rows (all-gather), the second
leaves a summand of all rows on each rank (reduce-scatter); both communicate while they multiply where that is faster.
"""

import torch

import tilescale_net as tsn
from tilescale_net import ops

ROWS, HIDDEN, WIDTH = 32, 64, 128  # of a rank, of a row, of all ranks' hidden layer


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """[ROWS, HIDDEN] -> [ROWS, HIDDEN] of this rank; differentiable."""
    return ops.matmul_reduce_scatter(torch.relu(ops.all_gather_matmul(x, up)), down)


def main() -> None:
    tsn.init()
    rank, size, device = tsn.rank(), tsn.size(), tsn.device()
    generator = torch.Generator().manual_seed(1)  # the same numbers on all ranks
    shapes = (size * ROWS, HIDDEN), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    whole = [torch.randn(s, generator=generator).to(device, torch.bfloat16) / s[0] ** 0.5 for s in shapes]

    part = WIDTH // size
    x, up = whole[0][rank * ROWS : (rank + 1) * ROWS], whole[1][:, rank * part : (rank + 1) * part]
    mine = [t.contiguous().requires_grad_() for t in (x, up, whole[2][rank * part : (rank + 1) * part])]
    y = mlp(*mine)
    y.square().sum().backward()

    exact = [t.float().requires_grad_() for t in whole]
    wanted = torch.relu(exact[0] @ exact[1]) @ exact[2]
    wanted.square().sum().backward()
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    assert torch.allclose(y.float(), wanted[rows], rtol=0.05, atol=0.05)
    gradient = exact[0].grad[rows]
    error = (mine[0].grad.float() - gradient).abs().max() / gradient.abs().max()
    assert error < 0.05, f"the gradient of x is off by {error}"
    print(f"rank {rank}: {list(y.shape)}, gradient off by at most 5 %")
    tsn.finalize()


if __name__ == "__main__":
    main()
