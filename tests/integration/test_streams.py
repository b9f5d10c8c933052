"""Streams with credits and puts from shared memory, on one node and on two that only talk through the fabric."""

import random

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.integration.pool import pool_fixture
from tests.kernels.support import schedule
from tests.shorthand import f32, i32, jitted, u64

WIDTH, THREADS = 96, 64


@tsn.jit
def streams(scope, slots):
    """Kernel `(source, ring, arrived, credit, wrong, first, n, to, from_pe)`: n messages to PE `to`, n from `from_pe`.

    Block 0 sends and block 1 receives; at scope "warp" each warp has a stream of its own. `first` counts the messages of
    earlier launches. `wrong` counts, by thread, what was not as sent.
    """
    sharers = 1 if scope == "block" else THREADS // 32
    lanes = THREADS // sharers
    take, wait, back, put, quiet = (
        getattr(N, f"{name}_{scope}") for name in ("take_slot", "wait_slot", "return_credit", "put_signal", "quiet")
    )

    @T.prim_func
    def main(
        ctx: N.Context(), source: i32(sharers, slots, WIDTH), ring: i32(sharers, slots, WIDTH), arrived: u64(sharers),
        credit: u64(sharers), wrong: i32(THREADS), first: T.int32, n: T.int32, to: T.int32, from_pe: T.int32,
    ):  # fmt: skip
        with T.Kernel(2, threads=THREADS) as side:
            thread = T.get_thread_binding()
            s = thread // lanes
            lane = thread % lanes
            for k in T.serial(n):
                i = first + k
                if side == 0:
                    slot = take(credit[s], i, slots)
                    for j in T.serial(T.ceildiv(WIDTH, lanes)):
                        if j * lanes + lane < WIDTH:
                            source[s, slot, j * lanes + lane] = i * 1000 + s * 500 + j * lanes + lane
                    put(ring[s, slot, 0:WIDTH], source[s, slot, 0:WIDTH], to, arrived[s], i + 1)
                else:
                    here = wait(arrived[s], i, slots)
                    for j in T.serial(T.ceildiv(WIDTH, lanes)):
                        if j * lanes + lane < WIDTH:
                            if ring[s, here, j * lanes + lane] != i * 1000 + s * 500 + j * lanes + lane:
                                wrong[thread] += 1
                    back(credit[s], i, from_pe)
            quiet(to)

    return main


def stream(scope: str, slots: int, launches: int, n: int, seed: int) -> int:
    """Wrong elements after `launches` launches that go on with the same streams."""
    sharers = 1 if scope == "block" else THREADS // 32
    memory = [tsn.zeros((sharers, slots, WIDTH), torch.int32) for _ in range(2)]
    words = [tsn.zeros(sharers, torch.uint64) for _ in range(2)]
    wrong = torch.zeros(THREADS, dtype=torch.int32, device=tsn.device())
    right, left = (tsn.rank() + 1) % tsn.size(), (tsn.rank() - 1) % tsn.size()
    for launch in range(launches):
        schedule(seed, launch)
        streams(scope, slots)(*memory, *words, wrong, launch * n, n, right, left)
    tsn.barrier()
    count = int(wrong.sum())
    for tensor in (*memory, *words):
        tsn.free(tensor)
    return count


TILE = 200


@tsn.jit
def from_tiles(dtype):
    """Kernel `(dst, flag, out, first, count, turn, to)`: two tiles from one piece of shared memory, one after the other.

    The first goes by put_block and signal_block to dst[0], the second by put_signal of a warp to dst[1]; both from element
    `first` on. `out` is what came.
    """

    @T.prim_func
    def main(
        ctx: N.Context(), dst: T.Tensor((2, TILE), dtype), flag: u64(2), out: T.Tensor((2, TILE), dtype),
        first: T.int32, count: T.int32, turn: T.int32, to: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=THREADS):
            thread = T.get_thread_binding()
            tile = T.alloc_shared((TILE,), dtype)
            for i in T.Parallel(TILE):
                # Not %: of what may be negative, tilelang 0.1.12 makes a choice between vectors that no compiler takes.
                tile[i] = T.cast(T.truncmod(i * 7 + turn, 100), dtype)
            N.put_block(dst[0, first], tile[first], to, count=count)
            N.signal_block(flag[0], turn, to)
            for i in T.Parallel(TILE):
                tile[i] = T.cast(T.truncmod(i * 3 + turn, 90), dtype)
            T.sync_threads()
            if thread // 32 == 1:
                N.put_signal_warp(dst[1, first], tile[first], to, flag[1], turn, count=count)
            N.wait_block(flag[0], "ge", turn)
            N.wait_block(flag[1], "ge", turn)
            for part in T.serial(2):
                for j in T.serial(T.ceildiv(TILE, THREADS)):
                    if j * THREADS + thread < TILE:
                        out[part, j * THREADS + thread] = dst[part, j * THREADS + thread]

    return main


def put_tiles(dtype: str, seed: int, turns: int) -> None:
    """Checks all of both tiles, with other places and sizes in every turn."""
    kind = getattr(torch, dtype)
    dst, flag = tsn.zeros((2, TILE), kind), tsn.zeros(2, torch.uint64)
    out = torch.zeros((2, TILE), dtype=kind, device=tsn.device())
    pace = random.Random(seed)
    i = torch.arange(TILE)
    for turn in range(1, turns + 1):
        schedule(seed, turn)
        first, count = pace.choice([(0, TILE), (pace.randrange(20), pace.randrange(150)), (16, 128), (3, 0)])
        dst.zero_()
        tsn.barrier()
        from_tiles(dtype)(dst, flag, out, first, count, turn, (tsn.rank() + 1) % tsn.size())
        tsn.barrier()
        wanted = torch.stack([(i * 7 + turn) % 100, (i * 3 + turn) % 90]).to(kind)
        wanted[:, :first] = 0
        wanted[:, first + count :] = 0
        assert torch.equal(out.cpu(), wanted), (dtype, seed, turn, first, count)
    for tensor in (dst, flag):
        tsn.free(tensor)


@jitted
def one_tile(ctx: N.Context(), dst: f32(TILE), at: T.int32):
    """Kernel `(dst, at)`: puts a tile to this PE's own `dst`, from element `at` on."""
    with T.Kernel(1, threads=THREADS):
        tile = T.alloc_shared((TILE,), "float32")
        T.clear(tile)
        N.put_block(dst[at], tile, N.my_pe())


@ranks.fails("OutOfBounds", "put: dst", size=1, TSN_DEVICE="simulator")
def test_a_tile_past_the_end():
    one_tile()(tsn.zeros(TILE), 1)


# -- tests ----------------------------------------------------------------------------------------------------------

near = pool_fixture(2)
far = pool_fixture(2, env={"VIRTUAL_NODES": "2", "TSN_CHAOS": "on"})


@pytest.mark.parametrize("scope, slots", [("block", 1), ("block", 3), ("warp", 2)])
def test_streams(near, scope, slots):
    for seed in range(3):
        assert near(stream, scope, slots, 2, 7, seed) == [0, 0], seed


def test_streams_between_nodes(far):
    assert far(stream, "block", 3, 2, 9, 1) == [0, 0]
    assert far(stream, "warp", 2, 2, 9, 2) == [0, 0]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_tiles(near, dtype):
    near(put_tiles, dtype, 5, 12)


def test_tiles_do_not_travel():
    """Both ranks put; whichever is second to fail may hear of the first one before it gets that far."""
    errors = [r.error for r in ranks.launch(2, put_tiles, "float32", 5, 1, env={"VIRTUAL_NODES": "2"})]
    assert "KernelError" in [kind for kind, _, _ in errors], errors
    assert all("put in block 0 towards PE" in text and "failed: not direct" in text for _, text, _ in errors), errors
