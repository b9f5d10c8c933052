"""Places in a routing plan's totals: how many rows go to and come from each rank, and how many each expert has."""

from dataclasses import dataclass


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
