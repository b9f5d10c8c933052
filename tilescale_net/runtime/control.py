"""The control plane: torch.distributed with gloo. Collective calls that agree, or say who disagrees or is missing.

Every collective host call of the package goes through `Control.agree`: ranks exchange what they were asked to do
before anything is done, so that a difference becomes an error on every rank instead of a hang or a corrupted heap.
"""

from __future__ import annotations

import json
import pickle
import time

import torch
import torch.distributed as dist

from tilescale_net.errors import PeerLost, RankMismatch
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
        self._calls = 0
        self.reason_of = None  # set by the watchdog: () -> str | None, why peers are known to be lost

    # -- collective calls -------------------------------------------------------------------------------------------

    def agree(self, call: str, arguments: str = "") -> None:
        """Wait until every rank makes this same call with the same arguments; also a barrier.

        Raises:
            RankMismatch: another rank made a different call; the message holds both.
            PeerLost: a rank did not arrive within the timeout, or died.
        """
        self._calls += 1
        text = f"{call}({arguments})".encode()
        if len(text) > _RECORD - 8:
            text = text[: _RECORD - 8]
        mine = torch.zeros(_RECORD, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._publish(call)
        self._collective(call, lambda: dist.all_gather(everyone, mine, group=self._group))
        for other, record in enumerate(everyone):
            if not torch.equal(record, mine):
                said = bytes(record.tolist()).rstrip(b"\0").decode(errors="replace")
                raise RankMismatch(
                    f"rank {self.rank} called {text.decode(errors='replace')} while rank {other} called {said}; "
                    "every rank must make the same calls with the same arguments, in the same order"
                )

    def gather(self, what: str, value: object) -> list:
        """Every rank's `value` (picklable), in rank order. Raises PeerLost as `agree` does."""
        payload = pickle.dumps(value)
        size = torch.tensor([len(payload)], dtype=torch.int64)
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        self._publish(what)
        self._collective(what, lambda: dist.all_gather(sizes, size, group=self._group))
        longest = max(int(s) for s in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._collective(what, lambda: dist.all_gather(everyone, mine, group=self._group))
        return [pickle.loads(t[: int(n)].numpy().tobytes()) for t, n in zip(everyone, sizes)]

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
        try:
            dist.destroy_process_group(self._group)
        except (RuntimeError, ValueError, AssertionError):
            pass
