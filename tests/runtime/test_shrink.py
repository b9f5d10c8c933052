"""Ranks that are lost, and ranks that go on: which go on, within which time, and what becomes of the others."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
from tests import ranks
from tests.variants import nightly
from tilescale_net.runtime import world

RANKS, TIMEOUT = 7, 6.0
SOON = 4.0  # seconds in which ranks go on that need not wait for others, on a busy machine; with proxies twice as many


def _ended(pid: int) -> bool:
    """Whether a process has ended; its parent may not have asked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _soon() -> float:
    return SOON if tsn.world().proxy is None else 2 * SOON


def _go_on(left: list[int], step: int = 0) -> None:
    with pytest.raises((tsn.PeerLost, tsn.WaitTimeout)):
        while True:
            tsn.barrier()
    begin = time.monotonic()
    done = tsn.shrink(step + tsn.rank())
    spent = time.monotonic() - begin
    assert spent < _soon(), (left, spent)
    assert (done.ranks, done.steps) == (left, [step + r for r in left])
    tsn.check()


def _memory(kept: torch.Tensor, left: list[int]) -> None:
    """The remaining ranks make collective host calls; their memory is unchanged."""
    assert torch.equal(kept.cpu(), torch.full((5,), float(tsn.rank())))
    tensors = [tsn.zeros((n,)) for n in (3, 700)]
    offsets = tsn.world().control.gather("offsets", [tsn.world().heap.offset_of(t) for t in (kept, *tensors)])
    assert len(offsets) == len(left) and all(o == offsets[0] for o in offsets)
    for tensor in tensors:
        tsn.free(tensor)
    tsn.barrier()


def _losses() -> None:
    rank, kept = tsn.rank(), tsn.zeros((5,)).fill_(tsn.rank())
    pids = tsn.world().control.gather("pids", os.getpid())
    # Rank 0 dies, which would keep the store if no launcher did, and rank 1 is stopped: it is ended.
    if rank < 2:
        os.kill(os.getpid(), (signal.SIGKILL, signal.SIGSTOP)[rank])
    _go_on([2, 3, 4, 5, 6], 10)
    assert _ended(pids[0]) and _ended(pids[1])
    _memory(kept, [2, 3, 4, 5, 6])
    # Rank 2 fails, and rank 3 dies when all have agreed on which ranks go on.
    if rank == 3:
        world.live_everywhere = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        own = tsn.InvalidDescriptor("rank 2: a wrong call")
        for call in (lambda: tsn.world().fail(own), tsn.shrink, tsn.barrier):
            with pytest.raises(tsn.InvalidDescriptor, match="a wrong call"):
                call()
        end = time.monotonic() + 60
        while not _ended(pids[6]) and time.monotonic() < end:  # no rank waits for this one, and it lives on
            time.sleep(0.1)
        return
    with pytest.raises(tsn.PeerLost, match="rank 2 failed: rank 2: a wrong call"):
        while True:
            tsn.barrier()
    with pytest.raises(tsn.PeerLost, match="rank 3"):
        tsn.shrink()
    with pytest.raises(tsn.PeerLost, match="rank 3"):
        tsn.barrier()
    _go_on([4, 5, 6], 20)
    _memory(kept, [4, 5, 6])
    assert not _ended(pids[2]) and _ended(pids[3])
    # All are well, and one comes too late: it is ended, because it might go on to write.
    if rank == 6:
        time.sleep(60)
    begin = time.monotonic()
    assert tsn.shrink(timeout=1.5).ranks == [4, 5] and time.monotonic() - begin < 1.5 + _soon() and _ended(pids[6])
    _memory(kept, [4, 5])
    tsn.free(kept)


@pytest.mark.parametrize("nodes", [1, nightly(RANKS)])
def test_ranks_are_lost_one_after_the_other(nodes):
    """With a store that a launcher keeps."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port), "TSN_TIMEOUT": str(TIMEOUT)}
    env["VIRTUAL_NODES"] = str(nodes)
    left_behind = set(os.listdir("/dev/shm"))
    outcomes = ranks.launch(RANKS, _losses, env=env)
    killed = [r for r, outcome in enumerate(outcomes) if outcome.exitcode == -signal.SIGKILL]
    assert killed == [0, 1, 3, 6], [o.error for o in outcomes]
    assert outcomes[4].ok and outcomes[5].ok, (outcomes[4].error, outcomes[5].error)
    assert outcomes[2].error is not None and outcomes[2].error[0] == "InvalidDescriptor", outcomes[2]  # of finalize
    assert set(os.listdir("/dev/shm")) <= left_behind


def _store_is_lost(dies: bool) -> None:
    if tsn.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL) if dies else time.sleep(5)
    elif dies:
        with pytest.raises(tsn.PeerLost):
            tsn.barrier()
        with pytest.raises(tsn.PeerLost, match="rank 0, which keeps the store of the job,"):
            tsn.shrink()
    else:
        with pytest.raises(tsn.PeerLost, match="rank 0, which keeps the store of the job, did not arrive"):
            tsn.shrink(timeout=0.3)
    os._exit(7)


@pytest.mark.parametrize("dies", [True, False])
def test_nobody_goes_on_without_the_store(dies):
    outcomes = ranks.launch(3, _store_is_lost, dies, env={"TSN_TIMEOUT": str(TIMEOUT)})
    assert [o.exitcode for o in outcomes] == [-signal.SIGKILL if dies else 7, 7, 7], outcomes
