"""Attention whose sequence is spread over the ranks (Ulysses), and decoding with a KV cache that is.

Rank r has lengths[r] tokens. For attention the ranks exchange tokens for heads, one chunk of heads while another is computed,
and back. To decode, each rank attends to its own tokens, and the outputs are merged by their lse.
"""

import torch

import tilescale_net as tsn
from tilescale_net import ops

HEADS, DIM = 4, 32  # of a rank


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention, of [sequence, heads, dim]."""
    heads_first = (x.transpose(-3, -2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(-3, -2)


def attend_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One query of each head [1, heads, dim] to a cache [sequence, heads, dim]: output, and lse [1, heads]."""
    scores = torch.einsum("qhd,khd->qhk", q, k) / DIM**0.5
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def main() -> None:
    tsn.init()
    rank, size, device = tsn.rank(), tsn.size(), tsn.device()
    lengths = [10 + 3 * p for p in range(size)]
    rows = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    generator = torch.Generator().manual_seed(1)  # the same numbers on all ranks
    shape = sum(lengths), HEADS * size, DIM
    whole = [torch.randn(shape, generator=generator).to(device).requires_grad_() for _ in range(3)]

    mine = [x.detach()[rows].requires_grad_() for x in whole]
    y = ops.attention_by_heads(attend, *mine, lengths=lengths, chunks=2)
    y.square().sum().backward()
    wanted = attend(*whole)
    wanted.square().sum().backward()
    assert torch.allclose(y, wanted[rows], rtol=1e-3, atol=1e-4)
    for x, reference in zip(mine, whole):
        assert torch.allclose(x.grad, reference.grad[rows], rtol=1e-3, atol=1e-3)

    with torch.no_grad():
        query = whole[0][-1:]  # a rank has it of all heads
        out, _ = ops.merge_attention(*attend_once(query, *(x.detach() for x in mine[1:])))
        exact, _ = attend_once(query, *whole[1:])
        assert torch.allclose(out, exact.chunk(size, 1)[rank], rtol=1e-3, atol=1e-4)
    print(f"rank {rank}: {lengths[rank]} of {sum(lengths)} tokens, attention, its gradients and decoding are right")
    tsn.finalize()


if __name__ == "__main__":
    main()
