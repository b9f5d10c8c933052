"""Sizes and places in what ranks send one another, on which the kernels and the host agree."""

from dataclasses import dataclass

from tilescale_net.kernels.announcement import TAG_BITS


def align4(n: int) -> int:
    """The next multiple of four words, so that every row of words is a multiple of 16 bytes."""
    return -(-n // 4) * 4


# What a rank may find wrong with a call; every rank gets the code, the value and the rank. Codes from HOST_FAULT on
# were found by the host of that rank before it launched anything.
NO_FAULT, BAD_EXPERT, NO_ROOM, CROWDED, OTHER_OUTPUT, HOST_FAULT = range(6)
# A call begins with a word from every rank to every rank: the number of the call, then a tag of TAG_BITS. Of the tag,
# the lowest CODE_BITS hold what that rank found wrong, the others which output it gave.
CODE_BITS = 5
# In a dispatch of latency mode the number of the call is followed by the number of messages to expect, in COUNT_BITS.
COUNT_BITS = 32


@dataclass(frozen=True)
class Counts:
    """One rank's row of counts: choices per expert, rows per rank, then its fault.

    Attributes:
        bins: experts + ranks.
        code, value: places of the fault.
        words: length of the row.
    """

    experts: int
    ranks: int

    @property
    def bins(self) -> int:
        return self.experts + self.ranks

    @property
    def code(self) -> int:
        return self.bins

    @property
    def value(self) -> int:
        return self.bins + 1

    @property
    def words(self) -> int:
        return align4(self.bins + 2)


@dataclass(frozen=True)
class Totals:
    """Places in a routing plan's vector of totals (int32).

    Attributes:
        sent: [ranks] rows that this rank sends to each rank.
        sent_before: [ranks] rows that this rank sends to the ranks before each; of the same node, where rows cross the
            network once per node.
        sent_base: [ranks] index of the first of them among that rank's rows.
        received: [ranks] rows that come from each rank.
        received_base: [ranks + 1] index of the first of them, and the sum.
        slots_base: [ranks] rows that each rank sends to the ranks before this one, of its node as above.
        refused: not 0 where the dispatch was refused.
        counts: [local experts] rows of each local expert.
        offsets: [local experts + 1] first row of each local expert, aligned, and the end.
        by_source: [local experts, ranks] rows of each local expert from each rank.
    """

    ranks: int
    local_experts: int

    @property
    def sent(self) -> int:
        return 0

    @property
    def sent_base(self) -> int:
        return self.ranks

    @property
    def received(self) -> int:
        return 2 * self.ranks

    @property
    def received_base(self) -> int:
        return 3 * self.ranks

    @property
    def counts(self) -> int:
        return 4 * self.ranks + 1

    @property
    def offsets(self) -> int:
        return self.counts + self.local_experts

    @property
    def by_source(self) -> int:
        return self.offsets + self.local_experts + 1

    @property
    def sent_before(self) -> int:
        return self.by_source + self.local_experts * self.ranks

    @property
    def slots_base(self) -> int:
        return self.sent_before + self.ranks

    @property
    def refused(self) -> int:
        return self.slots_base + self.ranks

    @property
    def words(self) -> int:
        return self.refused + 1


def most_sent(ranks: int, max_tokens: int, top_k: int) -> int:
    """Rows that a rank sends at most in a dispatch, and gets back in a combine; sends go to a rank once per token."""
    return max_tokens * min(top_k, ranks)


def output_tag(offset: int) -> int:
    """What stands for the output at a heap offset in the tag of a call; no fault. Outputs differ at all but one in
    half a million pairs of offsets."""
    mixed = (offset // 16 + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    return mixed >> 64 - (TAG_BITS - CODE_BITS) << CODE_BITS


def record_words(top_k: int) -> int:
    """Words of the record that goes with a row: for each choice its expert-major row at the target (or -1), then for
    each choice its weight (float32 bits), then the row's token."""
    return align4(2 * top_k + 1)


@dataclass(frozen=True)
class Message:
    """Places in a row as latency mode sends it, in 4-byte words: payload, scales, then per choice its expert (-1: none),
    its place among this rank's choices of that expert, and its weight (float32 bits); then the row's token. Where rows
    cross the network once per node, then per choice the row's place among this rank's messages to the expert's rank, and
    among those to its node."""

    row_words: int
    scale_words: int
    top_k: int
    over_nodes: bool = False

    @property
    def experts(self) -> int:
        return self.row_words + self.scale_words

    @property
    def indices(self) -> int:
        return self.experts + self.top_k

    @property
    def weights(self) -> int:
        return self.experts + 2 * self.top_k

    @property
    def token(self) -> int:
        return self.experts + 3 * self.top_k

    @property
    def at_rank(self) -> int:
        return self.token + 1

    @property
    def at_node(self) -> int:
        return self.at_rank + self.top_k

    @property
    def words(self) -> int:
        return align4(self.at_node + self.top_k if self.over_nodes else self.token + 1)


@dataclass(frozen=True)
class Header:
    """What a rank sends a peer in latency mode beside the rows: choices per expert of the peer, then a fault. Where rows
    cross the network once per node, then how many go to the peer's node."""

    local_experts: int
    over_nodes: bool = False

    @property
    def code(self) -> int:
        return self.local_experts

    @property
    def value(self) -> int:
        return self.local_experts + 1

    @property
    def to_node(self) -> int:
        return self.local_experts + 2

    @property
    def words(self) -> int:
        return align4(self.local_experts + (3 if self.over_nodes else 2))
