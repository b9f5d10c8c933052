"""A mixture-of-experts layer: a router sends each token to two of the experts, which are spread over the ranks.

`moe_dispatch` brings each rank the rows of its experts, expert by expert; `moe_combine` returns their results, weighted and
summed per token. Both are differentiable: the gradient reaches the tokens, the experts and the router's weights.
"""

import torch

import tilescale_net as tsn
from tilescale_net import ops

TOKENS, HIDDEN, EXPERTS, TOP_K = 24, 64, 8, 2


def experts(x: torch.Tensor, counts: list[int], weights: torch.Tensor) -> torch.Tensor:
    """Rows of expert e, which are `counts[e]` of `x` in a row, times `weights[e]`."""
    parts = x.split([*counts, len(x) - sum(counts)])
    return torch.cat([part @ w for part, w in zip(parts, weights)] + [parts[-1]])


def main() -> None:
    tsn.init()
    rank, size, device = tsn.rank(), tsn.size(), tsn.device()
    generator = torch.Generator().manual_seed(3)  # the same numbers on all ranks
    tokens = torch.randn((size, TOKENS, HIDDEN), generator=generator).to(device)
    scores = torch.rand((size, TOKENS, EXPERTS), generator=generator).to(device)
    matrices = torch.randn((EXPERTS, HIDDEN, HIDDEN), generator=generator).to(device) / HIDDEN**0.5
    local = EXPERTS // size

    layer = ops.moe_layer(EXPERTS, TOKENS, HIDDEN, TOP_K, torch.float32)
    x = tokens[rank].clone().requires_grad_()
    weights, chosen = scores[rank].softmax(1).topk(TOP_K)
    received = ops.moe_dispatch(layer, x, chosen, weights)
    own = matrices[rank * local : (rank + 1) * local].clone().requires_grad_()
    y = ops.moe_combine(layer, experts(received.x, received.counts.tolist(), own), received)
    y.square().sum().backward()

    wanted = torch.einsum("tk,tkij,ti->tj", weights, matrices[chosen], tokens[rank])
    assert torch.allclose(y, wanted, rtol=1e-3, atol=1e-3)
    assert x.grad.abs().sum() > 0 and own.grad.abs().sum() > 0
    print(f"rank {rank}: {TOKENS} tokens out, {received.counts.sum()} rows in")
    tsn.finalize()


if __name__ == "__main__":
    main()
