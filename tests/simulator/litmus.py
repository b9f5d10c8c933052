"""Small communicating kernels, each in a right form and in forms that leave one thing out.

Both ranks run the same kernel towards each other. `out` receives the data that the target saw; the right form always sees the data that
was sent. On real hardware the wrong forms pass nearly always.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tests.shorthand import f32, jitted, u64

COUNT = 5000  # float32; several pieces of a put


def _kernel(sender, blocks=1):
    """A kernel in which `sender` sends `src`, and the block then waits for the peer's and copies what has come."""

    @T.prim_func
    def kernel(
        ctx: N.Context(), src: f32(COUNT), dst: f32(COUNT), sig: u64(4), out: f32(COUNT), pe: T.int32, turn: T.int64
    ):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            sender(src, dst, sig, pe, T.cast(turn, "uint64"), tx)
            for i in T.serial(T.ceildiv(COUNT, 128)):
                if i * 128 + tx < COUNT:
                    out[i * 128 + tx] = dst[i * 128 + tx]

    return kernel


# How data are moved: `move(src, dst, pe, tx)`.
@T.macro
def _put(src, dst, pe, tx):
    N.put_block(dst, src, pe)


@T.macro
def _put_values(src, dst, pe, tx):
    for i in T.serial(T.ceildiv(COUNT, 128)):
        if i * 128 + tx < COUNT:
            N.put_value(dst[i * 128 + tx], src[i * 128 + tx], pe)


def _then_signal(move, fence=None):
    """Data, `fence(pe)`, and their signal."""

    @T.macro
    def sender(src, dst, sig, pe, turn, tx):
        move(src, dst, pe, tx)
        T.sync_threads()
        if tx == 0:
            if fence is not None:
                fence(pe)
            N.signal(sig[0], turn, pe)
        N.wait_block(sig[0], "ge", turn)

    return sender


def _in_halves(fence):
    """The fence orders the first half before the signal of the second."""

    @T.macro
    def sender(src, dst, sig, pe, turn, tx):
        half = COUNT // 2
        N.put_block(dst[0], src[0], pe, count=half)
        if fence:
            T.sync_threads()
            if tx == 0:
                N.fence(pe)
            T.sync_threads()
        N.put_signal_block(dst[half], src[half], pe, sig[0], turn, count=COUNT - half)
        N.wait_block(sig[0], "ge", turn)

    return sender


@T.macro
def _get_after_barrier(src, dst, sig, pe, turn, tx):
    N.barrier_all()
    N.get_block(dst, src, pe)


@T.macro
def _wait_by_one_thread(src, dst, sig, pe, turn, tx):
    """The other threads read without having waited."""
    N.put_signal_block(dst, src, pe, sig[0], turn)
    if tx == 0:
        N.wait(sig[0], "ge", turn)


# Others are in integration/test_order.py, for GPUs, too: a fence, quiet or wait alone, a source that is reused, views.
RIGHT = {
    "put_value, fence, signal": _then_signal(_put_values, N.fence),
    "put, fence, put_signal": _in_halves(fence=True),
    "get after a barrier": _get_after_barrier,
}
WRONG = {
    "no fence between put_value and signal": _then_signal(_put_values),
    "signal of another put": _in_halves(fence=False),
    "fence to another PE": _then_signal(_put, lambda pe: N.fence(1 - pe)),
    "wait by one thread": _wait_by_one_thread,
}


@tsn.jit
def kernel(name):
    return _kernel((RIGHT | WRONG)[name])


@tsn.jit
def signals_in_order(n):
    """n signals to one word: a waiter sees them in order, and the last value stays."""

    @T.prim_func
    def kernel(ctx: N.Context(), sig: u64(2), seen: u64(n), pe: T.int32):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                for i in T.serial(n):
                    N.signal(sig[0], T.cast(i + 1, "uint64"), pe)
                    N.signal(sig[1], T.uint64(1), pe, op="add")
                for i in T.serial(n):
                    seen[i] = N.wait(sig[0], "ge", T.cast(i + 1, "uint64"))
                N.wait(sig[1], "eq", T.uint64(n))

    return kernel


@jitted
def put_only(ctx: N.Context(), src: f32(COUNT), dst: f32(COUNT), pe: T.int32):
    with T.Kernel(1, threads=128):
        N.put_block(dst, src, pe)


def _transfer(call):
    """A macro that makes `call`, a primitive of one thread, in thread 7."""

    @T.macro
    def by_thread(a, b, sig, place, count, pe, tx):
        if tx == 7:
            call(a, b, sig, place, pe)

    return by_thread


def _by_block(call):
    """A macro that makes `call`, a primitive of a block."""

    @T.macro
    def by_block(a, b, sig, place, count, pe, tx):
        call(a, b, sig, place, count, pe)

    return by_block


@T.macro
def _store_to_view(a, b, sig, place, count, pe, tx):
    there = N.remote(b, pe)
    if tx == 7:
        there[place] = a[0]


TRANSFERS = {
    "put to": _by_block(lambda a, b, sig, place, n, pe: N.put_block(b[place], a[0], pe, count=n)),
    "put from": _by_block(lambda a, b, sig, place, n, pe: N.put_block(b[0], a[place], pe, count=n)),
    "put_signal": _by_block(lambda a, b, sig, at, n, pe: N.put_signal_block(b[at], a[0], pe, sig[0], 1, count=n)),
    "get from": _by_block(lambda a, b, sig, place, n, pe: N.get_block(a[0], b[place], pe, count=n)),
    "get to": _by_block(lambda a, b, sig, place, n, pe: N.get_block(a[place], b[0], pe, count=n)),
    "put_value": _transfer(lambda a, b, sig, place, pe: N.put_value(b[place], T.float32(1), pe)),
    "atomic": _transfer(lambda a, b, sig, place, pe: N.atomic_add(b[place], T.float32(1), pe)),
    "signal": _transfer(lambda a, b, sig, place, pe: N.signal(sig[place], T.uint64(1), pe)),
    "wait": _transfer(lambda a, b, sig, place, pe: N.wait(sig[place], "ge", T.uint64(0))),
    "view": _store_to_view,
}


# tilelang guards single accesses that it cannot prove to be inside; these are to be outside.
@tsn.jit(pass_configs={"tl.disable_safe_memory_legalize": True})
def transfer_range(operation, n):
    """A transfer whose range the caller chooses: for accesses outside of allocations."""
    transfer = TRANSFERS[operation]

    @T.prim_func
    def kernel(ctx: N.Context(), a: f32(n), b: f32(n), sig: u64(1), place: T.int64, count: T.int64, pe: T.int32):
        with T.Kernel(1, threads=64):
            transfer(a, b, sig, place, count, pe, T.get_thread_binding())

    return kernel


@tsn.jit
def wait_for_the_last_block(blocks):
    """Runs only where all blocks are resident."""

    @T.prim_func
    def kernel(ctx: N.Context(), sig: u64(1), pe: T.int32):
        with T.Kernel(blocks, threads=32) as b:
            if T.get_thread_binding() == 0:
                if b == blocks - 1:
                    N.signal(sig[0], T.uint64(1), pe)
                else:
                    N.wait(sig[0], "ge", T.uint64(1))

    return kernel
