"""Races of puts and gets with what threads of their rank do: rows that lie apart, ends outside the heap, odd sizes."""

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.simulator.recorded import recorded_errors
from tilescale_net.runtime import simulator

SEEDS = range(3)
ROWS_READ_EARLY, ROWS_REUSED, ROWS_GOT_EARLY, ROWS_GOT_BY_A_WARP = range(4)
GOT_BY_A_WARP, SENT_BY_A_WARP, REUSED, REUSED_FOR_ALL, TILE_REUSED = range(4, 9)
COLUMN, VALUES, ODD, NEIGHBOURS, ONTO_ITSELF, FLUSHED = range(9, 15)


# Without this tilelang puts a barrier between any two accesses to shared memory by itself.
@tsn.jit(pass_configs={"tl.disable_thread_storage_sync": True})
def copies(dtype="float32"):
    """Kernel `(case, right, m, y, plain, flag, out)`: one of the cases, with what orders it or without."""

    @T.prim_func
    def main(
        ctx: N.Context(), case: T.int32, right: T.int32, m: T.Tensor((16, 16), dtype), y: T.Tensor((128,), dtype),
        plain: T.Tensor((64,), dtype), flag: T.Tensor((2,), "uint64"), out: T.Tensor((64,), dtype),
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
            if case == NEIGHBOURS:  # no other's bytes are touched, or those of the odd columns
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


def _reports(kernel, cases, *tensors):
    """What this rank reports of each case in its wrong and its right form, under each seed."""
    reports = recorded_errors()
    told = {}
    for case in cases:
        for right in (0, 1):
            for seed in SEEDS:
                flag = tsn.zeros((2,), torch.uint64)
                reports.clear()
                with simulator.schedule(seed):
                    kernel(case, right, *tensors[:-1], flag, tensors[-1])
                tsn.barrier()
                told[case, right, seed] = reports[0] if reports else ""
    return told


def _judge(told_by_ranks):
    for key in told_by_ranks[0]:
        said = [told[key] for told in told_by_ranks if told[key]]
        case, right, _ = key
        assert bool(said) == (not right), (key, said)
        assert all(text.count("test_races_of_transfers.py:") >= 2 for text in said), (key, said)


def _copies(dtype):
    cases = (*range(COLUMN), FLUSHED) if dtype == torch.float32 else range(ROWS_GOT_BY_A_WARP, ONTO_ITSELF + 1)
    tensors = tsn.zeros((16, 16), dtype), tsn.zeros((128,), dtype), *torch.zeros((2, 64), dtype=dtype)
    return _reports(copies(str(dtype).split(".")[1]), cases, *tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.sample(2)
def test_every_byte_of_a_copy_is_followed(dtype):
    _judge(ranks.run(2, _copies, dtype, env={"TSN_SIM_RACES": "1"}))
