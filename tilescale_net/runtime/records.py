"""Records of host memory that kernels reach too: many to a page, used again when they are given back."""

import ctypes

from tilescale_net.runtime.memory import Memory

BYTES = 64  # of a record: a cache line of its own
_PAGE = 4096


class Records:
    """The records of a world, which come from pages that it keeps as long as it lives.

    Args:
        memory: of the world.
    """

    def __init__(self, memory: Memory):
        self._memory = memory
        self._unused: list[int] = []

    def take(self) -> int:
        """Address of a zeroed record of BYTES bytes."""
        if not self._unused:
            page = self._memory.pinned(_PAGE)
            self._unused = [page + at for at in range(0, _PAGE, BYTES)][::-1]
        return self._unused.pop()

    def give_back(self, address: int) -> None:
        """Use a record again, which no kernel writes any more."""
        ctypes.memset(address, 0, BYTES)
        self._unused.append(address)
