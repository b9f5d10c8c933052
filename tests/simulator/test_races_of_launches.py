"""Races between a put of one launch and what later launches do: the end of a kernel completes no put."""

import re
import time

import numpy
import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.shorthand import f32, jitted, u64
from tests.simulator.recorded import all_reports, recorded_errors
from tilescale_net.runtime import simulator

PUT, PUT_SIGNAL, VIEW, FENCE, QUIET, TELL, TELL_AFTER_FENCE, TAKE, TAKE_TOLD, READ, WRITE, HOST_READ = range(12)


@jitted
def step(ctx: N.Context(), action: T.int32, x: f32(64), y: f32(64), flag: u64(2), count: T.int32, out: f32(64)):
    """Kernel `(what, x, y, flag, count, out)`: one step of a message to the other rank, or its receipt."""
    with T.Kernel(1, threads=64):
        tx = T.get_thread_binding()
        pe, call = 1 - N.my_pe(), T.cast(count, "uint64")
        if action == PUT:
            N.put_block(y, x, pe)
        if action == PUT_SIGNAL:
            N.put_signal_block(y, x, pe, flag[1], call)
        if action == VIEW:
            view = N.remote(y, pe)
            view[tx] = x[tx]
        if action == FENCE and tx == 0:
            N.fence(pe)
        if action == QUIET and tx == 0:
            N.quiet(pe)
        if action == TELL and tx == 0:
            N.signal(flag[0], call, pe)
        if action == TELL_AFTER_FENCE and tx == 0:
            N.signal(flag[0], call, pe, fence=True)
        if action >= TAKE:
            N.wait_block(flag[0], "ge", call)
            if action == TAKE_TOLD:
                N.wait_block(flag[1], "ge", call)
            out[tx] = y[tx]


@jitted
def copy(dst: f32(64), src: f32(64)):
    """Kernel `(dst, src)`, which calls no primitive."""
    with T.Kernel(1, threads=64):
        dst[T.get_thread_binding()] = src[T.get_thread_binding()]


WRONG = [(PUT, TELL, TAKE), (PUT_SIGNAL, TELL, TAKE), (VIEW, TELL, TAKE), (PUT, TELL, TELL, TAKE)]
RIGHT = [
    (PUT, TELL_AFTER_FENCE, TAKE),
    (PUT, FENCE, TELL, TAKE),
    (PUT, QUIET, TELL, TAKE),
    (PUT_SIGNAL, TELL, TAKE_TOLD),
    (PUT_SIGNAL, TELL_AFTER_FENCE, TAKE),
    (VIEW, TELL_AFTER_FENCE, TAKE),
    (VIEW, FENCE, TELL, TAKE),
]


def _reports(cases, seeds) -> list[list[str]]:
    """The reports of all ranks of each case: of each seed the first of a rank."""
    reports = recorded_errors()
    x, y, flag, out = tsn.zeros((64,)), tsn.zeros((64,)), tsn.zeros((2,), torch.uint64), torch.zeros(64)
    kernel, call, found = step(), 0, []
    for case in cases:
        first = []
        for seed in seeds:
            call += 1
            tsn.barrier()
            with simulator.schedule(seed):
                for action in case:
                    if action in (READ, WRITE):
                        copy()(*((out, y) if action == READ else (x, out)))
                    elif action == HOST_READ:
                        x.sum()
                    else:
                        kernel(action, x, y, flag, call, out)
            first += reports[:1]
            reports.clear()
        found.append(all_reports(first))
    return found


@ranks.on(TSN_SIM_RACES="1")
def test_a_put_of_the_launch_before_is_not_ordered_by_a_signal_without_a_fence():
    # `twice` stores again while the other rank reads: after the store of the launch before, by the same thread.
    seeds, twice = range(3), (VIEW, TELL_AFTER_FENCE, TAKE, VIEW)
    cases = [*WRONG, *RIGHT, twice]
    for case, reports in zip(cases, _reports(cases, seeds)):
        # The rank that comes second finds it: one rank may find what both do.
        assert len(reports) >= len(seeds) if case in WRONG or case is twice else not reports, (case, reports)
        assert all("a load of " in text for text in reports), reports


@ranks.on(TSN_SIM_RACES="1")
def test_kernels_that_call_no_primitive_take_part():
    """Data that a plain kernel reads may not have arrived yet, and data that it overwrites may not have been sent."""
    wrong = [
        (PUT, TELL_AFTER_FENCE, READ),
        (PUT_SIGNAL, WRITE),
        (PUT, TELL_AFTER_FENCE, TAKE, WRITE),
        (PUT, HOST_READ, WRITE),  # both read the source, and the put may be the later one
    ]
    right = [
        (PUT, TELL_AFTER_FENCE, TAKE, READ),
        (PUT_SIGNAL, TELL, TAKE_TOLD, READ),
        (PUT, QUIET, WRITE),
        (PUT, QUIET, HOST_READ, WRITE),
        (READ, WRITE),
    ]
    seeds = range(3)
    for case, reports in zip([*wrong, *right], _reports([*wrong, *right], seeds)):
        assert len(reports) >= len(seeds) if case in wrong else not reports, (case, reports)
        if case in wrong[1:]:
            assert all("kernel copy" in text and "a store to " in text for text in reports), reports


@jitted
def send_to_both(ctx: N.Context(), first: T.int32, done: T.int32, x: f32(64), y: f32(3, 64)):
    """Kernel `(first, done, x, y)`: puts `x` to both other PEs, to PE my_pe + `first` first; writes it again after a quiet for
    one, or for all where `done` is 0."""
    with T.Kernel(1, threads=64):
        me, tx = N.my_pe(), T.get_thread_binding()
        N.put_block(y[me, :], x, (me + first) % 3)
        N.put_block(y[me, :], x, (me + 3 - first) % 3)
        if done == 0:
            N.quiet_block()
        else:
            N.quiet_block((me + done) % 3)
        x[tx] = 1.0


@ranks.on(3, TSN_SIM_RACES="1")
def test_puts_from_one_source_are_each_waited_for():
    reports = recorded_errors()
    x, y, kernel, me = tsn.zeros((64,)), tsn.zeros((3, 64)), send_to_both(), tsn.rank()
    for first in (1, 2):
        for done in (0, 1, 2):
            reports.clear()
            tsn.barrier()
            kernel(first, done, x, y)
            assert bool(reports) == bool(done), (first, done, reports)
            # The one that may still read is named.
            assert all(f"thread 0 to PE {(me + 3 - done) % 3} reads" in said for said in reports), reports


@ranks.on(TSN_SIM_RACES="1")
def test_a_meeting_by_torch_orders_nothing_behind_a_later_one():
    """A kernel that another rank runs behind `tsn.barrier` is not ordered by a torch.distributed.barrier before that."""
    reports = recorded_errors()
    x, y, flag, out = tsn.zeros((64,)), tsn.zeros((64,)), tsn.zeros((2,), torch.uint64), torch.zeros(64)
    kernel, reader = step(), copy()
    for turn in range(2):
        reader(out, y)  # nothing is left to compile
        kernel(PUT, x, y, flag, 1, out)
        reports.clear()
        torch.distributed.barrier()
        tsn.barrier()
        if tsn.rank() == turn:
            reader(out, y)
        else:
            time.sleep(0.5)  # the other rank's kernel has ended
            kernel(PUT, x, y, flag, 1, out)
            assert len(reports) == 1, reports
        tsn.barrier()


@pytest.mark.parametrize("host_first", [True, False])
@ranks.on(TSN_SIM_RACES="1")
def test_a_word_that_a_host_sets_anew_beside_signals(host_first):
    """Rank 1's host zeroes a word to which rank 0's kernel signals."""
    reports = recorded_errors()
    simulator.on_race = lambda base, error: reports.append(str(error))
    x, y, out, kernel = tsn.zeros((64,)), tsn.zeros((64,)), torch.zeros(64), step()
    for right in (True, False):
        flag = tsn.zeros((2,), torch.uint64)
        kernel(QUIET, x, y, flag, 0, out)  # nothing is left to compile
        tsn.barrier()
        reports.clear()
        for of_host in (host_first, not host_first):
            if of_host and tsn.rank() == 1:
                flag.zero_()
            if not of_host and tsn.rank() == 0:
                kernel(TELL, x, y, flag, 1, out)
            torch.distributed.barrier() if right else time.sleep(0.3)
        tsn.barrier()
        everyone = all_reports(reports)
        assert bool(everyone) != right and all("tsn.barrier() is missing" in text for text in everyone), everyone


def _element(array, value):
    array[3] = value


# What a rank does with its source `x`, the target `y` of the other rank and an array of each that `numpy()` gave before, and
# whether that is wrong.
THROUGH_ARRAYS = {
    "put, written": (True, lambda x, y, a, b, k: (k(PUT), a.fill(9.0))),
    "put, written by an array made then": (True, lambda x, y, a, b, k: (k(PUT), x.numpy().fill(9.0))),
    "put, written by DLPack": (True, lambda x, y, a, b, k: (k(PUT), numpy.from_dlpack(x).fill(9.0))),
    "put, one element": (True, lambda x, y, a, b, k: (k(PUT), _element(a, 9.0))),
    "put, written through a view": (True, lambda x, y, a, b, k: (k(PUT), a.reshape(8, 8)[::2].fill(9.0))),
    "put, read, written": (True, lambda x, y, a, b, k: (k(PUT), x.sum(), a.fill(9.0))),
    "put, written, quiet": (True, lambda x, y, a, b, k: (k(PUT), a.fill(9.0), k(QUIET))),
    "taken, put on, written": (
        True,
        lambda x, y, a, b, k: (k(PUT), k(TELL_AFTER_FENCE), k(TAKE), k(PUT, y, x), b.fill(9.0)),
    ),
    "put, quiet, written": (False, lambda x, y, a, b, k: (k(PUT), k(QUIET), a.fill(9.0))),
    "put, barrier, written": (False, lambda x, y, a, b, k: (k(PUT), tsn.barrier(), a.fill(9.0))),
    "written, put": (False, lambda x, y, a, b, k: (a.fill(9.0), k(PUT), k(QUIET))),
    "put, read": (False, lambda x, y, a, b, k: (k(PUT), a.sum(), x.numpy().sum())),
    "put, the same value": (False, lambda x, y, a, b, k: (k(PUT), a.fill(1.0))),
    "taken, written": (False, lambda x, y, a, b, k: (k(PUT), k(TELL_AFTER_FENCE), k(TAKE), b.fill(9.0), a.sum())),
    "reduced by torch, put": (
        False,
        lambda x, y, a, b, k: (torch.distributed.all_reduce(x), a.fill(9.0), k(PUT), k(QUIET), a.fill(2.0)),
    ),
}


THROUGH = re.compile(r"the host, through an array \(test_races_of_launches.py:\d+\) writes")


@ranks.on(TSN_SIM_RACES="1")
def test_writes_of_the_host_through_arrays():
    """No operator shows it: the bytes of a source have changed."""
    reports, kernel = recorded_errors(), step()
    simulator.on_race = lambda base, error: reports.append(str(error))
    for call, (name, (wrong, act)) in enumerate(THROUGH_ARRAYS.items(), 1):
        x, y, flag, out = tsn.zeros((64,)), tsn.zeros((64,)), tsn.zeros((2,), torch.uint64), torch.zeros(64)
        x.fill_(1.0)
        a, b = x.numpy(), y.numpy()
        tsn.barrier()
        reports.clear()
        with simulator.schedule(call):
            act(x, y, a, b, lambda action, x=x, y=y: kernel(action, x, y, flag, 1, out))
        tsn.barrier()
        everyone = all_reports(reports)
        assert bool(everyone) == wrong, (name, everyone)
        assert all(THROUGH.search(text) and "N.put_block" in text for text in everyone), (name, everyone)
