"""The collective calls of ranks that run in one process, one behind the other."""

from __future__ import annotations

from tilescale_net.errors import ConfigurationError


class SameCalls:
    """The collective calls of ranks that run one behind the other: each must make the same as the first one.

    No rank learns anything from another: a call that gathers values gives a rank its own one for all.
    """

    def __init__(self, rank: int, size: int, made: list[tuple[str, object]]):
        self.rank, self.size, self.job_ranks = rank, size, list(range(size))
        self.members, self.excluded, self.generation, self.lost = list(range(size)), False, 0, set[int]()
        self.on_collective_begin, self.on_collective_done = (lambda: None), (lambda: None)
        self._made, self._at = made, 0

    def agree(self, call: str, arguments: str = "", described_as: str | None = None) -> None:
        self._compare(call, arguments)

    def gather(self, what: str, value: object) -> list:
        self._compare(what, value)
        return [value] * self.size

    def broadcast(self, what: str, value: str) -> str:
        self._compare(
            what, value if self.rank == 0 else self._made[self._at][1] if self._at < len(self._made) else value
        )
        return str(self._made[self._at - 1][1])

    def keep(self, members: list[int], call: str) -> None:
        self._compare(call, members)

    def _compare(self, call: str, value: object) -> None:
        if self.rank == 0:
            self._made.append((call, value))
        elif self._at >= len(self._made) or self._made[self._at] != (call, value):
            other = self._made[self._at] if self._at < len(self._made) else "nothing more"
            raise ConfigurationError(
                f"rank {self.rank} calls {call} with {value!r}, where rank 0 called {other}: in a check ranks are set up one "
                "after the other, so they must make equal calls, and cannot learn anything from each other before the kernels run"
            )
        self._at += 1
