"""Races of puts and gets: rows that lie apart, ends outside the heap, odd sizes, and mistakes of protocols of three ranks."""

import itertools

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.shorthand import f32, jitted, u64
from tests.simulator.recorded import first_reports
from tests.variants import variants

SEEDS = range(3)
ROWS_READ_EARLY, ROWS_REUSED, ROWS_GOT_EARLY, ROWS_GOT_BY_A_WARP = range(4)
GOT_BY_A_WARP, SENT_BY_A_WARP, REUSED, REUSED_FOR_ALL, TILE_REUSED = range(4, 9)
COLUMN, VALUES, ODD, NEIGHBOURS, ONTO_ITSELF, FLUSHED = range(9, 15)


# Without this tilelang puts a barrier between any two accesses to shared memory.
@tsn.jit(pass_configs={"tl.disable_thread_storage_sync": True})
def copies(dtype="float32"):
    """Kernel `(case, right, m, y, plain, flag, out)`: one of the cases, with what orders it or without."""

    @T.prim_func
    def main(
        ctx: N.Context(), case: T.int32, right: T.int32, m: T.Tensor((16, 16), dtype), y: T.Tensor((128,), dtype),
        plain: T.Tensor((64,), dtype), flag: u64(2), out: T.Tensor((64,), dtype),
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            tx, pe = T.get_thread_binding(), 1 - N.my_pe()
            tile = T.alloc_shared((64,), dtype)
            if case == ROWS_READ_EARLY:
                N.put_signal_block(m[0:8, 0:8], m[8:16, 0:8], pe, flag[0], 1)
                if right != 0:
                    N.wait_block(flag[0], "ge", 1)
                if tx >= 8:
                    out[tx] = m[tx // 8, tx % 8]
            if case == ROWS_REUSED:
                N.put_signal_block(m[0:8, 0:8], m[8:16, 0:8], pe, flag[0], 1)
                if right != 0:
                    N.quiet_block()
                T.sync_threads()
                if tx >= 8:
                    m[8 + tx // 8, tx % 8] = T.cast(2, dtype)
            if case == ROWS_GOT_EARLY:
                if tx >= 8:
                    m[8 + tx // 8, tx % 8] = T.cast(1, dtype)
                N.signal_block(flag[0], 1, pe)
                if right != 0:
                    N.wait_block(flag[0], "ge", 1)
                N.get_block(m[0:8, 0:8], m[8:16, 0:8], pe)
            if case == ROWS_GOT_BY_A_WARP:
                if tx < 32:
                    N.get_warp(m[0:8, 0:8], m[8:16, 0:8], pe)
                if right != 0:
                    T.sync_threads()
                if tx >= 8:
                    out[tx] = m[tx // 8, tx % 8]
            if case == GOT_BY_A_WARP:
                if tx < 32:
                    N.get_warp(plain, y[0:64], pe)
                if right != 0:
                    T.sync_threads()
                out[tx] = plain[tx]
            if case == SENT_BY_A_WARP:
                plain[tx] = T.cast(1, dtype)
                if right != 0:
                    T.sync_threads()
                if tx < 32:
                    N.put_signal_warp(y[0:64], plain, pe, flag[0], 1)
            if case == REUSED or case == REUSED_FOR_ALL:
                N.put_block(y[0:64], plain, N.my_pe())
                if case == REUSED_FOR_ALL and right == 0:
                    N.quiet_block(pe)
                N.put_block(y[64:128], plain, pe)
                if right != 0:
                    N.quiet_block()
                if case == REUSED_FOR_ALL and right == 0:
                    N.quiet_block(pe)
                T.sync_threads()
                plain[tx] = T.cast(2, dtype)
            if case == TILE_REUSED:
                tile[tx] = T.cast(1, dtype)
                T.sync_threads()
                if tx < 32:
                    N.put_signal_warp(y[0:64], tile, pe, flag[0], 1)
                if right != 0:
                    T.sync_threads()
                if tx == 0 or tx == 40:
                    tile[tx] = T.cast(2, dtype)
            if case == COLUMN:
                N.put_block(m[0:16, 1], m[0:16, 15], pe)
                N.signal_block(flag[0], 1, pe, fence=False)
                if right != 0:
                    N.quiet_block()
                    N.barrier_all()
                N.wait_block(flag[0], "ge", 1)
                if tx < 16:
                    out[tx] = m[tx, 1]
            if case == VALUES:
                N.put_value(y[tx], plain[tx], pe)
                if right != 0:
                    T.sync_threads()
                    if tx == 0:
                        N.fence(pe)
                N.signal_block(flag[0], 1, pe, fence=False)
                N.wait_block(flag[0], "ge", 1)
                out[tx] = y[tx]
            if case == ODD:
                N.put_block(y[0], y[64], pe, count=61)
                N.signal_block(flag[0], 1, pe, fence=False)
                if right != 0:
                    N.quiet_block()
                    N.barrier_all()
                N.wait_block(flag[0], "ge", 1)
                if tx == 0:
                    out[0] = y[60]
            if case == NEIGHBOURS:  # touches only its own bytes, or those in odd columns
                N.put_block(m[0:16, N.my_pe()], m[0:16, 2 + N.my_pe()], pe)
                if tx < 16:
                    m[tx, 4 + tx % 2] = T.cast(1, dtype)
                    m[tx, pe if right == 0 else N.my_pe()] = T.cast(1, dtype)

            if case == FLUSHED:  # begun, and ended or not
                N.put_block(y[0:64], y[64:128], pe)
                T.sync_threads()
                if tx == 0:
                    ticket = N.flush_async(pe)
                    if right != 0:
                        N.flush_wait(ticket)
                T.sync_threads()
                y[64 + tx] = T.cast(2, dtype)
            if case == ONTO_ITSELF:
                N.put_signal_block(y[0:64], y[0:64], N.my_pe(), flag[0], 1)
                if right != 0:
                    out[tx] = y[tx]
                    N.quiet_block()
                y[tx] = T.cast(2, dtype)

    return main


def _judge(cases, launch):
    for key, reports in first_reports(itertools.product(cases, (0, 1), SEEDS), launch).items():
        _, right, _ = key
        assert bool(reports) == (not right), (key, reports)
        assert all(text.count("test_races_of_transfers.py:") >= 2 for text in reports), (key, reports)


@variants(2, "dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@ranks.on(TSN_SIM_RACES="1")
def test_every_byte_of_a_copy_is_followed(dtype):
    cases = (*range(COLUMN), FLUSHED) if dtype == torch.float32 else range(ROWS_GOT_BY_A_WARP, ONTO_ITSELF + 1)
    kernel, m, y = copies(str(dtype).split(".")[1]), tsn.zeros((16, 16), dtype), tsn.zeros((128,), dtype)
    plain, out = torch.zeros((2, 64), dtype=dtype)

    def launch(case, right, seed):
        flag = tsn.zeros((2,), torch.uint64)
        yield kernel(case, right, m, y, plain, flag, out)

    _judge(cases, launch)


WIDTH = 64
# Mistakes of protocols between three ranks, in the order of the kernel.
RING, FORWARDED_SOURCE, PARITY, FENCE_OTHER, TWO_SIGNALS, BARRIER_MISSING, TICKET, COUNTER_RESET = range(8)
GET_OF_OTHER_BLOCK, OVERLAP, WINDOW, COUNT_SHORT, ROWS_OF_OTHER_WARP, CHAIN, STALE_FLAG = range(8, 15)
BARRIER_OF_ONE_BLOCK, RELAXED_GRID, ZEROED_LATE, REMOTE_STORES, PREFETCH, HANGS = range(15, 21)


@jitted
def protocols(
    ctx: N.Context(), case: T.int32, right: T.int32, turn: T.int64, x: f32(8, WIDTH), y: f32(8, WIDTH), flag: u64(8),
    count: u64(1), word: u64(1), out: f32(8, WIDTH),
):  # fmt: skip
    """Kernel `(case, right, turn, x, y, flag, count, word, out)`: a protocol, right or with its mistake."""
    with T.Kernel(2, threads=WIDTH) as block:
        tx, me, n = T.get_thread_binding(), N.my_pe(), N.n_pes()
        to, source = (me + 1) % n, (me + n - 1) % n
        if case == RING and block == 0:
            N.put_signal_block(y[0, :], x[0, :], to, flag[0], 1)
            for s in T.serial(3):
                N.wait_block(flag[0], "ge", s + right)
                out[s, tx] = y[s % 2, tx]
                if s < 2:
                    N.wait_block(flag[1], "ge", s)
                    N.put_signal_block(y[(s + 1) % 2, :], y[s % 2, :], to, flag[0], s + 2)
                    N.quiet_block(to)
                N.signal_block(flag[1], s + 1, source, fence=False)
        if case == FORWARDED_SOURCE and block == 0:
            N.put_signal_block(y[0, :], x[0, :], to, flag[0], 1)
            for s in T.serial(4):
                N.wait_block(flag[0], "ge", s + 1)
                out[s, tx] = y[s % 2, tx]
                if right == 0:
                    N.signal_block(flag[1], s + 1, source, fence=False)
                if s < 3:
                    N.wait_block(flag[1], "ge", s)
                    N.put_signal_block(y[(s + 1) % 2, :], y[s % 2, :], to, flag[0], s + 2)
                if right != 0:
                    N.quiet_block(to)
                    N.signal_block(flag[1], s + 1, source, fence=False)
        if case == PARITY and block == 0:
            for s in T.serial(4):
                N.wait_block(flag[2 + s % 2], "ge", s // 2)
                N.put_signal_block(y[s % 2, :], x[s, :], to, flag[s % 2], s // 2 + 1)
                if right != 0:
                    N.wait_block(flag[s % 2], "ge", s // 2 + 1)
                else:
                    N.wait_block(flag[s % 2], "ge", (s + 1) // 2)
                out[s, tx] = y[s % 2, tx]
                N.signal_block(flag[2 + s % 2], s // 2 + 1, source, fence=False)
        if case == FENCE_OTHER and block == 0:
            N.put_block(y[0, :], x[0, :], to)
            T.sync_threads()
            if tx == 0:
                if right != 0:
                    N.fence(to)
                else:
                    N.fence(source)
                N.signal(flag[0], 1, to)
            N.wait_block(flag[0], "ge", 1)
            out[0, tx] = y[0, tx]
        if case == TWO_SIGNALS:
            N.put_signal_block(
                y[0, 32 * block : 32 * block + 32], x[0, 32 * block : 32 * block + 32], to, flag[block], 1
            )
            if block == 0:
                N.wait_block(flag[0], "ge", 1)
                if right != 0:
                    N.wait_block(flag[1], "ge", 1)
                out[0, tx] = y[0, tx]
        if case == BARRIER_MISSING and block == 0:
            for i in T.serial(1, n):
                N.put_block(y[me, :], x[0, :], (me + i) % n)
            N.quiet_block()
            if tx == 0:
                for i in T.serial(1, n):
                    N.signal(flag[me], 1, (me + i) % n)
            for i in T.serial(1, n - 1 + right):
                N.wait_block(flag[(me + i) % n], "ge", 1)
            for i in T.serial(1, n):
                out[i, tx] = y[(me + i) % n, tx]
        if case == TICKET and block == 0:
            if right != 0:
                N.put_block(y[0, :], x[0, :], to)
                T.sync_threads()
                if tx == 0:
                    late = N.flush_async(to)
                    N.flush_wait(late)
            else:
                if tx == 0:
                    early = N.flush_async(to)
                    N.put_thread(y[0, :], x[0, :], to)
                    N.flush_wait(early)
            T.sync_threads()
            x[0, tx] = 2.0
        if case == COUNTER_RESET and block == 0:
            if tx == 0:
                N.atomic_add(count[0], T.uint64(1), to)
                while N.ld(count[0], sem="acquire", scope="sys") == T.uint64(0):
                    T.evaluate(0)
                if right != 0:
                    N.st(count[0], T.uint64(0), sem="relaxed", scope="sys")
            N.barrier_all()
            if tx == 0:
                if right == 0:
                    count[0] = T.uint64(0)
                N.atomic_add(count[0], T.uint64(1), to)
        if case == GET_OF_OTHER_BLOCK:
            if block == 1:
                x[0, tx] = 3.0
            if right != 0:
                N.barrier_grid()
            if block == 0:
                N.signal_block(flag[0], 1, to)
                N.wait_block(flag[0], "ge", 1)
                N.get_block(y[0, :], x[0, :], source)
        if case == OVERLAP and block == 0:
            N.put_block(y[0:4, 0:WIDTH], x[0:4, 0:WIDTH], to)
            if right != 0:
                N.put_block(y[4:8, 0:WIDTH], x[4:8, 0:WIDTH], source)
            else:
                N.put_block(y[3:7, 0:WIDTH], x[4:8, 0:WIDTH], source)
            N.quiet_block()
            N.barrier_all()
            for i in T.serial(8):
                out[i, tx] = y[i, tx]
        if case == WINDOW:
            if block == 0:
                for i in T.serial(5):
                    N.wait_block(flag[1], "ge", i - 2 + right)
                    N.put_signal_block(y[i % 2, :], x[i, :], to, flag[0], i + 1)
            else:
                for i in T.serial(5):
                    N.wait_block(flag[0], "ge", i + 1)
                    out[i, tx] = y[i % 2, tx]
                    N.signal_block(flag[1], i + 1, source, fence=False)
        if case == COUNT_SHORT and block == 0:
            for i in T.serial(1, n):
                N.put_signal_block(y[me, :], x[0, :], (me + i) % n, flag[0], 1, op="add")
            N.wait_block(flag[0], "ge", n - 2 + right)
            for i in T.serial(1, n):
                out[i, tx] = y[(me + i) % n, tx]
        if case == ROWS_OF_OTHER_WARP and block == 0:
            N.put_thread(y[0, tx], x[0, tx], to, count=1)
            if right != 0:
                T.sync_threads()
            else:
                T.sync_warp()
            if tx == 0:
                N.fence(to)
                N.signal(flag[0], 1, to)
            N.wait_block(flag[0], "ge", 1)
            out[0, tx] = y[0, tx]
        if case == CHAIN and block == 0:
            x[0, tx] = 4.0
            N.signal_block(flag[0], 1, to, fence=False)
            if right != 0:
                N.wait_block(flag[0], "ge", 1)
                N.signal_block(flag[1], 1, to, fence=False)
            else:
                N.signal_block(flag[1], 1, to, fence=False)
                N.wait_block(flag[0], "ge", 1)
            N.wait_block(flag[1], "ge", 1)
            N.get_block(y[0, :], x[0, :], to)
        if case == STALE_FLAG and block == 0:
            N.put_signal_block(y[0, :], x[0, :], to, flag[0], turn)
            if right != 0:
                N.wait_block(flag[0], "ge", turn)
            else:
                N.wait_block(flag[0], "ge", 1)
            out[0, tx] = y[0, tx]
            N.quiet_block(to)
        if case == BARRIER_OF_ONE_BLOCK:
            if block == 0:
                N.put_block(y[0, :], x[0, :], to)
                N.quiet_block(to)
            if right != 0:
                N.barrier_all(scope="grid")
            elif block == 0:
                N.barrier_all()
            if block == 1:
                out[0, tx] = y[0, tx]
        if case == RELAXED_GRID:
            N.put_block(y[0, 32 * block : 32 * block + 32], x[0, 32 * block : 32 * block + 32], to)
            T.sync_threads()
            if tx == 0:
                if right != 0:
                    T.atomic_add(word[0], T.uint64(1), memory_order="release")
                else:
                    T.atomic_add(word[0], T.uint64(1), memory_order="relaxed")
            if block == 0:
                if tx == 0:
                    while N.ld(word[0], sem="acquire", scope="gpu") < T.uint64(2):
                        T.evaluate(0)
                    N.fence(to)
                    N.signal(flag[0], 1, to)
                N.wait_block(flag[0], "ge", 1)
                out[0, tx] = y[0, tx]
        if case == ZEROED_LATE and block == 0:
            y[0, tx] = 0.0
            if right != 0:
                N.barrier_all()
            N.atomic_add(y[0, tx], 1.0, to)
            N.quiet_block()
            N.barrier_all()
            out[0, tx] = y[0, tx]
        if case == REMOTE_STORES and block == 0:
            N.remote(y, to)[0, tx] = 1.0
            if right != 0:
                N.quiet_block(to)
            N.barrier_all()
            out[0, tx] = y[0, tx]
        if case == PREFETCH and block == 0:
            for c in T.serial(3):
                N.put_signal_block(y[c, :], x[c, :], to, flag[c], 1)
            ahead = T.alloc_local((1,), "float32")
            N.wait_block(flag[0], "ge", 1)
            ahead[0] = y[0, tx]
            for c in T.serial(3):
                out[c, tx] = ahead[0]
                if c < 2:
                    if right != 0:
                        N.wait_block(flag[c + 1], "ge", 1)
                    ahead[0] = y[c + 1, tx]
                    if right == 0:
                        N.wait_block(flag[c + 1], "ge", 1)
        if case == HANGS and block == 0:  # nobody sends the second signal
            N.put_signal_block(y[0, :], x[0, :], to, flag[0], 1)
            out[0, tx] = y[0, tx]
            N.wait_block(flag[1], "ge", 1)


def _launch(case, right, seed):
    x, y, out = tsn.zeros((8, WIDTH)), tsn.zeros((8, WIDTH)), torch.zeros((8, WIDTH))
    flag = tsn.zeros((8,), torch.uint64)
    count = tsn.zeros((1,), torch.uint64)
    word = torch.zeros((1,), dtype=torch.uint64)
    x.fill_(tsn.rank() + 1)
    yield  # all ranks have filled theirs
    for turn in (1, 2) if case == STALE_FLAG else (1,):
        yield protocols()(case, right, turn, x, y, flag, count, word, out)


@ranks.on(3, TSN_SIM_RACES="1")
def test_mistakes_of_protocols_are_reported():
    _judge(range(PREFETCH + 1), _launch)


def _hangs():
    for _ in _launch(HANGS, 0, 0):
        tsn.barrier()


def test_a_race_is_reported_before_waits_give_up():
    outcomes = ranks.launch(2, _hangs, env={"TSN_SIM_RACES": "1", "TSN_TIMEOUT": "6"})
    failed = {o.error[0]: o.error[1] for o in outcomes if o.error}
    assert "DataRace" in failed and "WaitTimeout" not in failed, failed
