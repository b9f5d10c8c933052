"""How many multiprocessors a call uses, and how much memory a buffer wants."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilescale_net.deep_ep.objects import IN_FLIGHT
from tilescale_net.kernels.moe import AllToAll

TOKENS = 4096  # of a rank, for which the hints of high-throughput buffers are made
EXPERTS = 256
NODE_RANKS = 8  # of a node at most, where hints count nodes


@dataclass(frozen=True)
class Config:
    """Choices for a high-throughput call.

    Attributes:
        num_sms: blocks of its kernels, on a GPU.
        The others are sizes of DeepEP's rings, which do not exist here; they change nothing.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of symmetric memory for 4096 tokens a rank of `hidden_bytes` bytes, top-8 of 256 experts.

        Enough for ranks of one node and for nodes of 8 ranks, whichever takes more.
        """
        experts = -(-EXPERTS // num_ranks) * num_ranks
        sizes = (experts, TOKENS, hidden_bytes // 2, max(8, num_ranks))
        options: dict[str, Any] = dict(layout="rank", combine_dtype=torch.bfloat16, ranks=num_ranks)
        return widest(num_ranks, lambda nodes: AllToAll.heap_bytes(*sizes, **options, nodes=nodes))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: ranks on other nodes use the same memory."""
        return 0


def widest(num_ranks: int, nbytes: Callable[[int], int]) -> int:
    """The most bytes of a size that depends on the number of nodes, for ranks that are of one node or of nodes of up to 8.

    Args:
        num_ranks: of the group.
        nbytes: bytes by the number of nodes.
    """
    node_size = max(size for size in range(1, NODE_RANKS + 1) if num_ranks % size == 0)
    return max(nbytes(nodes) for nodes in {1, num_ranks // node_size})


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of symmetric memory for low-latency calls with rows of BF16 and of FP8, up to top-16, two of each in flight."""
    options: dict[str, Any] = dict(mode="latency", combine_dtype=torch.bfloat16, ranks=num_ranks)
    dtypes = torch.bfloat16, torch.float8_e4m3fn

    def nbytes(nodes: int) -> int:
        sizes = num_experts, max_tokens, hidden, min(16, num_experts)
        return sum(AllToAll.heap_bytes(*sizes, dtype, **options, nodes=nodes) for dtype in dtypes)

    return IN_FLIGHT * widest(num_ranks, nbytes)
