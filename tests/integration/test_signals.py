"""signal, wait and test: every comparison at every scope, set and add, values up to 2^64 - 1, which waits see as signed."""

import operator
import time

import pytest
import tilelang.language as T
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.integration.pool import pool_fixture
from tests.kernels.support import schedule
from tests.shorthand import i32, jitted, u64
from tests.variants import nightly

COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")
WAITERS = ("thread", "warp", "block", "test")


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _compare(holds):
    return lambda a, b: holds(_signed(a), _signed(b))


# By comparison: whether a word compares to a value, both as unsigned numbers of the same bits.
HOLDS = {name: _compare(getattr(operator, name)) for name in COMPARISONS}
THREADS = 96


@jitted
def wait_all_ways(ctx: N.Context(), word: u64(1), value: u64(1), way: T.int32, seen: u64(THREADS)):
    """Kernel `(word, value, way, seen, seconds)`: waits for the word; `seen[t]` is what thread t found then.

    `way` is an index into WAITERS x COMPARISONS.
    """
    with T.Kernel(1, threads=THREADS):
        thread = T.get_thread_binding()
        wanted = value[0]
        for c, compare in enumerate(COMPARISONS):
            if way == c:
                seen[thread] = N.wait(word[0], compare, wanted)
            if way == len(COMPARISONS) + c:
                seen[thread] = N.wait_warp(word[0], compare, wanted)
            if way == 2 * len(COMPARISONS) + c:
                seen[thread] = N.wait_block(word[0], compare, wanted)
            if way == 3 * len(COMPARISONS) + c:
                while not N.test(word[0], compare, wanted):
                    pass
                seen[thread] = N.ld(word[0], sem="acquire")


@tsn.jit
def send():
    """Kernel `(word, values, op, to)`: one thread sends the values to the word of PE `to`, in order; op 0 sets, 1 adds."""
    n = T.dynamic("n")

    @T.prim_func
    def main(ctx: N.Context(), word: u64(1), values: u64(n), op: T.int32, to: T.int32):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                for i in T.serial(n):
                    if op == 0:
                        N.signal(word[0], values[i], to)
                    else:
                        N.signal(word[0], values[i], to, op="add")

    return main


_words: list[torch.Tensor] = []


def word() -> torch.Tensor:
    """One signal word, made once per rank."""
    if not _words:
        _words.append(tsn.zeros(1, torch.uint64))
    return _words[0]


def _u64(*numbers: int) -> torch.Tensor:
    signed = [n - (1 << 64) if n >= 1 << 63 else n for n in numbers]
    return torch.tensor(signed, dtype=torch.int64).view(torch.uint64).to(tsn.device())


def wait_for(waiter: str, compare: str, first: int, wanted: int, values: list[int], op: str, delay: float, seed: int):
    """Rank 0 sends `values`; rank 1, whose word is `first`, waits. Returns what rank 1's threads saw, and the word."""
    schedule(seed)
    flag = word()
    flag.copy_(_u64(first))
    tsn.barrier()
    seen = None
    if tsn.rank() == 0:
        time.sleep(delay)
        send()(flag, _u64(*values), ("set", "add").index(op), 1)
    elif tsn.rank() == 1:
        found = torch.zeros(THREADS, dtype=torch.uint64, device=tsn.device())
        way = WAITERS.index(waiter) * len(COMPARISONS) + COMPARISONS.index(compare)
        wait_all_ways()(flag, _u64(wanted), way, found)
        tsn.synchronize()
        seen = [n % (1 << 64) for n in found.view(torch.int64).tolist()]
    tsn.barrier()
    return seen, flag.view(torch.int64).item() % (1 << 64)


@tsn.jit
def count_everywhere(how):
    """Kernel `(word, flags, seen)`: every thread of every PE adds one to the word of every PE, by an atomic where that
    is mapped and by a signal elsewhere. Then each PE looks at its own, once by each way.

    Args:
        how: what orders the adds before the looks: "quiet" and a barrier, "fence" and a signal of every PE, "nothing".
    """
    n = T.dynamic("n")

    @T.prim_func
    def main(ctx: N.Context(), word: u64(1), flags: u64(n), seen: u64(3)):
        with T.Kernel(1, threads=THREADS):
            thread = T.get_thread_binding()
            total = N.n_pes() * THREADS
            for pe in T.serial(N.n_pes()):
                if N.is_direct(pe):
                    N.atomic_add(word[0], 1, pe)
                else:
                    N.signal(word[0], 1, pe, op="add")
            if how == "quiet":
                N.quiet_block()
            if how != "fence":
                N.barrier_all()
            else:
                for pe in T.serial(N.n_pes()):
                    N.signal_block(flags[N.my_pe()], 1, pe)
                if thread < N.n_pes():
                    N.wait(flags[thread], "ge", 1)
                T.sync_threads()
            if thread == 0:
                seen[0] = N.wait(word[0], "ge", 0)
            if thread == 32:
                seen[1] = T.if_then_else(N.test(word[0], "ge", total), 1, 0)
            if thread == 64:
                seen[2] = T.if_then_else(N.test(word[0], "lt", total), 1, 0)

    return main


_counts: list[torch.Tensor] = []


def count(how: str, seed: int) -> list[int]:
    """The difference between this rank's word, read in each way, and the sum of all adds."""
    schedule(seed)
    if not _counts:
        _counts.extend((tsn.zeros(1, torch.uint64), tsn.zeros(tsn.size(), torch.uint64)))
    for words in _counts:
        words.zero_()
    seen = torch.zeros(3, dtype=torch.uint64, device=tsn.device())
    tsn.barrier()
    count_everywhere(how)(*_counts, seen)
    tsn.barrier()
    value, reached, short = seen.view(torch.int64).tolist()
    return [tsn.size() * THREADS - value, 1 - reached, short]


@tsn.jit
def rounds(threads=64):
    """Kernel `(data, flag, done, seen, n, to)`: n messages go through one place, numbered from 0 in 32 bits.

    The sender of message i waits for the answer to message i - 1, except for the first one.
    """

    @T.prim_func
    def main(
        ctx: N.Context(), data: i32(threads), source: i32(threads), flag: u64(1), done: u64(1), wrong: i32(threads),
        n: T.int32, to: T.int32,
    ):  # fmt: skip
        with T.Kernel(2, threads=threads) as side:
            thread = T.get_thread_binding()
            for i in T.serial(n):
                if side == 0:
                    N.wait_block(done[0], "gt", i - 1)
                    source[thread] = i * threads + thread
                    N.put_signal_block(data, source, to, flag[0], i + 1)
                else:
                    N.wait_block(flag[0], "ge", i + 1)
                    if data[thread] != i * threads + thread:
                        wrong[thread] += 1
                    T.sync_threads()
                    if thread == 0:
                        N.signal(done[0], i + 1, to)

    return main


def count_from_zero(n: int, seed: int) -> int:
    """Wrong elements of `rounds`."""
    schedule(seed)
    data, source = tsn.zeros(64, torch.int32), tsn.zeros(64, torch.int32)
    flag, done = tsn.zeros(1, torch.uint64), tsn.zeros(1, torch.uint64)
    wrong = torch.zeros(64, dtype=torch.int32, device=tsn.device())
    rounds()(data, source, flag, done, wrong, n, (tsn.rank() + 1) % tsn.size())
    tsn.barrier()
    count = int(wrong.sum())
    for tensor in (data, source, flag, done):
        tsn.free(tensor)
    return count


@ranks.fails(
    "WaitTimeout", "waited 0.5 s for eq 1 on the signal [1, 2] of zeros([2, 3], torch.uint64)",
    "last seen 4; the word went past that value", size=1, TSN_TIMEOUT="0.5",
)  # fmt: skip
def test_a_timeout_names_the_word_and_the_comparison():
    """Waits for `eq` 1 of a word that holds 4."""
    words = tsn.zeros((2, 3), torch.uint64)
    words[1, 2] = 4
    found = torch.zeros(THREADS, dtype=torch.uint64, device=tsn.device())
    wait_all_ways()(words.view(-1)[5:6], _u64(1), 0, found)
    tsn.synchronize()
    tsn.world().check()


# -- tests ----------------------------------------------------------------------------------------------------------

pool = pool_fixture(2)
TOP = (1 << 64) - 1

# A word's first value, the awaited value, the value that arrives: only the last satisfies the comparison.
STEPS = {
    "eq": (3, 7, [5, 7]),
    "ne": (7, 7, [9]),
    "ge": (6, 1 << 62, [7, (1 << 62) + 4]),
    "gt": (TOP, 0, [0, 5]),  # all bits set are -1
    "le": (9, 7, [8, TOP - 1]),
    "lt": (7, 7, [7, 0]),
}


# Each is a kernel of its own: every second one in every run, so that no waiter and no comparison is left out.
@pytest.mark.parametrize(
    "waiter, compare",
    [
        nightly(waiter, compare, when=bool((i + k) % 2))
        for i, waiter in enumerate(WAITERS)
        for k, compare in enumerate(COMPARISONS)
    ],
)
def test_every_wait(pool, waiter, compare):
    first, wanted, values = STEPS[compare]
    assert not HOLDS[compare](first, wanted) and HOLDS[compare](values[-1], wanted)
    for delay in (0.0, 0.02):
        _, (seen, left) = pool(wait_for, waiter, compare, first, wanted, values, "set", delay, 1)
        assert left == values[-1]
        assert len(seen) == THREADS and all(HOLDS[compare](s, wanted) and s in values for s in seen), seen
        if waiter in ("warp", "block"):
            group = 32 if waiter == "warp" else THREADS
            assert all(len(set(seen[i : i + group])) == 1 for i in range(0, THREADS, group)), "one value for the scope"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    waiter=st.sampled_from(WAITERS),
    first=st.integers(0, TOP),
    values=st.lists(st.integers(0, TOP), min_size=1, max_size=8),
    op=st.sampled_from(["set", "add"]),
    seed=st.integers(0, 1 << 30),
)
def test_last_value_stays(pool, waiter, first, values, op, seed):
    """Signals from one PE to one word happen in the order in which they were sent; additions wrap at 2^64."""
    last = values[-1] if op == "set" else (first + sum(values)) % (1 << 64)
    _, (seen, left) = pool(wait_for, waiter, "eq", first, last, values, op, 0.0, seed)
    sums = [first, *values] if op == "set" else [(first + sum(values[:i])) % (1 << 64) for i in range(len(values) + 1)]
    # `test` shows that the word was equal; where that value comes more than once, a look afterwards may find another.
    assert left == last and set(seen) <= (set(sums) if waiter == "test" and sums.count(last) > 1 else {last})


def test_messages_are_counted_from_zero(pool):
    """A wait for a number below zero is over at once."""
    for seed in range(3):
        assert pool(count_from_zero, 6, seed) == [0, 0]


def test_ordered_adds_are_in_the_word(pool):
    for seed, how in enumerate(["quiet", "fence"] * 6):
        assert pool(count, how, seed) == [[0, 0, 0]] * 2, (seed, how)
