"""Limits of the simulated machine: accesses outside of live allocations of the heap, more blocks than fit."""

import pytest
import torch

from tests import ranks
from tests.simulator import litmus

N = 256


def _touch(operation, place, count, visibility):
    import tilescale_net as tsn
    from tilescale_net.runtime import simulator

    a, b, sig = tsn.zeros(N), tsn.zeros(N), tsn.zeros((1,), torch.uint64)
    kernel = litmus.transfer_range(operation, N)
    with simulator.schedule(3, visibility):
        if tsn.rank() == 1:
            kernel(a, b, sig, place, count, 0)
    tsn.barrier()


@pytest.mark.parametrize(
    "operation,name,place,count,size",
    [
        ("put to", "put", N - 10, 20, 80),
        ("put to", "put", N, 4, 16),
        ("put from", "put", N - 10, 20, 80),
        ("put_signal", "put_signal", N - 1, 2, 8),
        ("get from", "get", N - 10, 20, 80),
        ("get to", "get", N - 10, 20, 80),
        ("view", "there", N, 1, 4),
    ],
)
@pytest.mark.sample(4)
def test_outside_of_a_tensor(operation, name, place, count, size):
    visibility = "eager" if place % 2 else "late"
    outcomes = ranks.launch(2, _touch, operation, place, count, visibility)
    kind, text, _ = outcomes[1].error
    assert kind == "OutOfBounds", (kind, text)
    assert "rank 1" in text and "seed 3" in text and "block (0, 0, 0) thread" in text, text
    assert f"{name} " in text or f"{name}:" in text, text
    assert f"{size} bytes" in text, text
    # The other rank waits in a barrier and learns which rank failed, and why.
    kind, text, _ = outcomes[0].error
    assert kind == "PeerLost" and "rank 1 failed" in text and f"{size} bytes" in text, (kind, text)


def _inside():
    import tilescale_net as tsn
    from tilescale_net.runtime import simulator

    a, b, sig = tsn.zeros(N), tsn.zeros(N), tsn.zeros((1,), torch.uint64)
    for operation in ("put to", "put from", "get from", "get to", "put_signal"):
        for visibility in ("eager", "late"):
            with simulator.schedule(3, visibility):
                litmus.transfer_range(operation, N)(a, b, sig, N - 4, 4, 1 - tsn.rank())
                litmus.transfer_range(operation, N)(a, b, sig, N, 0, 1 - tsn.rank())
    tsn.barrier()


def test_the_last_element_and_nothing():
    ranks.run(2, _inside)


def _freed(operation):
    import tilescale_net as tsn

    a, b, sig = tsn.zeros(N), tsn.zeros(N), tsn.zeros((1,), torch.uint64)
    kernel = litmus.transfer_range(operation, N)
    kernel(a, b, sig, 0, N, 1 - tsn.rank())
    # The tensors themselves are refused; views of the heap that were kept are not recognised.
    heap = tsn.world().heap.as_bytes()
    places = [t.data_ptr() - heap.data_ptr() for t in (b, sig)]
    tsn.free(b)
    tsn.free(sig)
    b, sig = (heap[p : p + t.nbytes].view(t.dtype) for p, t in zip(places, (b, sig)))
    if tsn.rank() == 1:
        kernel(a, b, sig, 0, N, 0)
    tsn.barrier()


@pytest.mark.parametrize("operation", ["put to", "put_value", "atomic", "signal", "wait"])
def test_freed_tensor(operation):
    kind, text, _ = ranks.launch(2, _freed, operation)[1].error
    assert kind == "OutOfBounds" and "no live allocation" in text, text
    named = {"put to": "put", "wait": "load"}.get(operation, operation)
    assert f"{named} to PE" in text or f"{named}: " in text, text


def _too_many_blocks():
    import tilescale_net as tsn

    litmus.wait_for_the_last_block(40)(tsn.zeros((1,), torch.uint64), tsn.rank())


def test_wait_for_a_block_that_has_no_place():
    kind, text, _ = ranks.launch(1, _too_many_blocks, env={"TSN_SIM_SMS": "1", "TSN_TIMEOUT": "1"})[0].error
    assert kind == "WaitTimeout" and "8 of 40 blocks never started, because only 32 are resident" in text, (kind, text)
    ranks.run(1, _too_many_blocks, env={"TSN_TIMEOUT": "10"})
