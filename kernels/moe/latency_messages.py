"""Places in what ranks send one another in latency mode, on which the kernels and the host agree."""

from dataclasses import dataclass

from tilescale_net.kernels.moe.wire_layout import align4


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
