"""Ranks that meet, as the keys in their store tell it: here threads, one of which is slow."""

import threading
import time

import pytest
import torch.distributed as dist

from tilescale_net.errors import PeerLost
from tilescale_net.runtime.bootstrap import ArrivalTracker, ConnectTracker
from tilescale_net.runtime.job_store import SignedStore


class Store:
    """What a JobStore does, until the rank that keeps it ends."""

    kept_by = 0

    def __init__(self):
        self.keys, self.ended, self.name = SignedStore(dist.HashStore()), threading.Event(), ""

    def within(self, name):
        self.name = name
        return self

    def close(self):
        pass

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
            ConnectTracker(store, 0, 3, 5.0).run_collectively(lambda: _cannot_connect(0))
        store.ended.set()

    first = threading.Thread(target=rank_0)
    first.start()
    try:
        with pytest.raises(PeerLost, match="Missing: rank 1 "):
            ConnectTracker(store, 2, 3, 5.0).run_collectively(lambda: _cannot_connect(2.5))
    finally:
        first.join()


def _come(keys, size, ranks, timeout=20.0):
    """What the ranks that come say of their meeting: its name and the words of all, or the error."""
    said = {}

    def come(rank):
        store = Store()
        store.keys = keys
        try:
            found, words = ArrivalTracker(store, rank, size, timeout).meet(f"rank {rank} of {size}", "did not come")
            said[rank] = found.name, words
        except PeerLost as err:
            said[rank] = str(err)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    return said


def test_a_store_that_outlives_attempts():
    """As that of torchrun's agent: other processes with the same ranks have met there, or have waited in vain."""
    keys, names = SignedStore(dist.HashStore(), "job", b"secret"), set()
    for size in (3, 3, 2, 4, 3):
        said = _come(keys, size, reversed(range(size)))
        assert len({name for name, _ in said.values()}) == 1
        assert all(words == [f"rank {rank} of {size}" for rank in range(size)] for _, words in said.values())
        names.add(said[0][0])
        if size == 2:
            said = _come(keys, 3, (0, 1), timeout=0.3)  # rank 2 is one of an earlier attempt
            assert all("Missing: rank 2 (did not come)" in error for error in said.values()), said
            said = _come(keys, 3, (2, 1), timeout=0.3)
            assert all("Missing: rank 0 (did not come)" in error for error in said.values()), said
    assert len(names) == 5
