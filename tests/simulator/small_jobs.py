"""Small jobs whose schedules are explored: each function sets up a rank, as `python -m tilescale_net check` requires
it.

The kernels are small on purpose; each has forms that leave something out, whose names begin with `without` or `wrong`.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.shorthand import f32, u64

M = 32  # float32 of a message, one for each thread


@T.macro
def _ring(x, y, flag, out, tx, without):
    N.put_signal_block(y, x, (N.my_pe() + 1) % N.n_pes(), flag[0], 1)
    if without != "wait":
        N.wait_block(flag[0], "ge", 1)
    out[tx] = y[tx]


@T.macro
def _put_and_signal(x, y, flag, out, tx, without):
    right = (N.my_pe() + 1) % N.n_pes()
    N.put_block(y, x, right)
    T.sync_threads()
    if tx == 0:
        N.signal(flag[0], 1, right, fence=without != "fence")
    N.wait_block(flag[0], "ge", 1)
    out[tx] = y[tx]


@T.macro
def _stream(x, y, flag, out, tx, without):
    """Three rounds through one place: the data go to the right, credits to the left."""
    right, left = (N.my_pe() + 1) % N.n_pes(), (N.my_pe() + N.n_pes() - 1) % N.n_pes()
    out[tx] = T.float32(0)
    for r in T.serial(3):
        if without != "credit":
            if r > 0:
                N.wait_block(flag[1], "ge", r)
        N.put_signal_block(y, x, right, flag[0], r + 1)
        N.wait_block(flag[0], "ge", r + 1)
        out[tx] += y[tx]
        T.sync_threads()
        if tx == 0:
            N.signal(flag[1], r + 1, left)


@T.macro
def _barrier(x, y, flag, out, tx, without):
    """Twice a put to the right, and a barrier between it and the read, and between the read and the next put."""
    right = (N.my_pe() + 1) % N.n_pes()
    for r in T.serial(2):
        N.put_block(y, x, right)
        if without == "quiet":
            T.sync_threads()
        else:
            N.quiet_block(right)
        N.barrier_all()
        out[tx] = y[tx]
        T.sync_threads()
        if without != "barrier":
            N.barrier_all()


@T.macro
def _count(x, y, flag, out, tx, without):
    """Everyone adds to one word of rank 0, which waits for all of them, or for one too few."""
    if tx == 0:
        N.signal(flag[0], 1, 0, op="add")
        if N.my_pe() == 0:
            if without == "number":
                out[0] = T.cast(N.wait(flag[0], "ge", N.n_pes() - 1), "float32")
            else:
                out[0] = T.cast(N.wait(flag[0], "ge", N.n_pes()), "float32")


@T.macro
def _turns(x, y, flag, out, tx, without):
    """Ranks draw numbers of a counter at rank 0 by atomic operations; they add up to the same in any order."""
    if tx == 0:
        out[0] = T.cast(N.atomic_add(flag[0], T.uint64(1), 0), "float32")
        out[1] = T.cast(N.atomic_add(flag[0], T.uint64(1), 0), "float32")


@T.macro
def _both_wait(x, y, flag, out, tx, without):
    """Each signals the other, and waits for it; or the other way round."""
    right = (N.my_pe() + 1) % N.n_pes()
    if tx == 0:
        if without == "order":
            N.wait(flag[0], "ge", 1)
        N.signal(flag[0], 1, right)
        if without != "order":
            N.wait(flag[0], "ge", 1)


@T.macro
def _passes(x, y, flag, out, tx, without):
    """Rank 1 signals twice; rank 0 waits for the first value, which may have gone by where it waits for it exactly."""
    if tx == 0:
        if N.my_pe() == 1:
            N.signal(flag[0], 1, 0)
            N.signal(flag[0], 2, 0)
        elif without == "comparison":
            N.wait(flag[0], "eq", 1)
        else:
            N.wait(flag[0], "ge", 1)


@T.macro
def _polls(x, y, flag, out, tx, without):
    """A loop of tests instead of a wait, of two words in turn."""
    right = (N.my_pe() + 1) % N.n_pes()
    N.put_signal_block(y, x, right, flag[1], 1)
    if tx == 0:
        N.signal(flag[0], 1, right)
        more = T.alloc_var("bool")
        more = True
        while more:
            if N.test(flag[0], "ge", 1):
                if N.test(flag[1], "ge", 1):
                    more = False
    T.sync_threads()
    out[tx] = y[tx]


@T.macro
def _loads(x, y, flag, out, tx, without):
    """A loop of N.ld with an order, or without one, of a word that the peer stores to."""
    right, left = (N.my_pe() + 1) % N.n_pes(), (N.my_pe() + N.n_pes() - 1) % N.n_pes()
    if tx == 0:
        y[0] = x[0]
        N.st(N.remote(flag, right)[0], T.uint64(1), sem="release", scope="sys")
        if without == "relaxed":
            while N.ld(flag[0]) == T.uint64(0):
                pass
            N.fence()
        else:
            while N.ld(flag[0], sem="acquire", scope="sys") == T.uint64(0):
                pass
        if without != "relaxed":
            out[0] = N.remote(y, left)[0]


@T.macro
def _counter(x, y, flag, out, tx, without):
    """A barrier by a counter at rank 0, which everyone adds to and looks at."""
    if tx == 0:
        y[0] = x[0]
        N.fence()
        N.atomic_add(flag[0], T.uint64(1), 0)
        while N.ld(N.remote(flag, 0)[0], sem="acquire", scope="sys") < T.cast(
            N.n_pes() - (1 if without == "number" else 0), "uint64"
        ):
            pass
        out[0] = N.remote(y, (N.my_pe() + N.n_pes() - 1) % N.n_pes())[0]


@T.macro
def _seqlock(x, y, flag, out, tx, without):
    """Rank 0 writes two numbers between an odd and an even count; the others read until the count is the same before and
    after, and even."""
    if tx == 0:
        if N.my_pe() == 0:
            N.st(flag[0], T.uint64(1), sem="relaxed", scope="sys")
            N.fence()
            N.st(y[0], x[0], sem="release", scope="sys")
            N.st(y[1], x[0], sem="release", scope="sys")
            N.st(flag[0], T.uint64(2), sem="release", scope="sys")
        else:
            before = T.alloc_var("uint64")
            after = T.alloc_var("uint64")
            before = T.uint64(1)
            after = T.uint64(3)
            while before != after or before == T.uint64(1):
                before = N.ld(N.remote(flag, 0)[0], sem="acquire", scope="sys")
                out[0] = N.ld(N.remote(y, 0)[0], sem="acquire", scope="sys")
                out[1] = N.ld(N.remote(y, 0)[1], sem="acquire", scope="sys")
                after = N.ld(N.remote(flag, 0)[0], sem="acquire", scope="sys")
                if without == "again":
                    after = before


@T.macro
def _spins(x, y, flag, out, tx, without):
    """A loop of plain loads, which never sees another thread's write; or very many decisions."""
    if tx == 0:
        if without == "long":
            for _ in T.serial(1 << 30):
                N.atomic_add(flag[0], T.uint64(1), N.my_pe())
        else:
            while out[1] == T.float32(0):
                out[0] = out[1]


@T.macro
def _stuck(x, y, flag, out, tx, without):
    """A thread polls for what nobody stores, or waits for a phase of an mbarrier to which nobody arrives."""
    full = T.alloc_barrier(1)
    if tx == 0:
        if without == "parity":
            T.barrier_arrive(full)
            T.barrier_wait(full, 0)
            T.barrier_wait(full, 1)
        else:
            while N.ld(flag[0], sem="acquire") == T.uint64(0):
                pass


@T.macro
def _packed(x, y, flag, out, tx, without):
    """Data and flag are words of the peer, stored one after the other."""
    right = (N.my_pe() + 1) % N.n_pes()
    if tx == 0:
        N.st(N.remote(flag, right)[1], T.uint64(7))
        N.st(N.remote(flag, right)[0], T.uint64(1), sem="relaxed" if without == "release" else "release")
        while N.ld(flag[0], sem="relaxed" if without == "acquire" else "acquire") == T.uint64(0):
            pass
        out[0] = T.cast(N.ld(flag[1]), "float32")


@T.macro
def _dekker(x, y, flag, out, tx, without):
    """Each raises its flag at the peer, and goes on alone if the peer's is down; `fence`: what keeps the load back."""
    right = (N.my_pe() + 1) % N.n_pes()
    if tx == 0:
        N.st(N.remote(flag, right)[0], T.uint64(1), sem="release")
        if without == "fence":
            N.fence()
        if without != "bare" and without != "fence":
            T.evaluate(T.call_extern("void", "__threadfence_system"))
        out[0] = T.cast(N.ld(flag[0], sem="acquire"), "float32")


@T.macro
def _peterson(x, y, flag, out, tx, without):
    """A lock of two ranks whose words are at rank 0: the flags, and who came last."""
    words = N.remote(flag, 0)
    me, other = N.my_pe(), 1 - N.my_pe()
    if tx == 0:
        N.st(words[me], T.uint64(1), sem="release")
        N.st(words[2], T.cast(me, "uint64"), sem="release")
        if without != "bare":
            T.evaluate(T.call_extern("void", "__threadfence_system"))
        while N.ld(words[other], sem="acquire") == T.uint64(1) and N.ld(words[2], sem="acquire") == T.cast(
            me, "uint64"
        ):
            pass
        out[0] = T.float32(1)
        N.st(words[me], T.uint64(0), sem="release")


@T.macro
def _replies(x, y, flag, out, tx, without):
    """Rank 0 stores a word, looks once at another one, and then tells rank 1, which stores to that one and reads the
    first."""
    words = N.remote(flag, 0)
    if tx == 0:
        if N.my_pe() == 0:
            N.st(words[0], T.uint64(7), sem="release")
            out[0] = T.cast(N.ld(words[1], sem="acquire"), "float32")
            N.st(words[2], T.uint64(1), sem="release")
        else:
            while N.ld(words[2], sem="acquire") == T.uint64(0):
                pass
            N.st(words[1], T.uint64(1), sem="release")
            out[0] = T.cast(N.ld(words[0], sem="acquire"), "float32")


@T.macro
def _extern(x, y, flag, out, tx, without):
    """A function that is given pointers."""
    if tx == 0:
        T.evaluate(T.call_extern("handle", "memcpy", T.address_of(y[0]), T.address_of(x[0]), 4))


BODIES = {
    "ring": _ring, "put_and_signal": _put_and_signal, "stream": _stream, "barrier": _barrier, "count": _count,
    "turns": _turns, "both_wait": _both_wait, "passes": _passes, "polls": _polls,
    "loads": _loads, "counter": _counter, "seqlock": _seqlock, "spins": _spins, "packed": _packed,
    "dekker": _dekker, "peterson": _peterson, "replies": _replies, "extern": _extern,
    "stuck": _stuck,
}  # fmt: skip


@tsn.jit
def kernel(name, without):
    body = BODIES[name]

    @T.prim_func
    def main(ctx: N.Context(), x: f32(M), y: f32(M), flag: u64(3), out: f32(M)):
        with T.Kernel(1, threads=M):
            body(x, y, flag, out, T.get_thread_binding(), without)

    return main


def _from_the_left(out):
    return (out == (tsn.rank() - 1) % tsn.size() + 1).all()


def _three_times(out):
    return (out == 3 * ((tsn.rank() - 1) % tsn.size() + 1)).all()


def _all_have_come(out):
    return tsn.rank() != 0 or out[0] == tsn.size()


def _one_write(out):
    return tsn.rank() == 0 or torch.equal(out[0].nan_to_num(), out[1].nan_to_num())


def _from_the_left_alone(out):
    return out[0] == (tsn.rank() - 1) % tsn.size() + 1


RIGHT = {
    "ring": _from_the_left, "put_and_signal": _from_the_left, "barrier": _from_the_left, "polls": _from_the_left,
    "stream": _three_times, "count": _all_have_come, "seqlock": _one_write, "counter": _from_the_left_alone,
    "loads": _from_the_left_alone,
}  # fmt: skip


def job(name, without=""):
    """The function that sets up a rank for a kernel, whole or without something."""

    def set_up():
        x, y, flag, out = tsn.empty((M,)), tsn.empty((M,)), tsn.zeros((3,), torch.uint64), torch.zeros(M)
        x.fill_(tsn.rank() + 1)
        made = kernel(name, without)
        right = RIGHT.get(name, lambda out: True) if without != "relaxed" else lambda out: True
        return lambda: made(x, y, flag, out), lambda: right(out)

    set_up.__name__ = name
    return set_up


ring, put_and_signal, stream, barrier, count, turns, both_wait, passes, polls, loads, counter, seqlock, spins = map(
    job, list(BODIES)[:-6]
)
packed, extern = job("packed"), job("extern")
poll_for_nothing, wrong_parity = job("stuck"), job("stuck", "parity")
dekker, dekker_fence, dekker_bare = job("dekker"), job("dekker", "fence"), job("dekker", "bare")
peterson, peterson_bare, replies = job("peterson"), job("peterson", "bare"), job("replies")
ring_without_wait = job("ring", "wait")
put_without_fence = job("put_and_signal", "fence")
stream_without_credit = job("stream", "credit")
barrier_without_quiet, barrier_without_barrier = job("barrier", "quiet"), job("barrier", "barrier")
count_wrong_number, counter_wrong_number = job("count", "number"), job("counter", "number")
loads_relaxed, does_not_end = job("loads", "relaxed"), job("spins", "long")
packed_relaxed_store, packed_relaxed_loads = job("packed", "release"), job("packed", "acquire")
seqlock_without_a_second_look = job("seqlock", "again")
waits_in_wrong_order, waits_by_wrong_comparison = job("both_wait", "order"), job("passes", "comparison")
