"""Races of protocols that reuse memory from round to round or from launch to launch, or hand work from warp to warp: three ranks,
on one node and each on a node of its own."""

import itertools

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.shorthand import f32, jitted, u64
from tests.simulator.recorded import first_reports
from tests.variants import variants

WIDTH, LAUNCHES, SEEDS = 64, 4, range(2)
EARLY_EPOCH, HALF_ROW, IN_PLACE, FLUSHED_BEFORE, RELAY, MIXED_COUNT, CREDIT_BESIDE_GET, GET_BESIDE_PUT, IN_TURN = range(
    9
)
# On one node.
VIEW_OF_OTHER_WARP, ATOMIC_OF_OTHER_WARP, POLL_OF_A_LOAD, POLL_OF_A_VALUE, VECTOR_FOR_A_SIGNAL = range(9, 14)


@T.macro
def late(out, tx):
    """The first warp goes on when the second one has come here; it learns nothing else."""
    if tx == 32:
        N.st(out[3, 0], 1.0, sem="relaxed", scope="gpu")
    if tx < 32:
        while N.ld(out[3, 0], sem="relaxed", scope="gpu") == 0.0:
            T.evaluate(0)


@jitted
def rounds(
    ctx: N.Context(), case: T.int32, right: T.int32, call: T.int64, x: f32(4, WIDTH), y: f32(4, WIDTH),
    z: f32(4, WIDTH), flag: u64(8), out: f32(4, WIDTH),
):  # fmt: skip
    """Kernel `(case, right, call, x, y, z, flag, out)`: a protocol, right or with its mistake."""
    with T.Kernel(1, threads=WIDTH):
        tx, me, n = T.get_thread_binding(), N.my_pe(), N.n_pes()
        mine, theirs = T.alloc_local((4,), "float32"), T.alloc_local((4,), "float32")
        to, source = (me + 1) % n, (me + n - 1) % n
        # PE 0 sends by two buffers, launch after launch; the credit for a buffer is the one of two launches before.
        if case == EARLY_EPOCH:
            if me == 0:
                N.wait_block(flag[1], "ge", call - 3 + right)
                N.put_signal_block(y[call % 2, :], x[call % 2, :], 1, flag[0], call)
                N.quiet_block(1)
            if me == 1:
                N.wait_block(flag[0], "ge", call)
                out[0, tx] = y[call % 2, tx]
                N.signal_block(flag[1], call, 0)
        # The owner's first thread announces a row that its block has written.
        if case == HALF_ROW:
            x[0, tx] = 2.0
            if right != 0:
                T.sync_threads()
            if tx == 0:
                N.signal(flag[0], 1, to)
            N.wait_block(flag[0], "ge", 1)
            N.get_block(y[0, :], x[0, :], source)
            out[0, tx] = y[0, tx]
        # All-reduce in place, three rounds: sums are written when all have read, or when all had read the round before.
        if case == IN_PLACE:
            for r in T.serial(3):
                for i in T.serial(1, n):
                    N.signal_block(flag[me], r + 1, (me + i) % n)
                for i in T.serial(1, n):
                    N.wait_block(flag[(me + i) % n], "ge", r + 1)
                    N.get_block(z[i, :], x[0, :], (me + i) % n)
                for i in T.serial(1, n):
                    N.signal_block(flag[4 + me], r + 1, (me + i) % n)
                for i in T.serial(1, n):
                    N.wait_block(flag[4 + (me + i) % n], "ge", r + right)
                x[0, tx] = x[0, tx] + z[1, tx] + z[2, tx]
                T.sync_threads()
        # Two puts, two flushes: the first flush says nothing of the second put.
        if case == FLUSHED_BEFORE and tx == 0:
            N.put_thread(y[0, :], x[0, :], to)
            first = N.flush_async(to)
            N.put_thread(y[1, :], x[1, :], to)
            second = N.flush_async(to)
            N.flush_wait(first)
            x[0, 0] = 3.0
            if right != 0:
                N.flush_wait(second)
            x[1, 0] = 3.0
            if right == 0:
                N.flush_wait(second)
        # PE 0 puts to 2 and tells 1, which tells 2: a fence towards 2 orders nothing that goes by way of 1.
        if case == RELAY:
            if me == 0:
                N.put_block(y[0, :], x[0, :], 2)
                if right != 0:
                    N.quiet_block(2)
                else:
                    N.fence_block(2)
                N.signal_block(flag[0], 1, 1)
            if me == 1:
                N.wait_block(flag[0], "ge", 1)
                N.signal_block(flag[0], 1, 2)
            if me == 2:
                N.wait_block(flag[0], "ge", 1)
                out[0, tx] = y[0, tx]
        # Two warps count on one word what each has put: one of them is there, but which?
        if case == MIXED_COUNT:
            N.put_signal_warp(
                y[0, tx // 32 * 32 : tx // 32 * 32 + 32], x[0, tx // 32 * 32 : tx // 32 * 32 + 32], to, flag[0], 1,
                op="add",
            )  # fmt: skip
            N.wait_block(flag[0], "ge", 1 + right)
            if tx < 32:
                out[0, tx] = y[0, tx]
        # A warp gets a row, and another one tells its owner that it may be written again.
        if case == CREDIT_BESIDE_GET:
            if tx >= 32:
                N.get_warp(y[0, :], x[0, :], source)
            if right != 0:
                T.sync_threads()
            if tx == 0:
                N.signal(flag[0], 1, source)
            N.wait_block(flag[0], "ge", 1)
            x[0, tx] = 2.0
        # A row is got from a PE to which a third one puts it.
        if case == GET_BESIDE_PUT:
            N.put_signal_block(y[0, :], x[0, :], to, flag[0], 1)
            if right != 0:
                N.wait_block(flag[0], "ge", 1)
            N.signal_block(flag[1], 1, to, fence=False)
            N.wait_block(flag[1], "ge", 1)
            N.get_block(z[0, :], y[0, :], source)
        # PE 0 counts, and tells 1, which counts as well: the first one of both is 0's. Both have come when 2 waits.
        if case == IN_TURN:
            if me == 0:
                N.put_block(y[0, :], x[0, :], 2)
                N.signal_block(flag[0], 1, 2, op="add")
                if right != 0:
                    N.quiet_block(2)
                N.signal_block(flag[1], 1, 1)
            if me == 1:
                N.wait_block(flag[1], "ge", 1)
                N.signal_block(flag[0], 1, 2, op="add")
            if me == 2:
                if tx == 32:
                    N.wait(flag[0], "ge", 2)
                late(out, tx)
                if tx < 32:
                    N.wait_warp(flag[0], "ge", 1)
                    out[0, tx] = y[0, tx]
        # A loop that takes the first of two rows for both, when both have come.
        if case == POLL_OF_A_LOAD or case == POLL_OF_A_VALUE:
            if me != 0:
                N.put_block(y[me, :], x[0, :], 0)
                T.sync_threads()
                if tx == 0:
                    N.fence(0)
                    N.atomic_add(flag[0], T.uint64(1), 0)
            else:
                if tx == 32:
                    while N.ld(flag[0], sem="relaxed") < T.uint64(2):
                        T.evaluate(0)
                late(out, tx)
                if tx == 0:
                    if case == POLL_OF_A_LOAD:
                        while N.ld(flag[0], sem="acquire") < T.if_then_else(right != 0, T.uint64(2), T.uint64(1)):
                            T.evaluate(0)
                    else:
                        come = T.alloc_var("uint64")
                        come = N.ld(flag[0])
                        while come < T.cast(1 + right, "uint64"):
                            come = N.ld(flag[0])
                        N.fence()
                T.sync_threads()
                out[0, tx] = y[1, tx] + y[2, tx]
        if case == VIEW_OF_OTHER_WARP or case == ATOMIC_OF_OTHER_WARP:
            if tx >= 32 and case == VIEW_OF_OTHER_WARP:
                N.remote(y, to)[0, tx] = 1.0
            if tx >= 32 and case == ATOMIC_OF_OTHER_WARP:
                N.atomic_add(y[0, tx], 1.0, to)
            if right != 0:
                T.sync_threads()
            if tx == 0:
                N.signal(flag[0], 1, to, fence=True)
            N.wait_block(flag[0], "ge", 1)
            out[0, tx] = y[0, tx]
        # A vector arrives on its own; nothing orders earlier puts before it.
        if case == VECTOR_FOR_A_SIGNAL:
            N.put_block(y[0, :], x[0, :], to)
            if right != 0:
                N.signal_block(flag[0], 1, to)
                N.wait_block(flag[0], "ge", 1)
            if tx == 0:
                for i in T.serial(4):
                    mine[i] = 1.0
                N.put_vector(z[0, 0:4], mine, to)
                N.take_vectors(theirs, z[0, 0:4])
            T.sync_threads()
            out[0, tx] = y[0, tx]


def _launch(case, right, seed):
    x, y, z, out = tsn.zeros((4, WIDTH)), tsn.zeros((4, WIDTH)), tsn.zeros((4, WIDTH)), torch.zeros((4, WIDTH))
    flag = tsn.zeros((8,), torch.uint64)
    x.fill_(tsn.rank() + 1)
    yield  # all ranks have filled theirs
    for call in range(1, LAUNCHES + 1 if case == EARLY_EPOCH else 2):
        rounds()(case, right, call, x, y, z, flag, out)
    yield


@variants(1, "nodes", [1, 3])
@ranks.on(3, TSN_SIM_RACES="1")
def test_mistakes_of_rounds_are_reported(nodes):
    # Flushes of one node are not told apart; see docs/simulator.md.
    cases = range(VIEW_OF_OTHER_WARP) if nodes > 1 else set(range(VECTOR_FOR_A_SIGNAL + 1)) - {FLUSHED_BEFORE}
    for key, reports in first_reports(itertools.product(cases, (0, 1), SEEDS), _launch).items():
        assert bool(reports) != bool(key[1]), (key, reports)
        assert all(text.count("test_races_of_rounds.py:") >= 2 for text in reports), (key, reports)
