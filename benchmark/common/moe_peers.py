"""What the mixture-of-experts kernels are compared with: NCCL's all_to_all_single, and DeepEP where it is installed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmark.common.moe_data import Inputs

_groups: dict = {}


def nccl_group():
    """A process group over NCCL, made once. Collective."""
    if "nccl" not in _groups:
        _groups["nccl"] = dist.new_group(backend="nccl")
    return _groups["nccl"]


class Nccl:
    """all_to_all_single of the rows, one per token and rank: no permutation before, no sum after.

    Args:
        everyone: all ranks' inputs; words: 4-byte words of a row with its scales.
    """

    name = "NCCL"

    def __init__(self, everyone: list[Inputs], experts: int, rank: int, words: int, device):
        ranks, local = len(everyone), experts // len(everyone)
        self._group = nccl_group()
        sends = [int((everyone[rank].topk_idx // local == d).any(1).sum()) for d in range(ranks)]
        receives = [int((e.topk_idx // local == rank).any(1).sum()) for e in everyone]
        self._sends, self._receives = sends, receives
        self._x = torch.zeros((sum(sends), words), dtype=torch.int32, device=device)
        self._y = torch.zeros((sum(receives), words), dtype=torch.int32, device=device)

    def dispatch(self):
        dist.all_to_all_single(self._y, self._x, self._receives, self._sends, group=self._group)

    def combine(self):
        dist.all_to_all_single(self._x, self._y, self._sends, self._receives, group=self._group)


class DeepEP:
    """DeepEP in its normal mode with a cached layout, or in its low-latency mode over NVLink.

    Raises whatever the package raises when it cannot run here.
    """

    name = "DeepEP"

    def __init__(self, mode: str, mine: Inputs, max_tokens: int, experts: int, fp8: bool):
        import deep_ep

        group = nccl_group()
        self._mode, self._fp8, self._experts, self._tokens = mode, fp8, experts, max_tokens
        self._idx, self._weights, self._x = mine.topk_idx, mine.topk_weights.float(), mine.x
        hidden = mine.x.shape[1]
        if mode == "latency":
            size = deep_ep.Buffer.get_low_latency_rdma_size_hint(max_tokens, hidden, group.size(), experts)
            self._buffer = deep_ep.Buffer(
                group, 0, size, low_latency_mode=True, num_qps_per_rank=experts // group.size(),
                allow_nvlink_for_low_latency_mode=True,
            )  # fmt: skip
            self._y = None
            self.dispatch()
            shape = (experts // group.size(), max_tokens * group.size(), hidden)
            self._y = torch.zeros(shape, dtype=torch.bfloat16, device=mine.x.device)
            return
        self._buffer = deep_ep.Buffer(group, int(2e9), 0)
        layout = self._buffer.get_dispatch_layout(self._idx, experts)
        ranks, _, per_expert, in_rank = layout[0], layout[1], layout[2], layout[3]
        payload = (mine.x_fp8, mine.scales) if fp8 else mine.x
        received, _, _, _, self._handle, _ = self._buffer.dispatch(
            payload, num_tokens_per_rank=ranks, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=self._idx, topk_weights=self._weights,
        )  # fmt: skip
        self._payload = payload
        rows = received[0] if isinstance(received, tuple) else received
        self._y = torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device)

    def dispatch(self):
        if self._mode == "latency":
            _, _, self._handle, _, _ = self._buffer.low_latency_dispatch(
                self._x, self._idx, self._tokens, self._experts, use_fp8=self._fp8
            )
        else:
            self._buffer.dispatch(self._payload, handle=self._handle)

    def combine(self):
        if self._mode == "latency":
            self._buffer.low_latency_combine(self._y, self._idx, self._weights, self._handle)
        else:
            self._buffer.combine(self._y, self._handle)
