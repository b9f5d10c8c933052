"""Layouts of messages between ranks, and of plans shared by kernels and the host: sizes and offsets in words.

Where nodes have several ranks, a row crosses the network once for each node that needs it: to the source's forwarder
there, a rank that forwards it. Sums return the same way. A forwarder has a slot for every source that it serves. If
nodes have the same size and all ranks take part, a source's forwarder is the rank with its index in the node; else the
node's ranks serve the sources in turn.

A rank sums over its origins in the order of ranks: the ranks of its node, and every other node as a whole. A plan's
dispatch and combine share this order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from tilescale_net.kernels.collective import TAG_BITS, Nodes

# The number of nodes of one size, or the ranks of each node if sizes differ.
NodeSizes = int | tuple[int, ...]

NO_RANK = -1
# Faults that a rank may find in a call; every rank gets the code, the value and the rank. The host of that rank found
# codes from HOST_FAULT on before it launched anything.
NO_FAULT, BAD_EXPERT, NO_ROOM, CROWDED, OTHER_OUTPUT, HOST_FAULT = range(6)
# A call begins with a word from every rank to every rank: the call number, then a tag of TAG_BITS, whose lowest
# CODE_BITS hold that rank's fault and whose others identify its output.
CODE_BITS = 5
# In a dispatch of latency mode the number of messages to expect, in COUNT_BITS, follows the number of the call.
COUNT_BITS = 32


def align4(n: int) -> int:
    """The next multiple of four words, so that every row of words is a multiple of 16 bytes."""
    return -(-n // 4) * 4


def offsets_of(*lengths: int) -> tuple[int, ...]:
    """Offsets of consecutive fields of these lengths, and the length of all."""
    return (0, *accumulate(lengths))


def most_sent(ranks: int, max_tokens: int, top_k: int) -> int:
    """Rows that a rank sends at most in a dispatch, and gets back in a combine; one send per token and rank."""
    return max_tokens * min(top_k, ranks)


def output_tag(offset: int) -> int:
    """Identifies the output at a heap offset in the tag of a call without a fault. All but one in half a million pairs
    of offsets differ in it."""
    mixed = (offset // 16 + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    return mixed >> 64 - (TAG_BITS - CODE_BITS) << CODE_BITS


def record_words(top_k: int) -> int:
    """Words of the record that goes with a row: for each choice its expert-major row at the target (or -1), then for
    each choice its weight (float32 bits), then the row's token."""
    return align4(2 * top_k + 1)


class CountsLayout:
    """One rank's row of counts: choices per expert, rows per rank, then its fault. `bins`: experts + ranks. `code`,
    `value`: offsets of the fault. `words`: length of the row."""

    def __init__(self, experts: int, ranks: int):
        _, self.code, self.value, end = offsets_of(experts + ranks, 1, 1)
        self.bins, self.words = experts + ranks, align4(end)


class PlanOffsets:
    """Offsets in a routing plan's vector of totals (int32).

    Attributes:
        sent: [ranks] rows that this rank sends to each rank.
        sent_base: [ranks] index of the first of them among that rank's rows.
        received: [ranks] rows that each rank sends to this rank.
        received_base: [ranks + 1] index of the first of them, and the sum.
        counts: [local experts] rows of each local expert.
        offsets: [local experts + 1] first row of each local expert, aligned, and the end.
        by_source: [local experts, ranks] rows of each local expert from each rank.
        sent_before: [ranks] rows that this rank sends to the ranks before each; of the same node, where rows cross the
            network once per node.
        slots_base: [ranks] rows that each rank sends to the ranks before this one, of its node as above.
        rejected: not 0 if the dispatch was rejected.
    """

    def __init__(self, ranks: int, local_experts: int):
        R, E = ranks, local_experts
        self.ranks, self.local_experts = R, E
        (
            self.sent, self.sent_base, self.received, self.received_base, self.counts, self.offsets, self.by_source,
            self.sent_before, self.slots_base, self.rejected, self.words,
        ) = offsets_of(R, R, R, R + 1, E, E + 1, E * R, R, R, 1)  # fmt: skip


class MessageLayout:
    """Offsets in a row as latency mode sends it: payload, scales, then per choice its expert (-1: none), its index among
    this rank's choices of that expert, and its weight (float32 bits); then the row's token. Where rows cross the network
    once per node, then per choice the row's index among this rank's messages to the expert's rank, and among those to its
    node."""

    def __init__(self, row_words: int, scale_words: int, top_k: int, over_nodes: bool = False):
        K = top_k
        _, self.experts, self.indices, self.weights, self.token, self.at_rank, self.at_node, end = offsets_of(
            row_words + scale_words, K, K, K, 1, K, K
        )
        self.words = align4(end if over_nodes else self.at_rank)


class HeaderLayout:
    """Offsets in a header of latency mode, from a rank to a peer: choices per expert of the peer, then a fault.
    Where rows cross the network once per node, then the number of messages to the peer's node."""

    def __init__(self, local_experts: int, over_nodes: bool = False):
        _, self.code, self.value, self.to_node, end = offsets_of(local_experts, 1, 1, 1)
        self.words = align4(end if over_nodes else self.to_node)


def nodes_of(ranks: int, nodes: NodeSizes) -> Nodes:
    """The ranks of each node, from a number of equal nodes or a list of sizes."""
    return Nodes(nodes if isinstance(nodes, tuple) else (ranks // nodes,) * nodes)


def as_argument(sizes: tuple[int, ...]) -> NodeSizes:
    """Nodes of these sizes as a kernel's argument: their number if sizes are equal."""
    return sizes if len(set(sizes)) > 1 else len(sizes)


class NodeLayout:
    """Nodes of consecutive ranks, and offsets in the map (int32) that `Forwarders.words` makes.

    Memory and numbers are as for nodes of the largest size: entries of a rank that a smaller node lacks are
    never used. Origins are numbered in this way, too.

    Attributes:
        ranks: number of ranks. node_sizes: the nodes as a kernel's argument, see `as_argument`. of: the nodes. nodes: number
            of nodes. size: ranks of the largest. origins: see above.
        slots: sources that a forwarder serves at most. lists: pairs of a slot and a rank of the forwarder's node.
        forwarder, forwarder_slot: [nodes] this rank's forwarder in each node, and this rank's slot there.
        source: [slots] the source that this rank serves as a forwarder.
        local_forwarder, local_forwarder_slot: [ranks] for each rank of another node its forwarder in this node, and its slot there.
        map_words: length of the map.
        head_words: length of a source's head. It has the number of rows to the node; for each rank of the node its number
            of rows, and the index of the first among that rank's rows; at `slots_begin` the source's first slot for rows
            that return from the node.
    """

    def __init__(self, ranks: int, nodes: NodeSizes, slots: int):
        self.ranks, self.node_sizes, self.slots, self.of = ranks, nodes, slots, nodes_of(ranks, nodes)
        self.nodes, self.size = len(self.of.sizes), self.of.largest
        self.origins, self.lists = self.nodes - 1 + self.size, slots * self.size
        (
            self.forwarder, self.forwarder_slot, self.source, self.local_forwarder, self.local_forwarder_slot, self.map_words,
        ) = offsets_of(self.nodes, self.nodes, slots, ranks, ranks)  # fmt: skip
        self.slots_begin, self.head_words = 1 + 2 * self.size, align4(2 + 2 * self.size)


class NodePlanOffsets:
    """Offsets in the node part of a routing plan, one vector of int32.

    Methods return the offset of a number, from Python integers or kernel expressions:
        token, rows: the token of a row to a node, and the number of rows to it.
        origin_index: a token's index among the rows of an origin, or -1.
        head: a word of a source's head, see `NodeLayout.head_words`.
        forward: at a forwarder, of a row to a rank of its node: the source's row (word 0), its first expert-major row (1).
        gather: at a forwarder, of a source's row: the index of a rank's sum for it among that rank's rows, or -1.
        base: the first slot of this rank for an origin's rows; ranks of this node come first.
    """

    def __init__(self, at: NodeLayout, max_tokens: int):
        self.at, self.max_tokens = at, max_tokens
        _, self._rows, self._places, self._heads, self._forwards, self._gathers, self._bases, self.words = offsets_of(
            at.nodes * max_tokens, at.nodes, max_tokens * at.origins, at.slots * at.head_words,
            at.lists * max_tokens * 2, at.lists * max_tokens, at.origins,
        )  # fmt: skip

    def token(self, node: Any, row: Any) -> Any:
        return node * self.max_tokens + row

    def rows(self, node: Any) -> Any:
        return self._rows + node

    def origin_index(self, token: Any, origin: Any) -> Any:
        return self._places + token * self.at.origins + origin

    def head(self, slot: Any, word: Any) -> Any:
        return self._heads + slot * self.at.head_words + word

    def forward(self, slot: Any, rank: Any, row: Any, word: Any) -> Any:
        return self._forwards + ((slot * self.at.size + rank) * self.max_tokens + row) * 2 + word

    def gather(self, slot: Any, row: Any, rank: Any) -> Any:
        return self._gathers + (slot * self.max_tokens + row) * self.at.size + rank

    def base(self, origin: Any) -> Any:
        return self._bases + origin


class LatencyNodePlanOffsets:
    """The same for a plan of latency mode: the index of a received row among its source's messages to this node; at a
    forwarder, the number of forwarded messages of a slot's source, and the receivers of each in its node: [top_k] indices
    in order, then -1."""

    def __init__(self, at: NodeLayout, max_tokens: int, top_k: int):
        self.at, self.max_tokens, self.top_k = at, max_tokens, top_k
        _, self._forwarded, self._receivers, self.words = offsets_of(
            at.ranks * max_tokens, at.slots, at.slots * max_tokens * top_k
        )

    def message_index(self, source: Any, slot: Any) -> Any:
        return source * self.max_tokens + slot

    def forwarded(self, slot: Any) -> Any:
        return self._forwarded + slot

    def receiver(self, slot: Any, row: Any, number: Any) -> Any:
        return self._receivers + (slot * self.max_tokens + row) * self.top_k + number


class Route(NamedTuple):
    """Routes of a kernel whose rows cross the network once per node. `at`: NodeLayout, offsets in `map`. plan:
    NodePlanOffsets or LatencyNodePlanOffsets, offsets in `words`. `map`: int32 [at.map_words], `node_map`, from the
    host. `words`: int32 [plan.words], `node_plan`, from the call that routes."""

    at: NodeLayout
    plan: Any
    map: Any
    words: Any

    def forwarder(self, node: Any) -> Any:
        """This rank's forwarder in a node."""
        return self.map[self.at.forwarder + node]

    def forwarder_slot(self, node: Any) -> Any:
        """This rank's slot there."""
        return self.map[self.at.forwarder_slot + node]

    def source(self, slot: Any) -> Any:
        """The rank that this forwarder serves in a slot, or -1."""
        return self.map[self.at.source + slot]

    def local_forwarder(self, rank: Any) -> Any:
        """The forwarder, in this node, of a rank of another node."""
        return self.map[self.at.local_forwarder + rank]

    def local_forwarder_slot(self, rank: Any) -> Any:
        """The slot of a rank of another node at its forwarder in this node."""
        return self.map[self.at.local_forwarder_slot + rank]


@dataclass(frozen=True)
class Forwarders:
    """Which rank forwards for which sources, from the ranks that take part; equal on all ranks. `mask`: for each rank
    whether it takes part. nodes: see `nodes_of`."""

    mask: tuple[bool, ...]
    nodes: NodeSizes

    @property
    def _of(self) -> Nodes:
        return nodes_of(len(self.mask), self.nodes)

    def served(self, node: int) -> dict[int, list[int]]:
        """The sources of each forwarder in a node, in the order of their slots."""
        of = self._of
        first, size = of.first(node), of.size(node)
        members = [r for r in range(first, first + size) if self.mask[r]]
        others = [r for r, takes_part in enumerate(self.mask) if takes_part and not first <= r < first + size]
        served: dict[int, list[int]] = {member: [] for member in members}
        for number, source in enumerate(others):
            if of.is_even and len(members) == size:
                served[first + source % size].append(source)
            elif members:
                served[members[number % len(members)]].append(source)
        return served

    @property
    def slots(self) -> int:
        """Sources that any forwarder serves at most, 1 or more."""
        every = [len(sources) for node in range(len(self._of.sizes)) for sources in self.served(node).values()]
        return max([1, *every])

    def words(self, rank: int, slots: int) -> list[int]:
        """The map of a rank, offsets as in `NodeLayout`; -1 if there is no rank."""
        at = NodeLayout(len(self.mask), self.nodes, slots)
        words = [NO_RANK] * at.map_words
        for node in range(at.nodes):
            for forwarder, sources in self.served(node).items():
                for slot, source in enumerate(sources):
                    if source == rank:
                        words[at.forwarder + node], words[at.forwarder_slot + node] = forwarder, slot
                    if forwarder == rank:
                        words[at.source + slot] = source
                    if node == at.of.node_of(rank):
                        words[at.local_forwarder + source], words[at.local_forwarder_slot + source] = forwarder, slot
        return words


def with_room(ranks: int, nodes: NodeSizes, masks: Sequence[tuple[bool, ...]]) -> NodeLayout:
    """With slots for the most sources that a forwarder serves, among all ranks and for each mask."""
    return NodeLayout(ranks, nodes, max(Forwarders(mask, nodes).slots for mask in ((True,) * ranks, *masks)))
