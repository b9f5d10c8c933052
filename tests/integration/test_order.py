"""The memory model end to end: with the right primitive nothing is ever missing; without it the simulator shows it."""

import os
import time

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
import tilescale_net.runtime.settings as settings
from tests.integration.pool import pool_fixture
from tests.kernels.support import schedule
from tests.shorthand import f32, i32, jitted, u64
from tests.variants import nightly, variants

COUNT = 700  # elements of a message: several pieces
THREADS = 64


@tsn.jit
def message(order="fence", wait=True):
    """Kernel `(dst, src, seen, flag, turn, to)`: a message to PE `to`, and a look at the one that came.

    Args:
        order: what orders the data before the signal: "fence", "fence one" (of that PE), "quiet", "put_signal", "nothing",
            or a primitive of the whole block: "signal_block", "signal_warp" (of warp 1), "fence_block", "quiet_block".
        wait: wait for the signal before looking.
    """

    @T.prim_func
    def main(
        ctx: N.Context(), dst: f32(COUNT), src: f32(COUNT), seen: f32(COUNT), flag: u64(1), turn: T.int64, to: T.int32
    ):
        with T.Kernel(1, threads=THREADS):
            thread = T.get_thread_binding()
            if order == "put_signal":
                N.put_signal_block(dst, src, to, flag, turn)
            elif order == "signal_warp":
                if thread // 32 == 1:
                    N.put_warp(dst, src, to)
                    N.signal_warp(flag, turn, to)
            elif order.endswith("block"):
                N.put_block(dst, src, to)
                if order == "signal_block":
                    N.signal_block(flag, turn, to)
                else:
                    if order == "fence_block":
                        N.fence_block(to)
                    if order == "quiet_block":
                        N.quiet_block(to)
                    if thread == THREADS - 1:
                        N.signal(flag, turn, to)
            elif order == "signal":
                N.put_block(dst, src, to)
                T.sync_threads()
                if thread == 0:
                    N.signal(flag, turn, to, fence=True)
            else:
                N.put_block(dst, src, to)
                T.sync_threads()
                if thread == 0:
                    if order == "fence":
                        N.fence()
                    if order == "fence one":
                        N.fence(to)
                    if order == "quiet":
                        N.quiet(to)
                    N.signal(flag, turn, to)
            if wait:
                N.wait_block(flag, "ge", turn)
            for i in T.serial(T.ceildiv(COUNT, THREADS)):
                if i * THREADS + thread < COUNT:
                    seen[i * THREADS + thread] = dst[i * THREADS + thread]

    return main


FRESH = 16384  # elements: 64 KiB, which every engine takes
CROWD = 4096  # elements that a block of the crowd puts at a time


@tsn.jit
def fresh_source(engine="bulk", threads=128, order="put_signal", crowd=0):
    """Kernel `(dst, src, flags, wrong, noise, stop, turns, to)`: each turn writes a new source, sends it at once, and
    compares what came.

    `flags[0]` signals that the data of a turn has come, `flags[1]` that the peer has compared its own. `wrong` counts,
    by thread, the elements that differ from the peer's data of that turn.

    Args:
        order: "put_signal", or "other warp": a put, and a fence and a signal by a thread of the last warp.
        crowd: blocks that put `noise` to the peer all the while, so that data and signals meet others on the way. Where
            they do, H200s show data after their signal in every turn if a signal is sent without a release.
    """

    @T.prim_func
    def main(
        ctx: N.Context(), dst: i32(FRESH), src: i32(FRESH), flags: u64(2), wrong: i32(threads),
        noise: i32(max(crowd, 1), CROWD), stop: i32(1), turns: T.int32, to: T.int32,
    ):  # fmt: skip
        with T.Kernel(1 + crowd, threads=threads) as block:
            stopped = T.alloc_shared((1,), "int32")
            thread = T.get_thread_binding()
            if block == 0:
                for turn in T.serial(turns):
                    # The last elements come last, right before the copy.
                    for i in T.serial(FRESH // threads):
                        src[i * threads + thread] = turn * 100003 + i * threads + thread
                    if order == "put_signal":
                        N.put_signal_block(dst, src, to, flags[0], turn + 1, engine=engine)
                    else:
                        N.put_block(dst, src, to, engine=engine)
                        T.sync_threads()
                        if thread == threads - 1:
                            N.fence(to)
                            N.signal(flags[0], turn + 1, to)
                    N.wait_block(flags[0], "ge", turn + 1)
                    for i in T.serial(FRESH // threads):
                        if dst[i * threads + thread] != turn * 100003 + i * threads + thread:
                            wrong[thread] += 1
                    T.sync_threads()
                    if thread == 0:
                        N.quiet(to)
                        N.signal(flags[1], turn + 1, to)
                    N.wait_block(flags[1], "ge", turn + 1)
                if thread == 0:
                    N.st(stop[0], 1, scope="gpu")
            else:
                going = T.alloc_var("int32", init=1)
                while going > 0:
                    N.put_block(noise[block - 1, 0], noise[block - 1, 0], to, count=CROWD, engine="ldst")
                    T.sync_threads()
                    if thread == 0:
                        stopped[0] = N.ld(stop[0], scope="gpu")
                    T.sync_threads()
                    going = 1 - stopped[0]
                if thread == 0:
                    N.quiet(to)

    return main


@tsn.jit
def source_again(how="quiet"):
    """Kernel `(dst, src, to)`: puts `src`, then overwrites it.

    Args:
        how: what makes that right: "quiet", "quiet_block", "flush", "nothing".
    """

    @T.prim_func
    def main(ctx: N.Context(), dst: f32(COUNT), src: f32(COUNT), to: T.int32):
        with T.Kernel(1, threads=THREADS):
            thread = T.get_thread_binding()
            N.put_block(dst, src, to)
            T.sync_threads()
            if how == "quiet_block":
                N.quiet_block(to)
            if thread == 0:
                if how == "quiet":
                    N.quiet(to)
                if how == "flush":
                    ticket = N.flush_async(to)
                    N.flush_wait(ticket)
            T.sync_threads()
            for i in T.serial(T.ceildiv(COUNT, THREADS)):
                if i * THREADS + thread < COUNT:
                    src[i * THREADS + thread] = -1.0
            T.sync_threads()
            if thread == 0:
                N.quiet()

    return main


@tsn.jit
def all_to_one_barrier(kind="all", complete=True):
    """Kernel `(board, mine, seen)`: each PE puts a row on the boards of all; after a barrier every PE sees all rows.

    Args:
        kind: "all" or "node" for barrier_all or barrier_node.
        complete: quiet before the barrier.
    """
    n = T.dynamic("n")

    @T.prim_func
    def main(ctx: N.Context(), board: f32(n, COUNT), mine: f32(COUNT), seen: f32(n, COUNT)):
        with T.Kernel(1, threads=THREADS):
            thread = T.get_thread_binding()
            for pe in T.serial(N.n_pes()):
                N.put_block(board[N.my_pe(), 0], mine, pe, count=COUNT)
            T.sync_threads()
            if complete:
                if thread == 0:
                    N.quiet()
                T.sync_threads()
            if kind == "all":
                N.barrier_all()
            else:
                N.barrier_node()
            for pe in T.serial(N.n_pes()):
                for i in T.serial(T.ceildiv(COUNT, THREADS)):
                    if i * THREADS + thread < COUNT:
                        seen[pe, i * THREADS + thread] = board[pe, i * THREADS + thread]
            N.barrier_all()  # no PE puts the next row while others still look

    return main


@tsn.jit
def through_views(kind="parallel"):
    """Kernel `(x, y, flag, turn, to)`: writes y = 2 x on PE `to` through a view, then a signal, then waits for its own.

    Args:
        kind: "parallel" (T.Parallel), "copy" (T.copy by way of shared memory) or "st" (N.st by each thread).
    """

    @T.prim_func
    def main(
        ctx: N.Context(), x: f32(COUNT), y: f32(COUNT), seen: f32(COUNT), flag: u64(1), turn: T.int64, to: T.int32
    ):
        with T.Kernel(1, threads=THREADS):
            thread = T.get_thread_binding()
            view = N.remote(y, to)
            if kind == "parallel":
                for i in T.Parallel(COUNT):
                    view[i] = x[i] * 2.0
            if kind == "copy":
                tile = T.alloc_shared((COUNT,), "float32")
                T.copy(x, tile)
                for i in T.Parallel(COUNT):
                    tile[i] = tile[i] * 2.0
                T.copy(tile, view)
            if kind == "st":
                for i in T.serial(T.ceildiv(COUNT, THREADS)):
                    if i * THREADS + thread < COUNT:
                        N.st(view[i * THREADS + thread], N.ld(x[i * THREADS + thread], sem="weak") * 2.0)
            T.sync_threads()
            if thread == 0:
                N.fence(to)
                N.signal(flag, turn, to)
            N.wait_block(flag, "ge", turn)
            for i in T.serial(T.ceildiv(COUNT, THREADS)):
                if i * THREADS + thread < COUNT:
                    seen[i * THREADS + thread] = N.ld(y[i * THREADS + thread])

    return main


@jitted
def places(ctx: N.Context(), numbers: i32(4), direct: i32(8)):
    """Kernel `(numbers, direct)`: results of the topology primitives."""
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 0:
            numbers[0] = N.my_pe()
            numbers[1] = N.n_pes()
            numbers[2] = N.node_pe()
            numbers[3] = N.n_node_pes()
            for pe in T.serial(N.n_pes()):
                direct[pe] = T.if_then_else(N.is_direct(pe), 1, 0)


_state: dict = {}


def _memory(name: str, shape, dtype=torch.float32) -> torch.Tensor:
    if name not in _state:
        _state[name] = tsn.zeros(shape, dtype)
    return _state[name]


def _schedule(seed, visibility="random") -> None:
    schedule(seed)
    os.environ["TSN_SIM_VISIBILITY"] = visibility


def _pattern(seed, rank) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed * 64 + rank))


def pass_message(order: str, wait: bool, seed: int, visibility: str = "random") -> int:
    """Elements that this rank's kernel did not see as sent. Messages go round the ring of PEs."""
    rank, n = tsn.rank(), tsn.size()
    dst, src, flag = _memory("dst", COUNT), _memory("src", COUNT), _memory("flag", 1, torch.uint64)
    _state["turn"] = turn = _state.get("turn", 0) + 1
    _schedule(seed, visibility)
    dst.fill_(-5.0)
    src.copy_(_pattern(seed, rank))
    seen = torch.zeros(COUNT, device=tsn.device())
    tsn.barrier()
    message(order, wait)(dst, src, seen, flag, turn, (rank + 1) % n)
    tsn.barrier()
    expected = _pattern(seed, (rank - 1) % n)
    end = time.monotonic() + 10  # a barrier on the host only completes what was quiet before
    while not torch.equal(dst.cpu(), expected):
        assert time.monotonic() < end, "in the end the data is there, with anything left out"
    return int((seen.cpu() != expected).sum())


def write_source_again(how: str, seed: int, visibility: str = "random") -> int:
    """Elements that arrived wrong because their source was overwritten too early."""
    rank, n = tsn.rank(), tsn.size()
    dst, src = _memory("dst", COUNT), _memory("src", COUNT)
    _schedule(seed, visibility)
    dst.fill_(-5.0)
    src.copy_(_pattern(seed, rank))
    tsn.barrier()
    source_again(how)(dst, src, (rank + 1) % n)
    tsn.barrier()
    return int((dst.cpu() != _pattern(seed, (rank - 1) % n)).sum())


def meet(kind: str, complete: bool, seed: int, visibility: str = "random") -> int:
    """Elements that were not on the board after the barrier."""
    rank, n = tsn.rank(), tsn.size()
    board, mine = _memory("board", (n, COUNT)), _memory("mine", COUNT)
    _schedule(seed, visibility)
    board.fill_(-5.0)
    mine.copy_(_pattern(seed, rank))
    seen = torch.zeros((n, COUNT), device=tsn.device())
    tsn.barrier()
    all_to_one_barrier(kind, complete)(board, mine, seen)
    tsn.barrier()
    return int((seen.cpu() != torch.stack([_pattern(seed, p) for p in range(n)])).sum())


def write_through_view(kind: str, seed: int) -> None:
    rank, n = tsn.rank(), tsn.size()
    x, y, flag = _memory("x", COUNT), _memory("y", COUNT), _memory("flag", 1, torch.uint64)
    _state["turn"] = turn = _state.get("turn", 0) + 1
    _schedule(seed)
    x.copy_(_pattern(seed, rank))
    y.fill_(-5.0)
    seen = torch.zeros(COUNT, device=tsn.device())
    tsn.barrier()
    through_views(kind)(x, y, seen, flag, turn, (rank + 1) % n)
    tsn.barrier()
    expected = _pattern(seed, (rank - 1) % n) * 2.0
    assert torch.equal(seen.cpu(), expected) and torch.equal(y.cpu(), expected), (kind, seed)


def where() -> tuple[list[int], list[int]]:
    numbers = torch.zeros(4, dtype=torch.int32, device=tsn.device())
    direct = torch.full((8,), -1, dtype=torch.int32, device=tsn.device())
    places()(numbers, direct)
    return numbers.tolist(), direct.tolist()


def write_and_send(engine, threads, turns, order, crowd):
    """Wrong elements on this rank after `turns` turns of `fresh_source`."""
    dst, src, noise = (tsn.empty(shape, torch.int32) for shape in (FRESH, FRESH, (max(crowd, 1), CROWD)))
    flags = tsn.zeros((2,), torch.uint64)
    wrong = torch.zeros(threads, dtype=torch.int32, device=dst.device)
    stop = torch.zeros(1, dtype=torch.int32, device=dst.device)
    noise.fill_(0)
    tsn.barrier()
    fresh_source(engine, threads, order, crowd)(dst, src, flags, wrong, noise, stop, turns, 1 - tsn.rank())
    tsn.barrier()
    count = int(wrong.sum())
    for tensor in (dst, src, noise, flags):
        tsn.free(tensor)
    return count


# -- tests ----------------------------------------------------------------------------------------------------------

pool = pool_fixture(2)
three = pool_fixture(3)
SEEDS = range(12)
# On a GPU a race that the simulator shows at once may not show for years.
on_simulator = pytest.mark.skipif(settings.device_kind() == "cuda", reason="the simulator makes races visible")


@pytest.mark.parametrize("visibility", ["eager", "late", "random"])
@variants(6, "order", ["fence", "fence one", "quiet", "put_signal"])
def test_data_comes_before_its_signal(pool, order, visibility):
    for seed in SEEDS:
        assert pool(pass_message, order, True, seed, visibility) == [0, 0], seed


def test_data_comes_before_its_signal_in_a_ring(three):
    for seed in SEEDS:
        for order in ("fence", "put_signal"):
            assert three(pass_message, order, True, seed) == [0, 0, 0], (order, seed)


def test_primitives_of_a_whole_scope_order_its_puts(pool):
    for order in ("signal", "signal_block", "signal_warp", "fence_block", "quiet_block"):
        for seed in SEEDS:
            assert pool(pass_message, order, True, seed) == [0, 0], (order, seed)


@on_simulator
@pytest.mark.parametrize("visibility", ["late", "random"])
def test_a_missing_fence_shows(pool, visibility):
    assert any(sum(pool(pass_message, "nothing", True, seed, visibility)) for seed in SEEDS)


@on_simulator
@pytest.mark.parametrize("visibility", ["late", "random"])
@pytest.mark.parametrize("order", ["fence", "put_signal"])
def test_a_missing_wait_shows(pool, order, visibility):
    assert any(sum(pool(pass_message, order, False, seed, visibility)) for seed in SEEDS)


@pytest.mark.parametrize("how", ["quiet", "quiet_block", "flush"])
def test_source_may_be_written_after(pool, how):
    for seed in SEEDS:
        for visibility in ("eager", "late", "random"):
            assert pool(write_source_again, how, seed, visibility) == [0, 0], (seed, visibility)


@on_simulator
@pytest.mark.parametrize("visibility", ["late", "random"])
def test_source_written_too_early_shows(pool, visibility):
    assert any(sum(pool(write_source_again, "nothing", seed, visibility)) for seed in SEEDS)
    assert not any(sum(pool(write_source_again, "nothing", seed, "eager")) for seed in SEEDS[:3])


# Each is a kernel of its own: every second one in every run, each engine with each order.
@variants(
    2,
    "engine, threads, order, crowd",
    [
        nightly(*way, order, crowd, when=bool((i + k + crowd) % 2))
        for i, way in enumerate([("ldst", 128), ("bulk", 128), ("bulk", 1024)])
        for k, order in enumerate(["put_signal", "other warp"])
        for crowd in (False, True)
    ],
)
def test_a_source_just_written_is_sent(pool, engine, threads, order, crowd):
    turns, blocks = (1000, 60) if settings.device_kind() == "cuda" else (3, 1)
    assert pool(write_and_send, engine, threads, turns, order, blocks if crowd else 0) == [0, 0]


@pytest.mark.parametrize("kind", ["all", "node"])
def test_barrier_after_quiet(three, kind):
    for seed in SEEDS:
        assert three(meet, kind, True, seed) == [0, 0, 0], seed


@on_simulator
@pytest.mark.parametrize("visibility", ["late", "random"])
def test_barrier_without_quiet_shows(three, visibility):
    assert any(sum(three(meet, "all", False, seed, visibility)) for seed in SEEDS)


@pytest.mark.parametrize("kind", ["parallel", "copy", "st"])
def test_views_of_remote_memory(pool, kind):
    for seed in SEEDS:
        pool(write_through_view, kind, seed)


def test_places(three):
    for rank, (numbers, direct) in enumerate(three(where)):
        assert numbers == [rank, 3, rank, 3] and direct == [1, 1, 1, -1, -1, -1, -1, -1]
