"""How many multiprocessors a call uses, and how much memory a buffer wants."""

from dataclasses import dataclass

import torch

from tilescale_net.deep_ep.objects import IN_FLIGHT
from tilescale_net.kernels.moe import AllToAll

TOKENS = 4096  # of a rank, for which the hints of high-throughput buffers are made
EXPERTS = 256
RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)  # for which DeepEP has configurations


@dataclass(frozen=True)
class Config:
    """Choices for a high-throughput call.

    Attributes:
        num_sms: blocks of its kernels, on a GPU.
        The others are sizes of DeepEP's rings, which there are none of here; they change nothing.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of symmetric memory for 4096 tokens a rank of `hidden_bytes` bytes, top-8 of 256 experts."""
        experts = -(-EXPERTS // num_ranks) * num_ranks
        sizes = (experts, TOKENS, hidden_bytes // 2, max(8, num_ranks))
        return AllToAll.heap_bytes(*sizes, layout="rank", combine_dtype=torch.bfloat16, ranks=num_ranks)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: ranks on other nodes use the same memory."""
        return 0


def recommended(num_ranks: int, num_sms: int) -> Config:
    """The configuration for a number of ranks. Raises ValueError for one that DeepEP has none for."""
    if num_ranks not in RANKS:
        raise ValueError(f"{num_ranks} ranks: there are configurations for {', '.join(map(str, RANKS))}")
    return Config(num_sms)


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of symmetric memory for low-latency calls with rows of BF16 and of FP8, up to top-16, two of each in flight."""
    return IN_FLIGHT * sum(
        AllToAll.heap_bytes(
            num_experts, max_tokens, hidden, 16, dtype, "latency", combine_dtype=torch.bfloat16, ranks=num_ranks
        )
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    )
