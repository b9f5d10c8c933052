"""push, pull and ping_pong: every size, alignment and way of copying delivers exactly the bytes asked for."""

import random

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.kernels.support import Guarded, assert_same, random_bytes, unsettle
from tests.variants import nightly, variants
from tilescale_net.kernels import p2p, proxy_write

CAPACITY = 70_000
COUNTS = [0, 1, 15, 16, 17, 127, 128, 2048, 4095, 33_333, 65_536, CAPACITY]
WAYS = [
    dict(),
    dict(threads=32, unroll=1, engine="ldst"),
    dict(threads=96, blocks=3),
    dict(threads=64, blocks=4, partition="interleaved", chunk=1024),
    dict(engine="bulk", ring=(2, 1024)),
    dict(engine="bulk", ring=(4, 512), blocks=3, partition="interleaved", chunk=4096),
    dict(engine="auto", ring=(4, 2048)),
    dict(threads=64, blocks=4, partition="dynamic", chunk=4096),
]


def _copies(seed, direction, way, cases):
    rank, pace = tsn.rank(), random.Random(f"{seed} {tsn.rank()}")
    peer = (rank + 1) % tsn.size()
    source = {"push": (rank - 1) % tsn.size(), "pull": peer}[direction]
    kernel = getattr(p2p, direction)(CAPACITY, **way)
    dynamic = way.get("partition") == "dynamic"
    work = [torch.zeros(2, dtype=torch.int32, device=tsn.device())] if dynamic else []
    for number, (count, loops, dst_offset, src_offset) in enumerate(cases):
        dst, src = (Guarded((CAPACITY,), torch.uint8, offset) for offset in (dst_offset, src_offset))
        src.tensor.copy_(random_bytes(CAPACITY, seed, number, rank))
        dst.tensor.copy_(random_bytes(CAPACITY, seed, number, "before"))
        tsn.barrier()
        unsettle(pace)
        kernel(dst.tensor, src.tensor, *work, count, peer, loops)
        if direction == "push":
            src.tensor.fill_(7)  # the kernel is done with it
        tsn.barrier()
        expected = random_bytes(CAPACITY, seed, number, "before")
        expected[:count] = random_bytes(CAPACITY, seed, number, source)[:count]
        label = f"seed {seed}, {direction} {way}, count {count}, loops {loops}, offsets {dst_offset} and {src_offset}"
        assert_same(dst.tensor, expected.to(dst.tensor.device), label)
        assert not dynamic or work[0].tolist() == [0, 0], "the next launch needs fresh counters"
        for place in (dst, src):
            place.check(label)
            place.free()


def _name(way) -> str:
    return ",".join(f"{k}={v}" for k, v in way.items()) or "default"


@variants(
    2,
    "direction, way",
    # Pulling shares its copying code with pushing: the ways that differ most suffice.
    [pytest.param("push", way, id="push-" + _name(way)) for way in WAYS]
    + [pytest.param("pull", way, id="pull-" + _name(way)) for way in (WAYS[0], WAYS[5])]
    + [nightly("pull", way, id="pull-" + _name(way)) for way in (WAYS[2], WAYS[7])],
)
@ranks.on()
def test_delivers_exactly_the_requested_elements(direction, way, seed):
    pace = random.Random(seed)
    cases = [(count, 1 + number % 2, 0, 0) for number, count in enumerate(COUNTS)]
    cases += [(pace.choice(COUNTS), 1, pace.randrange(16), pace.randrange(16)) for _ in range(4)]
    _copies(seed, direction, way, cases)


@pytest.mark.parametrize("visibility", ["eager", "late", "random"])
@ranks.on(3)
def test_any_schedule(visibility, seed):
    _copies(seed, "push", dict(threads=64, blocks=2), [(33_333, 2, 0, 0), (CAPACITY, 1, 4, 4)])


def _ping_pong(seed, threads):
    rank, pace = tsn.rank(), random.Random(f"{seed} {tsn.rank()}")
    kernel = p2p.ping_pong(4096, threads)
    flag = tsn.zeros((1,), torch.uint64)
    base = 0
    for count in (8, 0, 13, 4096):
        dst, src = (Guarded((4096,), torch.uint8) for _ in range(2))
        src.tensor.copy_(random_bytes(4096, seed, count, rank))
        dst.tensor.fill_(7)
        tsn.barrier()
        for trips in (1, 3):
            unsettle(pace)
            kernel(dst.tensor, src.tensor, flag, count, 1 - rank, base, int(rank == 0), trips)
            base += trips
            # After the last signal seen its data are here, without any barrier.
            tsn.synchronize()
            expected = torch.full((4096,), 7, dtype=torch.uint8)
            expected[:count] = random_bytes(4096, seed, count, 1 - rank)[:count]
            assert_same(dst.tensor.cpu(), expected, f"seed {seed}, count {count}, trips {trips}")
            assert int(flag.view(torch.int64)[0]) >= base
            tsn.barrier()  # before the other puts there again
        tsn.barrier()
        for place in (dst, src):
            place.check()
            place.free()


def _meetings(seed):
    """Data pushed before two PEs met on the device have arrived, without a barrier of the host."""
    rank, pace = tsn.rank(), random.Random(f"{seed} {tsn.rank()}")
    push, meet = p2p.push(CAPACITY, threads=96, blocks=3), p2p.meet()
    dst, src = (tsn.empty((CAPACITY,), torch.uint8) for _ in range(2))
    for number in range(3):
        src.copy_(random_bytes(CAPACITY, seed, number, rank))
        unsettle(pace)
        push(dst, src, 20_000, 1 - rank, 1)
        unsettle(pace)
        meet()
        tsn.synchronize()
        assert_same(dst[:20_000].cpu(), random_bytes(CAPACITY, seed, number, 1 - rank)[:20_000], f"seed {seed}")
        meet()  # before the other pushes there again
    for tensor in (dst, src):
        tsn.free(tensor)


@ranks.on()
def test_meetings(seed):
    _meetings(seed)


@tsn.jit
def read_behind(count):
    """Kernel `(out, dst, counter, signals)`: `out` = `dst`, which puts of the other PE have reached when it has sent so many
    signals."""

    @T.prim_func
    def main(
        ctx: N.Context(), out: T.Tensor((count,), "uint8"), dst: T.Tensor((count,), "uint8"),
        counter: T.Tensor((1,), "uint64"), signals: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            N.wait_block(counter[0], "ge", signals)
            for i in T.Parallel(count):
                out[i] = dst[i]

    return main


def _writes(seed):
    """The kernel of benchmark/proxy_write.py is done with its source, and after a barrier the data are there; those behind
    which it signals are there when the signal is."""
    rank, kernel = tsn.rank(), proxy_write.write(4096)
    dst, src = (tsn.empty((4096,), torch.uint8) for _ in range(2))
    for number, blocking in enumerate((1, 0)):
        src.copy_(random_bytes(4096, seed, number, rank))
        dst.fill_(7)
        tsn.barrier()
        kernel(dst, src, 3000, 1024, 1 - rank, 2, blocking)
        src.fill_(7)
        tsn.barrier()
        assert_same(dst[:3000].cpu(), random_bytes(4096, seed, number, 1 - rank)[:3000], f"seed {seed}")
        tsn.barrier()
    ordered, counter = proxy_write.signals(4096), tsn.zeros((1,), torch.uint64)
    for ordering in (0, 1, 2):
        src.copy_(random_bytes(4096, seed, ordering, rank))
        tsn.barrier()
        ordered(dst, src, counter, 2048, 1 - rank, 1, 3, ordering)
        src.fill_(7)
        out = torch.zeros(2048, dtype=torch.uint8, device=tsn.device())
        read_behind(2048)(out, dst[:2048], counter, 3 * (ordering + 1))
        tsn.synchronize()
        assert_same(out.cpu(), random_bytes(4096, seed, ordering, 1 - rank)[:2048], f"seed {seed}, ordering {ordering}")
        tsn.barrier()
    for tensor in (dst, src, counter):
        tsn.free(tensor)


@pytest.mark.parametrize("visibility", ["eager", "late", "random"])
@ranks.on()
def test_ping_pong(visibility, seed):
    _ping_pong(seed, 64)


@ranks.fails("WaitTimeout", rank=0, TSN_TIMEOUT="2")
def test_ping_pong_of_a_rank_alone_ends():
    """The partner never comes: the wait passes its deadline and reports it."""
    p2p.ping_pong(64)  # compiled before the clock runs
    tsn.barrier()
    flag = tsn.zeros((1,), torch.uint64)
    dst, src = tsn.empty(64, torch.uint8), tsn.empty(64, torch.uint8)
    if tsn.rank() == 0:
        p2p.ping_pong(64)(dst, src, flag, 8, 1, 0, 1, 1)
    tsn.barrier()


def test_bad_choices():
    with pytest.raises(ValueError, match="partition 'random'"):
        p2p.push.trace(1024, partition="random")
    for chunk in (0, 100, -128):
        with pytest.raises(ValueError, match=f"chunk is {chunk}"):
            p2p.pull.trace(1024, blocks=2, partition="interleaved", chunk=chunk)
