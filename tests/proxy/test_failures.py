"""Failures end in a named error on every PE, within the deadline."""

import os
from types import SimpleNamespace

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.fabric.programs import fake_cuda
from tests.native.builder import run
from tests.proxy import programs
from tests.variants import nightly, variants
from tilescale_net.errors import WaitTimeout
from tilescale_net.kernels import proxy_write
from tilescale_net.runtime.fabric import RunningProxy

SHARED = ["threads=2", "peer_threads=2", "shared=512", "chunk=1024"]


@pytest.mark.parametrize(
    "shape", [[], ["queues=3", "threads=2"], ["staging=1"], SHARED], ids=["plain", "threads", "staging", "shared"]
)
def test_bad_descriptors_are_refused(shape):
    """Outside the heap, misaligned, unknown PE or kind: named, never sent, and the peer learns why."""
    run(programs.proxy_test(), "refusals", *shape)


@variants(1, "sanitizer", ["thread", "address"])
def test_bad_descriptors_under_sanitizers(sanitizer):
    run(programs.proxy_test(sanitizer), "refusals", "queues=2", "threads=2")


@variants(1, "staging", ["staging=0", "staging=1"])
def test_nonsense_from_a_peer(staging):
    """Random messages and immediates end in an error, under AddressSanitizer."""
    run(programs.proxy_test("address"), "garbage", "seeds=80", staging, "queues=1")


@pytest.mark.parametrize("staging", ["staging=0", "staging=1"])
def test_lies_of_a_peer(staging):
    """Messages, acknowledgements and staging slots with one field that lies: refused before it is used."""
    run(programs.proxy_test("address"), "lies", staging)


def test_a_peer_that_does_not_poll():
    """It is sent no more immediates than its completion queue holds."""
    run(programs.proxy_test(), "credit")
    run(programs.proxy_test(), "credit", "pes=3", "queues=2", "threads=2")


@pytest.mark.parametrize(
    "shape",
    [["cuda=1"], ["cuda=1", "device_memory=1"], ["cuda=1", "queues=2", "threads=2"], ["defers_adds=1", "pes=3"]],
    ids=["staged", "rdma", "threads", "simulator"],
)
def test_adds_do_not_outlive_their_word(shape):
    """Adds that no wait consumed are applied before the word's memory is allocated again."""
    run(programs.proxy_test(), "adds", *shape, env={"TSN_LIBCUDA": str(fake_cuda())})


@pytest.mark.parametrize("staging", ["staging=0", "staging=1"])
@pytest.mark.parametrize(
    "chaos, kind, words",
    [
        ("stall_after=200", "PeerLost", "no sign of life"),
        ("eagain=1", "FabricError", "try again"),
        ("error_after=100", "FabricError", "fails on purpose"),
        ("error=0.02", "FabricError", "fails on purpose"),
        # Codes of a process that is gone: ECANCELED of tcp;ofi_rxm, ECONNRESET of tcp.
        ("error_after=100,error_code=125", "PeerLost", "process seems to be gone"),
        ("error_after=100,error_code=104", "PeerLost", "process seems to be gone"),
    ],
)
def test_failing_network(chaos, kind, words, staging):
    out = run(programs.proxy_test(), "failure", "chaos=" + chaos, "timeout_ms=500", "pes=3", staging)
    errors = [line for line in out.splitlines() if ": rank " in line]
    assert len(errors) == 3, out
    assert any(line.startswith(kind) and words in line for line in errors), out
    for line in errors:
        assert "PE " in line and line.split(":")[0] in ("PeerLost", "FabricError"), line


def _signals_to_all():
    if os.environ["RANK"] == "2":
        os.environ["TSN_CHAOS"] = "stall_after=1"  # its network goes silent with the first answer
    tsn.init("4M")
    dst, src, counter = tsn.zeros((64,), torch.uint8), tsn.zeros((64,), torch.uint8), tsn.zeros((1,), torch.uint64)
    tsn.barrier()
    if tsn.rank() == 0:
        proxy_write.signals(64)(dst, src, counter, 64, 1, 2, 1, 1)
    tsn.barrier()


def test_a_quiet_that_times_out_names_the_silent_pe():
    env = {"TSN_DEVICE": "simulator", "TSN_TIMEOUT": "3", "VIRTUAL_NODES": "3"}
    error = ranks.launch(3, _signals_to_all, env=env, init=False, timeout=90)[0].error
    assert error is not None and error[0] in ("WaitTimeout", "PeerLost"), error
    assert "all PEs, of which PE 2 did not answer" in error[1] or "PE 2 has shown no sign of life" in error[1], error


def test_the_reason_of_a_failed_pe_reaches_its_peers():
    """Also when the host gives it only after it has set the abort word; without one none is made up."""
    run(programs.proxy_test(), "reasons")


@pytest.mark.parametrize("call", ["drain", "settle"])
def test_unfinished_work_of_a_proxy_is_an_error(call):
    """Both went on when their time was over, as if all had arrived."""
    proxy = object.__new__(RunningProxy)
    proxy.context_flags = 1 << 8  # adds are deferred
    proxy._proxy = SimpleNamespace(drain=lambda seconds: False, apply_adds=lambda seconds: False, error=lambda: None)
    proxy._world = SimpleNamespace(rank=3, timeout=0.5, page=SimpleNamespace(aborted=False))
    with pytest.raises(WaitTimeout, match=r"rank 3: .* within 0.5 s; .*TSN_TIMEOUT"):
        getattr(proxy, call)()
    proxy._world.page.aborted = True  # what comes next reports the reason
    getattr(proxy, call)()


def test_failing_network_under_thread_sanitizer():
    run(programs.proxy_test("thread"), "failure", "chaos=stall_after=200", "timeout_ms=500", "queues=2", "threads=2")


@pytest.mark.parametrize("staging", ["staging=0", "staging=1"])
def test_failing_network_where_threads_share_peers(staging):
    """Whichever thread meets it, all end."""
    program = programs.proxy_test()
    for chaos in ("error_after=100", "stall_after=300"):
        run(program, "failure", f"chaos={chaos}", "timeout_ms=500", "pes=3", staging, *SHARED)


@pytest.mark.parametrize("scale", ["2", nightly("10")])
def test_memory_does_not_grow(scale):
    """Millions of operations of all kinds through small windows."""
    assert "ok" in run(programs.null_test(), scale, timeout=280)
