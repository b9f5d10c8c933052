"""Remote atomic operations: a fence orders data before and after them; without one data are wrong when
writes come late, and the race detector names it."""

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.shorthand import f32, i32, jitted, u64
from tests.simulator.recorded import all_reports, recorded_errors
from tests.simulator.small_programs import ATOMIC, FENCE, LOAD, PUT, TEST, job
from tests.simulator.test_explore import _every
from tilescale_net.runtime import simulator

THREADS = 64
# A fence is missing: between a put and an atomic operation without and with a result, between a put and a store with an
# order, between atomic operations and their signal; it runs beside them; a wait is missing; an order of two writes is.
PUT_ADD, PUT_ADD_RESULT, PUT_STORE, SUM, BESIDE, NO_WAIT, SAME_PLACE = CASES = range(7)


@jitted
def one_of_many(
    ctx: N.Context(), case: T.int32, right: T.int32, x: f32(THREADS), y: f32(THREADS), word: i32(1), flag: u64(1),
    out: f32(THREADS), old: i32(1),
):  # fmt: skip
    """Kernel `(case, right, x, y, word, flag, out)`: sends x to the other rank's y in one of the ways above; out is y then."""
    with T.Kernel(1, threads=THREADS):
        tx, pe = T.get_thread_binding(), 1 - N.my_pe()
        if case <= PUT_STORE:
            N.put_block(y, x, pe)
            T.sync_threads()
            if tx == 0:
                if right != 0:
                    N.fence(pe)
                if case == PUT_ADD:
                    N.atomic_add(word[0], 1, pe)
                if case == PUT_ADD_RESULT:
                    old[0] = N.atomic_add(word[0], 1, pe)
                if case == PUT_STORE:
                    there = N.remote(word, pe)
                    N.st(there[0], 1, sem="release", scope="sys")
                while N.ld(word[0], sem="acquire", scope="sys") == 0:
                    T.evaluate(0)
            T.sync_threads()
        else:
            if case == SAME_PLACE:
                N.put_value(y[tx], T.float32(0), pe)
                if right != 0:
                    N.fence(pe)
            N.atomic_exch(y[tx], x[tx], pe)
            if case != BESIDE or right != 0:
                T.sync_threads()
            if tx == 0:
                if case != SUM or right != 0:
                    N.fence(pe)
                N.signal(flag[0], 1, pe)
            if case != NO_WAIT or right != 0:
                N.wait_block(flag[0], "ge", 1)
        out[tx] = y[tx]


def _run(cases, seeds, races):
    """For each case and form: in how many of `seeds` this rank's data were wrong, and what was reported."""
    said = recorded_errors()
    x, y = tsn.zeros((THREADS,)), tsn.zeros((THREADS,))
    word, flag = tsn.zeros((1,), torch.int32), tsn.zeros((1,), torch.uint64)
    found, turn = {}, 0
    for case in cases:
        for right in (1, 0):
            wrong, reports = 0, []
            for seed in seeds:
                turn += 1
                x.fill_(turn + 1000.0 * tsn.rank())
                y.fill_(-1.0)
                word.zero_(), flag.zero_()
                out, old = torch.zeros(THREADS), torch.zeros(1, dtype=torch.int32)
                said.clear()
                tsn.barrier()
                with simulator.schedule(seed, "random" if races else "late", races=races):
                    one_of_many()(case, right, x, y, word, flag, out, old)
                tsn.barrier()
                wrong += not (out == turn + 1000.0 * (1 - tsn.rank())).all()
                reports += said
            found[case, right] = wrong, reports
    return found


def test_data_in_late_schedules():
    """With a fence the data are there; without one they are not under some seed."""
    late = [case for case in CASES if case not in (BESIDE, SAME_PLACE)]
    found = ranks.run(2, _run, late, range(12), False)
    for case in late:
        right, wrong = ([of_rank[case, form][0] for of_rank in found] for form in (1, 0))
        assert not any(right) and any(wrong), (case, right, wrong)


MISSING = {
    PUT_ADD: "N.put_block (test_atomics.py:", SUM: "is missing after the atomic operation and before the signal",
    NO_WAIT: "N.atomic_exch (test_atomics.py:", SAME_PLACE: "N.atomic_exch (test_atomics.py:",
}  # fmt: skip


def test_races():
    found = ranks.run(2, _run, CASES, range(3), True)
    for case in CASES:
        right, wrong = ([text for of_rank in found for text in of_rank[case, form][1]] for form in (1, 0))
        assert not right, (case, right)
        words = MISSING.get(case, "N."), "test_atomics.py:"
        assert wrong and all(word in text for text in wrong for word in words), (case, wrong)


@jitted
def values_as_flags(
    ctx: N.Context(), part: T.int32, wrong: T.int32, data: i32(2, 32), own: i32(2, 32), word: i32(1), turn: T.int32
):
    """Kernel `(part, wrong, data, own, word, turn)`: values that are their own flags, of the peer and of the other block.

    Part 0 sends them and finds them, part 1 empties the places of the peer's and says so; the other block's are
    emptied at once. Wrong: 1 and 2 look for the former or the latter in vain.
    """
    with T.Kernel(2, threads=32) as block:
        tx, pe = T.get_thread_binding(), 1 - N.my_pe()
        if part == 0:
            N.st(N.remote(data, pe)[block, tx], 1)
            N.st(own[1 - block, tx], 1, scope="gpu")
            while N.ld(data[block, tx]) == 0 and wrong != 1:
                T.evaluate(0)
            while N.ld(own[block, tx], scope="gpu") == 0 and wrong != 2:
                T.evaluate(0)
            own[block, tx] = 0
        else:
            data[block, tx] = 0
            T.sync_warp()
            if tx == 0:
                N.fence(pe)
                N.atomic_add(word[0], 1, pe)  # announces: no fence need follow, whatever the other block does
                while N.ld(word[0], sem="acquire") < 2 * turn:
                    T.evaluate(0)


@pytest.mark.parametrize("wrong", [0, 1, 2])
@ranks.on(TSN_SIM_RACES="1")
def test_an_atomic_load_orders_the_write_before_later_accesses(wrong):
    reports = recorded_errors()
    for seed in range(3):
        data = tsn.zeros((2, 32), torch.int32)
        own = torch.zeros((2, 32), dtype=torch.int32)
        word = tsn.zeros((1,), torch.int32)
        with simulator.schedule(seed, "late"):
            for turn in (1, 2):
                for part in (0, 1):
                    values_as_flags()(part, wrong, data, own, word, turn)
        tsn.barrier()
    everyone = all_reports(reports)
    said = ("", "of zeros([2, 32]", "a store to own")[wrong]
    assert bool(everyone) == bool(wrong) and all(said in text for text in everyone), everyone


@pytest.mark.parametrize("order", [(), (FENCE,)])
def test_every_schedule(order):
    """A rank that finds the word of an atomic operation changed finds what was fenced before it."""
    sender = [(PUT, 0, 1, 5), *((operation, 0, 1, 0) for operation in order), (ATOMIC, 0, 1, 1)]
    report = _every(
        job([sender, [(TEST, 0, 0, 1), (LOAD, 0, 0, 0)]], right=lambda out: out[0, 0] != 1 or out[0, 1] == 5),
        races=False,
    )
    assert bool(report.failure) != bool(order) and (report.complete or not order), report
