"""Limits of the simulated machine: accesses outside of live allocations of the heap, more blocks than fit."""

import re

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.simulator import extents, failing, litmus
from tests.variants import variants
from tilescale_net.runtime import simulator

N = 256


def _touch(operation, place, count, visibility):
    a, b, sig = tsn.zeros(N), tsn.zeros(N), tsn.zeros((1,), torch.uint64)
    kernel = litmus.transfer_range(operation, N)
    with simulator.schedule(3, visibility):
        if tsn.rank() == 1:
            kernel(a, b, sig, place, count, 0)
    tsn.barrier()


@variants(
    4,
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


@ranks.on()
def test_the_last_element_and_nothing():
    a, b, sig = tsn.zeros(N), tsn.zeros(N), tsn.zeros((1,), torch.uint64)
    for operation in ("put to", "put from", "get from", "get to", "put_signal"):
        for visibility in ("eager", "late"):
            with simulator.schedule(3, visibility):
                litmus.transfer_range(operation, N)(a, b, sig, N - 4, 4, 1 - tsn.rank())
                litmus.transfer_range(operation, N)(a, b, sig, N, 0, 1 - tsn.rank())
    tsn.barrier()


def _unequal(way, k, m, clamped=False):
    """Elements written by a copy to `k` from `m` elements or rows of ones, and its signal."""
    if way == "dynamic":
        k = 20
    x, y, box, other = tsn.zeros(64), tsn.zeros(64), tsn.zeros((8, 8)), tsn.zeros((8, 8))
    cube, whole, flag = tsn.zeros((4, 4, 4)), tsn.zeros(m), tsn.zeros((1,), torch.uint64)
    part = tsn.zeros(64)
    for source in (x, other, whole):
        source.fill_(1)
    extents.copy(clamped)(x, y, box, other, cube, part[:20], whole, flag, list(extents.WAYS).index(way), k, m)
    return int(y.sum() + box.sum() + cube.sum() + part.sum()), int(y[:k].sum() + part[:k].sum()), int(flag[0])


@variants(4, "way", extents.WAYS)
def test_extents_that_differ_at_run_time(way):
    """Copies went by the extent of the source, beyond the region that dst named."""
    text, to, source = extents.WAYS[way]
    k, m = (3, 2) if way == "count of src" else (2, 3) if way in ("rows", "columns", "count") else (3, 30)
    extents_ = ((20 if way == "dynamic" else k) * to, m * source) if "rows" not in text else (k, m)
    kind, told, _ = ranks.launch(1, _unequal, way, k, m)[0].error
    assert kind == "KernelError" and text.format(*extents_) in told, (kind, told)
    assert re.search(r" \[extents\.py:\d+, kernel _kernel \(simulated, seed 0, visibility random\)\]$", told), told


@variants(5, "statement", failing.WAYS)
def test_errors_name_the_line_and_the_kernel(statement):
    error, text = failing.WAYS[statement]
    kind, told, _ = ranks.launch(1, failing.fail, statement, env={"TSN_TIMEOUT": "2"})[0].error
    assert kind == error and told.startswith("rank 0: ") and text in told, (kind, told)
    line = failing.line_of(statement)
    place = "" if "device_assert" in statement else f"{line}, "  # tilelang's own text has the line
    assert line in told and f" [{place}kernel failing (simulated, seed 0, visibility random)" in told, told


@ranks.on(1)
def test_on_gpus_no_copy_leaves_a_region():
    """The code that GPUs run moves what leaves neither region, and its signal comes."""
    for way, (_, to, source) in extents.WAYS.items():
        for k, m in ((1, 30), (4, 8), (4, 2), (2, 0)):
            if max(k * to, m * source) > 64 or (way in ("rows", "columns") and m > 8):
                continue
            wanted = min((20 if way == "dynamic" else k) * to, m * source)
            if way in ("unpack", "pack"):
                wanted = wanted // 4 * 4  # whole rows
            moved, inside, signal = _unequal(way, k, m, clamped=True)
            assert moved == wanted and inside in (0, wanted), (way, k, m, moved, inside, wanted)
            assert signal == (way in ("put_signal", "rows")), (way, k, m)


def _freed(operation):
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
    litmus.wait_for_the_last_block(40)(tsn.zeros((1,), torch.uint64), tsn.rank())


def test_wait_for_a_block_that_has_no_place():
    kind, text, _ = ranks.launch(1, _too_many_blocks, env={"TSN_SIM_SMS": "1", "TSN_TIMEOUT": "1"})[0].error
    assert kind == "WaitTimeout" and "8 of 40 blocks never started, because only 32 are resident" in text, (kind, text)
    ranks.run(1, _too_many_blocks, env={"TSN_TIMEOUT": "10"})
