"""The control plane: torch.distributed with gloo. Collective calls that agree, or say who disagrees or is missing.

Every collective host call of the package goes through `Control.agree`: ranks exchange what they were asked to do
before anything is done, so that a difference becomes an error on every rank instead of a hang or a corrupted heap.
"""

from __future__ import annotations

import datetime
import json
import pickle
import time

import torch
import torch.distributed as dist

from tilescale_net.errors import PeerLost, RankMismatch, TileScaleError
from tilescale_net.runtime import rendezvous

_RECORD = 512  # bytes of one rank's description of a call


class Control:
    """Rank, size, and the collective calls of the host side.

    Args:
        timeout: seconds after which a collective call gives up and names the ranks that did not arrive.

    Raises:
        ConfigurationError, PeerLost: the ranks could not meet; see rendezvous.join.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.store, self.prefix, self._group = rendezvous.join(timeout)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # Ranks that collective calls are made by; a new list whenever ranks are left out.
        self.members: list[int] = list(range(self.size))
        self._left = False
        self._outer: list = []  # groups of earlier members
        self._calls = 0
        self.reason_of = None  # set by the watchdog: () -> str | None, why peers are known to be lost

    # -- collective calls -------------------------------------------------------------------------------------------

    def agree(self, call: str, arguments: str = "") -> None:
        """Wait until every rank makes this same call with the same arguments; also a barrier.

        Raises:
            RankMismatch: another rank made a different call; the message holds both.
            PeerLost: a rank did not arrive within the timeout, or died.
        """
        if self._left:
            if call == "tilescale_net.finalize":
                return
            raise TileScaleError(f"rank {self.rank}: {call}: this rank was left out of the job; it may only finalize")
        self._calls += 1
        text = f"{call}({arguments})".encode()
        if len(text) > _RECORD - 8:
            text = text[: _RECORD - 8]
        mine = torch.zeros(_RECORD, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in self.members]
        self._publish(call)
        self._collective(call, lambda: dist.all_gather(everyone, mine, group=self._group))
        for other, record in zip(self.members, everyone):
            if not torch.equal(record, mine):
                said = bytes(record.tolist()).rstrip(b"\0").decode(errors="replace")
                raise RankMismatch(
                    f"rank {self.rank} called {text.decode(errors='replace')} while rank {other} called {said}; "
                    "every rank must make the same calls with the same arguments, in the same order"
                )

    def gather(self, what: str, value: object) -> list:
        """The `value` (picklable) of every member, in their order. Raises PeerLost as `agree` does."""
        payload = pickle.dumps(value)
        size = torch.tensor([len(payload)], dtype=torch.int64)
        sizes = [torch.zeros_like(size) for _ in self.members]
        self._publish(what)
        self._collective(what, lambda: dist.all_gather(sizes, size, group=self._group))
        longest = max(int(s) for s in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in self.members]
        self._collective(what, lambda: dist.all_gather(everyone, mine, group=self._group))
        return [pickle.loads(t[: int(n)].numpy().tobytes()) for t, n in zip(everyone, sizes)]

    # -- ranks that are left out ------------------------------------------------------------------------------------

    def keep(self, members: list[int], call: str) -> None:
        """Make collective calls with `members` only from here on. Made by each of them, with one list.

        Raises:
            RankMismatch: another member gave another list; names both.
            PeerLost: a member did not come in time.
        """
        if members != self.members:
            told = f"keep/{len(self.members)}/"
            self._set(f"{told}{self.rank}", json.dumps(members))
            end = time.monotonic() + self.timeout
            for other in members:
                said = self._get(f"{told}{other}")
                while said is None and time.monotonic() < end and not (self.reason_of and self.reason_of()):
                    time.sleep(0.005)
                    said = self._get(f"{told}{other}")
                if said is None:
                    raise PeerLost(f"rank {self.rank}: {call} did not finish: rank {other} did not call it")
                if json.loads(said) != members:
                    raise RankMismatch(f"rank {self.rank} called {call} to keep {members}, rank {other} to keep {said}")
            limit = datetime.timedelta(seconds=self.timeout)
            # The index of a member in torch's default group is its rank here: the package's group has all of its ranks.
            self._collective(call, lambda: self._meet(members, limit))
            self.members = list(members)
        self.agree(call, str(members))

    def _meet(self, members: list[int], limit) -> None:
        group = dist.new_group(members, timeout=limit, backend="gloo", use_local_synchronization=True)
        self._outer.append(self._group)
        self._group = group

    def leave(self) -> None:
        """This rank was left out: its collective calls concern nobody else from here on."""
        self.members, self._left = [self.rank], True

    def _collective(self, what: str, run) -> None:
        try:
            run()
        except RuntimeError as err:
            raise PeerLost(self._explain(what, err)) from err

    # -- who is where -----------------------------------------------------------------------------------------------

    def _publish(self, call: str) -> None:
        if self.size > 1:
            self._set(f"call/{self.rank}", json.dumps([self._calls, call]))

    def _set(self, key: str, value: str) -> None:
        try:
            self.store.set(self.prefix + key, value)
        except RuntimeError:  # the process that hosts the store is gone; the collective call itself will tell
            pass

    def _get(self, key: str) -> str | None:
        try:
            if self.store.check([self.prefix + key]):
                return self.store.get(self.prefix + key).decode()
        except RuntimeError:
            pass
        return None

    def _explain(self, what: str, err: Exception) -> str:
        # The watchdog may need a moment longer than gloo to learn why a connection closed.
        end = time.monotonic() + 2.0
        while self.reason_of and not self.reason_of() and time.monotonic() < end:
            time.sleep(0.05)
        reason = self.reason_of() if self.reason_of else None
        if reason:
            return f"rank {self.rank}: {what} could not finish: {reason}"
        behind = []
        for other in range(self.size):
            said = self._get(f"call/{other}")
            calls, call = json.loads(said) if said else (0, "nothing yet")
            if calls < self._calls:
                behind.append(f"rank {other} (last call: {call})")
        who = ", ".join(behind) if behind else "no rank is known to be missing"
        return (
            f"rank {self.rank}: {what} did not finish within {self.timeout:g} s; not arrived: {who}. Look at those "
            f"ranks' output, or raise TSN_TIMEOUT if they are only slow ({rendezvous.first_line(err)})"
        )

    def close(self) -> None:
        """Leave the package's own group. The default group stays: others may use it, and another init needs it."""
        for group in (self._group, *self._outer):
            try:
                dist.destroy_process_group(group)
            except (RuntimeError, ValueError, AssertionError):
                pass
