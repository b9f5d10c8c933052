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
