"""Notices that a rank failed or vanished, and ends this rank's waits.

A thread per rank. Peers on this host are watched through their process descriptors, which tell of an exit at once;
peers on other hosts by heartbeats in the store. A rank that fails says why in the store, so that the others can name
the reason and not only the silence. On a loss the abort word is set: kernels return from their waits, and the next call
of the package raises PeerLost.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable

_INTERVAL = 0.25  # seconds between looks; a heartbeat is sent every fourth


class Watchdog:
    """Watches the other ranks of a job.

    Args:
        control: the control plane (rank, size, store).
        pids: process id of every rank on this host, None for ranks of other hosts.
        heartbeat_timeout: seconds of silence after which a rank of another host is lost.
        poll_local: looks for an error of this rank's kernels or proxy; returns its text or None.
        on_loss: called once with the reason when a peer or this rank fails.
    """

    def __init__(
        self,
        control,
        pids: list[int | None],
        heartbeat_timeout: float,
        poll_local: Callable[[], str | None],
        on_loss: Callable[[str], None],
    ):
        self._control = control
        self._timeout = heartbeat_timeout
        self._poll_local = poll_local
        self._on_loss = on_loss
        self._reason: str | None = None
        self._fds: dict[int, int] = {}
        self._remote: list[int] = []
        self._last_beat: dict[int, tuple[str | None, float]] = {}
        for rank, pid in enumerate(pids):
            if rank == control.rank:
                continue
            if pid is None:
                self._remote.append(rank)
                continue
            try:
                self._fds[rank] = os.pidfd_open(pid)
            except OSError:
                self._remote.append(rank)  # gone already, or another pid namespace: heartbeats will tell
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tilescale_net-watchdog", daemon=True)
        self._thread.start()

    def reason(self) -> str | None:
        """Why the job is lost, or None."""
        return self._reason

    def announce_failure(self, text: str) -> None:
        """Tell the other ranks that this one fails, and why."""
        self._control._set(f"failed/{self._control.rank}", text[:2000])

    def announce_end(self) -> None:
        """Tell the other ranks that this one leaves in good order."""
        self._control._set(f"ended/{self._control.rank}", "1")

    def wait_for_others(self, seconds: float = 2.0) -> None:
        """After a failure: let the other ranks learn what it was. Only rank 0, with whom the store ends, has to wait."""
        if self._control.rank != 0:
            return
        end = time.monotonic() + seconds
        others = [*self._fds, *self._remote]
        while others and time.monotonic() < end:
            dead = self._dead()
            others = [
                r
                for r in others
                if r not in dead and not any(self._control._get(f"{key}/{r}") for key in ("noticed", "failed", "ended"))
            ]
            time.sleep(0.02)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def _run(self) -> None:
        ticks = 0
        while not self._stop.wait(_INTERVAL):
            if self._reason is None:
                reason = self._look(beat=ticks % 4 == 0)
                if reason and not self._stop.is_set():
                    self._reason = reason
                    self._control._set(f"noticed/{self._control.rank}", "1")
                    self._on_loss(reason)
            ticks += 1

    def _look(self, beat: bool) -> str | None:
        own = self._poll_local()
        if own:
            self.announce_failure(own)
            return own
        for rank in self._dead():
            if self._control._get(f"ended/{rank}"):
                os.close(self._fds.pop(rank))
                continue
            said = self._control._get(f"failed/{rank}")
            return f"rank {rank} failed: {said}" if said else f"rank {rank} (process ended without a word) is gone"
        for rank in list(self._fds) + self._remote:
            if beat or rank in self._remote:
                said = self._control._get(f"failed/{rank}")
                if said:
                    return f"rank {rank} failed: {said}"
        if beat and self._remote:
            return self._heartbeats()
        return None

    def _dead(self) -> list[int]:
        by_fd = {fd: rank for rank, fd in list(self._fds.items())}  # the watching thread may drop one meanwhile
        if not by_fd:
            return []
        poll = select.poll()
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        return [by_fd[fd] for fd, _ in poll.poll(0)]

    def _heartbeats(self) -> str | None:
        now = time.monotonic()
        self._control._set(f"beat/{self._control.rank}", json.dumps(now))
        for rank in self._remote:
            beat = self._control._get(f"beat/{rank}")
            last, since = self._last_beat.get(rank, (None, now))
            if beat != last:
                self._last_beat[rank] = (beat, now)
            else:
                self._last_beat[rank] = (last, since)
                if now - since > self._timeout and not self._control._get(f"ended/{rank}"):
                    return f"rank {rank} sent no heartbeat for {now - since:.0f} s"
        return None
