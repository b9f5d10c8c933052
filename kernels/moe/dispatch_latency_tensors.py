"""The groups of tensors that the steps of dispatch in latency mode take; see dispatch_latency.py."""

from typing import Any, NamedTuple

from tilescale_net.kernels.moe.row_ops import Rows


class Messages(NamedTuple):
    """The messages that a rank makes, one per token, [2 * max_tokens, …]: the same symmetric memory as different types.

    Attributes:
        words: int32, see Message. fp8: bytes of a row that is quantised. scales: float32, its scales.
    """

    words: Any
    fp8: Any
    scales: Any


class Kept(NamedTuple):
    """What is kept of the rows that come, see ReceivedRows.

    Attributes:
        out: rows and scales that the caller gets, int32 [local experts * ranks * max_tokens, …].
        counts: int32 [local experts]. received: int32 [ranks]. source_counts: int32 [local experts, ranks].
        targets: int32, weights: float32, [ranks * max_tokens, top_k].
        source_token: int32 [local experts, ranks * max_tokens].
    """

    out: Rows
    counts: Any
    received: Any
    source_counts: Any
    targets: Any
    weights: Any
    source_token: Any


class Memory(NamedTuple):
    """The tensors of a dispatch. Of each two sets of messages, headers and signals, calls use one and the other.

    Attributes:
        x: the caller's rows: int32 words with scales, or elements to be quantised.
        topk_idx: int32 or int64, topk_weights: float32, [rows, top_k].
        active: int32 [ranks], 0 for a rank that is left out.
        message: what this rank sends.
        header_out, header_in: int32 [2 * ranks, …], symmetric, see Header.
        begun: uint64 [2 * ranks], symmetric: the last call that each rank has begun, with the number of its messages.
        arrival: int32 [2 * ranks * max_tokens, …], symmetric, see Message. arrived: uint64, the last call of each message.
        token_slot: int32 [rows, ranks], the place of a token's message at each rank, or -1.
        kept: what is kept of the rows that come.
        status: see STATUS_WORDS. waited: uint64 [ranks], clocks of waiting for each rank, where that is timed.
        relayed, came: as arrival and arrived, of [2 * slots of a gateway * max_tokens] messages to be passed on.
        origin_slot: int32 [rows, origins], as token_slot.
        passing: int32 [slots of a gateway], of shared memory: messages to be passed on from the source of each slot. These
            four where rows cross the network once per node.
    """

    x: Rows
    topk_idx: Any
    topk_weights: Any
    active: Any
    message: Messages
    header_out: Any
    header_in: Any
    begun: Any
    arrival: Any
    arrived: Any
    token_slot: Any
    kept: Kept
    status: Any
    waited: Any = None
    relayed: Any = None
    came: Any = None
    origin_slot: Any = None
    passing: Any = None


class Chosen(NamedTuple):
    """The choices of a block's token; int32 [top_k] each, of shared memory.

    Attributes:
        mine: the experts, or -1. same_expert: earlier choices of the same expert.
        same_rank, same_node: earlier tokens with a choice at the same rank, or in the same node.
    """

    mine: Any
    same_expert: Any
    same_rank: Any
    same_node: Any = None
