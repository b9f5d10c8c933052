"""Kernels of the language over the proxy: lanes of a warp that push together, several queues and threads, chaos."""

import os

import torch

import tilescale_net as tsn
from tests import ranks
from tests.proxy import lanes
from tests.variants import variants
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.runtime import fabric

CASES = {
    "one_queue": {},
    "two_queues_two_threads": {"TSN_PROXY_QUEUES": "2", "TSN_PROXY_THREADS": "2"},
    "two_threads_a_peer": {"TSN_PROXY_THREADS": "2", "TSN_PROXY_PEER_THREADS": "2"},
    "full_ring": {"TSN_PROXY_CAPACITY": "4"},
    "staging": {"TSN_PROXY_STAGING": "1", "TSN_PROXY_CHUNK": "4K"},
    "chaos": {"TSN_CHAOS": "seed=5,reorder=0.3,split=0.2,eagain=0.1", "TSN_PROXY_QUEUES": "2"},
}


@variants(2, "case", CASES)
def test_lanes(case):
    for stats in ranks.run(4, lanes.run_scatter, 7, env={"VIRTUAL_NODES": "2", **CASES[case]}):
        assert stats["puts"] == lanes.THREADS * lanes.ROUNDS and stats["put_values"] == stats["puts"]
        assert stats["queue_depth_max"] > 1


def chaos(seed: int) -> dict[str, str]:
    faults = f"seed={seed},reorder=0.5,split=0.2,eagain=0.1,delay_us=3000"
    return {"VIRTUAL_NODES": "2", "TSN_PROXY_CHUNK": "4K", "TSN_CHAOS": faults}


def test_signal_after_its_data():
    """put_signal in six chunks, read the moment its signal is there."""
    assert ranks.run(2, lanes.run_relay, env=chaos(3)) == [0, 0]


def test_signal_after_its_last_piece_only():
    """The mutation that counting exists for: without counting, a kernel reads data that are not there yet."""
    broken = {"TSN_TEST_ORDERING": "last_chunk"}
    # Where processors are crowded a kernel may happen to look late, on one network or another.
    assert any(sum(ranks.run(2, lanes.run_relay, env=chaos(seed) | broken)) for seed in range(3, 11))


def test_threads_of_software():
    """Several only where the host copies what GPUs send, and has processors to spare."""
    found = [fabric.threads_of_software("tcp;ofi_rxm", "cuda", processors, 4) for processors in (2, 24, 36, 64, 128)]
    assert found == [1, 2, 3, 4, 4]
    assert fabric.threads_of_software("efa", "cuda", 128, 1) == fabric.threads_of_software("tcp", "host", 128, 1) == 1


@ranks.on(VIRTUAL_NODES="2", TSN_DEVICE="simulator", init=False)
def test_default_number_of_threads():
    """The least number that any rank has processors for; ranks share the larger counts."""
    rank = int(os.environ["RANK"])
    fabric.threads_of_software = lambda *_: (3, 2)[rank]
    tsn.init()
    proxy = tsn.world().proxy
    out = tsn.zeros((2, 1 << 19), dtype=torch.uint8)
    out[rank] = rank + 1
    tsn.barrier()
    gather = AllGather(threads=64, blocks=1)
    gather(out, out[rank])
    assert (out[0] == 1).all() and (out[1] == 2).all()
    gather.free()
    assert (proxy.threads, proxy.peer_threads) == (2, 2) and proxy.stats()["delegated"] > 0
    tsn.finalize()
