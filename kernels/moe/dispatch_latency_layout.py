"""Sizes of dispatch in latency mode, and the groups of tensors that its steps take; see dispatch_latency.py."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tilescale_net.kernels.moe.row_ops import Rows, batch_of
from tilescale_net.kernels.moe.wire_layout import Header, Message


@dataclass(frozen=True)
class Sizes:
    """Compile-time sizes and choices; see dispatch_latency."""

    ranks: int
    experts: int
    top_k: int
    max_tokens: int
    row_words: int
    scale_words: int
    source_dtype: str
    blocks: int
    threads: int
    node_size: int = 0  # ranks of a node, where rows cross the network once per node
    timed: bool = False

    @property
    def nodes(self) -> int:
        return self.ranks // self.node_size if self.node_size else 0

    @property
    def bins(self) -> int:
        return self.experts + self.ranks + self.nodes

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ranks

    @property
    def capacity(self) -> int:
        """Rows of an expert."""
        return self.ranks * self.max_tokens

    @property
    def message(self) -> Message:
        return Message(self.row_words, self.scale_words, self.top_k, self.nodes > 0)

    @property
    def header(self) -> Header:
        return Header(self.local, self.nodes > 0)

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def quantise(self) -> bool:
        return self.source_dtype != ""

    @property
    def source_type(self) -> str:
        return self.source_dtype or "int32"

    @property
    def source_width(self) -> int:
        """Elements of a row as the caller has it."""
        return self.row_words * 4 if self.quantise else self.row_words

    @property
    def width(self) -> int:
        """Elements of 16 bytes of such a row."""
        return 4 if self.source_type in ("float32", "int32") else 8

    @property
    def units(self) -> int:
        """Pieces of 16 bytes in such a row."""
        return self.source_width // self.width

    @property
    def batch(self) -> int:
        """Pieces of a thread; a block holds a whole row."""
        return -(-self.units // self.threads)

    @property
    def row_batch(self) -> int:
        """Pieces of a lane and batch of a row as it travels."""
        return batch_of(self.row_words // 4, 16)


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
