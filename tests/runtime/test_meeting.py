"""Ranks that meet, as the keys in their store tell it: here threads, one of which is slow."""

import threading
import time

import pytest
import torch.distributed as dist

from tilescale_net.errors import PeerLost
from tilescale_net.runtime.rendezvous import _Attendance
from tilescale_net.runtime.signed_store import SignedStore


class Store:
    """What a JobStore does, until the rank that keeps it ends."""

    kept_by = 0

    def __init__(self):
        self.keys, self.ended = SignedStore(dist.HashStore()), threading.Event()

    def ask(self, question):
        if self.ended.is_set():
            raise PeerLost("rank 0, which keeps the store of the job, is gone")
        return question(self.keys)


def _cannot_connect(seconds):
    time.sleep(seconds)
    raise RuntimeError("Connection closed by peer")


def test_rank_0_stays_until_a_slow_rank_knows_who_is_lost():
    store = Store()

    def rank_0():
        with pytest.raises(PeerLost, match="Missing: rank 1"):
            _Attendance(store, 0, 3, 5.0).run_together(lambda: _cannot_connect(0))
        store.ended.set()

    first = threading.Thread(target=rank_0)
    first.start()
    try:
        with pytest.raises(PeerLost, match="Missing: rank 1 "):
            _Attendance(store, 2, 3, 5.0).run_together(lambda: _cannot_connect(2.5))
    finally:
        first.join()
