"""Layouts of what ranks send one another, and of the plans that kernels and the host share: sizes and offsets in words.

Where nodes have several ranks, a row crosses the network once for each node that needs it: to a rank of that node, the
source's forwarder there, which forwards it. Sums come back the same way. A forwarder gives every source that it serves a
slot. As long as all ranks of a node take part, a source's forwarder is the one with its index in the node.

A rank sums what it gets from its origins: the ranks of its node, and every other node as a whole; in the order of
ranks. So do dispatch and combine of a plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
class CountsLayout:
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
class PlanOffsets:
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


@dataclass(frozen=True)
class MessageLayout:
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
class HeaderLayout:
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


NO_RANK = -1


@dataclass(frozen=True)
class NodeLayout:
    """Sizes: nodes of `size` consecutive ranks each.

    Attributes:
        ranks, nodes: of the job.
        slots: sources that a gateway serves at most.
    """

    ranks: int
    nodes: int
    slots: int

    @property
    def size(self) -> int:
        """Ranks of a node."""
        return self.ranks // self.nodes

    @property
    def origins(self) -> int:
        return self.nodes - 1 + self.size

    @property
    def lists(self) -> int:
        """Pairs of a slot and a rank of the gateway's node."""
        return self.slots * self.size

    # Places in the map (int32), see `Gateways.words`.
    @property
    def gateway(self) -> int:
        """[nodes] this rank's gateway in each node."""
        return 0

    @property
    def gateway_slot(self) -> int:
        """[nodes] this rank's slot there."""
        return self.nodes

    @property
    def source(self) -> int:
        """[slots] the source that this rank serves as a gateway."""
        return 2 * self.nodes

    @property
    def carrier(self) -> int:
        """[ranks] for each rank of another node its gateway in this node."""
        return 2 * self.nodes + self.slots

    @property
    def carrier_slot(self) -> int:
        """[ranks] its slot there."""
        return self.carrier + self.ranks

    @property
    def map_words(self) -> int:
        return self.carrier_slot + self.ranks

    @property
    def head_words(self) -> int:
        """What a source sends first: rows to the node, then for each rank there the rows to it and the index of the first
        of them among that rank's rows, and where what comes back of the node begins among the source's slots."""
        return align4(2 + 2 * self.size)

    @property
    def slots_begin(self) -> int:
        """The place of that last word."""
        return 1 + 2 * self.size


@dataclass(frozen=True)
class NodePlanOffsets:
    """Places in the part of a routing plan that is about nodes, one vector of int32.

    A method gives the place of a number, for whole numbers and for those of a kernel: the token of a row to a node, how
    many go there, a token's place among the rows of an origin (or -1), a word of a source's head (see
    `NodeLayout.head_words`); and at a gateway, for each row to a rank of its node the source's row (word 0) and its first
    expert-major row there (word 1), and for each row of a source the place of each rank's sum for it among that rank's rows
    (or -1). Last, where what comes from an origin begins among this rank's slots: ranks of its node first.
    """

    at: NodeLayout
    max_tokens: int

    def token(self, node, row):
        return node * self.max_tokens + row

    def rows(self, node):
        return self.at.nodes * self.max_tokens + node

    def place(self, token, origin):
        return self.rows(self.at.nodes) + token * self.at.origins + origin

    def head(self, slot, word):
        return self.place(self.max_tokens, 0) + slot * self.at.head_words + word

    def forward(self, slot, rank, row, word):
        return self.head(self.at.slots, 0) + ((slot * self.at.size + rank) * self.max_tokens + row) * 2 + word

    def gather(self, slot, row, rank):
        return self.forward(self.at.slots, 0, 0, 0) + (slot * self.max_tokens + row) * self.at.size + rank

    def base(self, origin):
        return self.gather(self.at.slots, 0, 0) + origin

    @property
    def words(self) -> int:
        return self.base(self.at.origins)


@dataclass(frozen=True)
class LatencyNodePlanOffsets:
    """The same of a plan of latency mode: the place of a row received among the messages of its source to this node; at a
    gateway, how many messages of the source of a slot it has passed on, and for each of them the ranks of its node that it
    went to, by index and in order, then -1 [top_k].
    """

    at: NodeLayout
    max_tokens: int
    top_k: int

    def carried(self, source, slot):
        return source * self.max_tokens + slot

    def passed(self, slot):
        return self.carried(self.at.ranks, 0) + slot

    def receiver(self, slot, row, number):
        return self.passed(self.at.slots) + (slot * self.max_tokens + row) * self.top_k + number

    @property
    def words(self) -> int:
        return self.receiver(self.at.slots, 0, 0)


class NodeCallState(NamedTuple):
    """The call that a kernel makes; variables of the kernel, which steps read where they stand.

    Attributes:
        me: int32, this rank. node: int32, its node.
        call: uint64, the number of the call.
        mine: int32, this rank as an origin, for the ranks of its node; in a combine.
    """

    me: Any
    node: Any
    call: Any
    mine: Any = None


class NodeTables(NamedTuple):
    """What a kernel reads of the routes between nodes, and the places in it.

    Attributes:
        at: NodeLayout, offsets in `map`. plan: NodePlanOffsets or LatencyNodePlanOffsets, offsets in `words`.
        map: int32 [at.map_words], `node_map`, from the host.
        words: int32 [plan.words], `node_plan`, from the call that routes.
    """

    at: NodeLayout
    plan: Any
    map: Any
    words: Any


@dataclass(frozen=True)
class Gateways:
    """Which rank is the gateway of which sources, by the ranks that take part; the same on all ranks.

    Attributes:
        mask: for each rank whether it takes part. nodes: how many there are.
    """

    mask: tuple[bool, ...]
    nodes: int

    @property
    def _size(self) -> int:
        return len(self.mask) // self.nodes

    def served(self, node: int) -> dict[int, list[int]]:
        """For each gateway in a node the sources it serves, in the order of their slots."""
        first, size = node * self._size, self._size
        members = [r for r in range(first, first + size) if self.mask[r]]
        others = [r for r, takes_part in enumerate(self.mask) if takes_part and not first <= r < first + size]
        served: dict[int, list[int]] = {member: [] for member in members}
        for number, source in enumerate(others):
            if len(members) == size:
                served[first + source % size].append(source)
            elif members:
                served[members[number % len(members)]].append(source)
        return served

    @property
    def slots(self) -> int:
        """Sources that any gateway serves at most, 1 or more."""
        every = [len(sources) for node in range(self.nodes) for sources in self.served(node).values()]
        return max([1, *every])

    def words(self, rank: int, slots: int) -> list[int]:
        """The map of a rank, places as in `Nodes`; -1 where there is no rank."""
        at = NodeLayout(len(self.mask), self.nodes, slots)
        words = [NO_RANK] * at.map_words
        for node in range(self.nodes):
            for gateway, sources in self.served(node).items():
                for slot, source in enumerate(sources):
                    if source == rank:
                        words[at.gateway + node], words[at.gateway_slot + node] = gateway, slot
                    if gateway == rank:
                        words[at.source + slot] = source
                    if node == rank // at.size:
                        words[at.carrier + source], words[at.carrier_slot + source] = gateway, slot
        return words


def with_room(ranks: int, nodes: int, masks: Sequence[tuple[bool, ...]]) -> NodeLayout:
    """With slots for as many sources as a gateway serves among all ranks, and among those of each mask."""
    return NodeLayout(ranks, nodes, max([nodes - 1, *(Gateways(mask, nodes).slots for mask in masks)]))
