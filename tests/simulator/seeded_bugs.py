"""Small kernels with one bug each, beside their right forms.

Each is wrong, or right with `right`; it runs on every rank towards the others with `x` to send and `out` to fill, and
the right form always fills it with what was sent. All words of `flag` are zero before a launch.
"""

import functools
from dataclasses import dataclass

import tilelang.language as T

import tilescale_net.language as N
from tests.shorthand import f32, u64

M = 1000  # float32
ROUNDS = 4


@dataclass(frozen=True)
class Case:
    """A kernel's body as a macro, and how it is launched. `rows`: rows of `out` that it fills, from the peer's x or its own."""

    body: object
    right: bool
    rows: tuple = (0,)
    blocks: int = 1
    own: bool = False


def bug(**how):
    """Decorator of a kernel's body, which makes `name(right)` a Case."""
    return lambda body: functools.wraps(body)(functools.partial(Case, T.macro(body), **how))


def kernel(case):
    body, right = case.body, case.right

    @T.prim_func
    def main(ctx: N.Context(), x: f32(ROUNDS, M), y: f32(ROUNDS, M), flag: u64(8), out: f32(ROUNDS, M), n: T.int32):
        with T.Kernel(case.blocks, threads=128) as block:
            tx = T.get_thread_binding()
            body(right, x, y, flag, out, 1 - N.my_pe(), block, tx, n)

    return main


@T.macro
def take(out, row, y, slot, tx):
    for i in T.serial(T.ceildiv(M, 128)):
        if i * 128 + tx < M:
            out[row, i * 128 + tx] = y[slot, i * 128 + tx]


@T.macro
def receive(out, y, flag, tx):
    N.wait_block(flag[0], "ge", 1)
    take(out, 0, y, 0, tx)


@bug()
def missing_wait(right, x, y, flag, out, pe, block, tx, n):
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    if right:
        N.wait_block(flag[0], "ge", 1)
    take(out, 0, y, 0, tx)


@bug()
def declared_race(right, x, y, flag, out, pe, block, tx, n):
    """The race of `missing_wait`, on purpose or not."""
    if right:
        N.benign_race(y)
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    take(out, 0, y, 0, tx)


@bug()
def missing_fence(right, x, y, flag, out, pe, block, tx, n):
    N.put_block(y[0, :], x[0, :], pe)
    T.sync_threads()
    if tx == 0:
        if right:
            N.fence(pe)
        N.signal(flag[0], 1, pe)
    receive(out, y, flag, tx)


@bug()
def source_reused(right, x, y, flag, out, pe, block, tx, n):
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    if right:
        N.quiet_block(pe)
    T.sync_threads()
    for i in T.serial(T.ceildiv(M, 128)):
        if i * 128 + tx < M:
            x[0, i * 128 + tx] = -1.0
    receive(out, y, flag, tx)


@T.macro
def _stream(ack, ordered, x, y, flag, out, pe, tx):
    """Rounds through one slot, with a credit returned after each, or not, and after all threads have read, or not."""
    for r in T.serial(ROUNDS):
        if ack:
            if r > 0:
                N.wait_block(flag[1], "ge", r)
        N.put_signal_block(y[0, :], x[r, :], pe, flag[0], r + 1)
        N.wait_block(flag[0], "ge", r + 1)
        take(out, r, y, 0, tx)
        if ordered:
            T.sync_threads()
        if ack:
            if tx == 0:
                N.signal(flag[1], r + 1, pe)


@bug(rows=tuple(range(ROUNDS)))
def missing_credit(right, x, y, flag, out, pe, block, tx, n):
    _stream(right, True, x, y, flag, out, pe, tx)


@bug(rows=tuple(range(ROUNDS)))
def early_credit(right, x, y, flag, out, pe, block, tx, n):
    _stream(True, right, x, y, flag, out, pe, tx)


@bug(rows=tuple(range(ROUNDS)))
def missing_barrier(right, x, y, flag, out, pe, block, tx, n):
    """Rounds through one slot that a barrier separates, once or twice in each."""
    for r in T.serial(ROUNDS):
        N.put_block(y[0, :], x[r, :], pe)
        N.quiet_block(pe)
        N.barrier_all()
        take(out, r, y, 0, tx)
        if right:
            N.barrier_all()


@bug()
def read_before_the_wait(right, x, y, flag, out, pe, block, tx, n):
    early = T.alloc_local((1,), "float32")
    if not right:
        early[0] = y[0, tx]
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    N.wait_block(flag[0], "ge", 1)
    if right:
        early[0] = y[0, tx]
    take(out, 0, y, 0, tx)
    out[0, tx] = early[0]


@bug(rows=(0, 1, 2))
def one_place_for_all_senders(right, x, y, flag, out, pe, block, tx, n):
    me = N.my_pe()
    for i in T.serial(1, 3):
        N.put_signal_block(y[me if right else 0, :], x[0, :], (me + i) % 3, flag[me], 1)
    for i in T.serial(1, 3):
        N.wait_block(flag[(me + i) % 3], "ge", 1)
        take(out, (me + i) % 3, y, (me + i) % 3 if right else 0, tx)


@bug(rows=(0, 1, 2))
def one_word_for_all_senders(right, x, y, flag, out, pe, block, tx, n):
    me = N.my_pe()
    for i in T.serial(1, 3):
        N.put_signal_block(y[me, :], x[0, :], (me + i) % 3, flag[me if right else 0], 1, op="add")
    for i in T.serial(1, 3):
        N.wait_block(flag[(me + i) % 3 if right else 0], "ge", 1 if right else i)
        take(out, (me + i) % 3, y, (me + i) % 3, tx)


@bug()
def one_thread_waits(right, x, y, flag, out, pe, block, tx, n):
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    if tx == 0:
        N.wait(flag[0], "ge", 1)
    if right:
        T.sync_threads()
    take(out, 0, y, 0, tx)


@bug(rows=(1,))
def wrong_slot(right, x, y, flag, out, pe, block, tx, n):
    """Two messages; the wait is for the word of the other one."""
    N.put_signal_block(y[1, :], x[1, :], pe, flag[1], 1)
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    N.wait_block(flag[1 if right else 0], "ge", 1)
    take(out, 1, y, 1, tx)
    N.wait_block(flag[0], "ge", 1)


@bug(own=True)
def get_of_a_put(right, x, y, flag, out, pe, block, tx, n):
    N.put_block(y[0, :], x[0, :], pe)
    if right:
        T.sync_threads()
        if tx == 0:
            N.quiet(pe)
        T.sync_threads()
    N.get_block(y[1, :], y[0, :], pe)
    take(out, 0, y, 1, tx)
    T.sync_threads()
    if tx == 0:
        N.quiet(pe)


@bug()
def fence_of_another_warp(right, x, y, flag, out, pe, block, tx, n):
    if tx < 32:
        N.put_warp(y[0, :], x[0, :], pe)
    if right:
        T.sync_threads()
    if tx == 32:
        N.fence(pe)
        N.signal(flag[0], 1, pe)
    receive(out, y, flag, tx)


@bug()
def fence_of_thread_0(right, x, y, flag, out, pe, block, tx, n):
    for i in T.serial(T.ceildiv(M, 128 * 8)):
        at = (i * 128 + tx) * 8
        if at < M:
            N.put_thread(y[0, at], x[0, at], pe, count=8)
    if right:
        T.sync_threads()
    if tx == 0:
        N.fence(pe)
        N.signal(flag[0], 1, pe)
    receive(out, y, flag, tx)


@bug()
def fence_beside_the_block(right, x, y, flag, out, pe, block, tx, n):
    """A put of a block, and a fence by a thread that does not know that the other warps have done their parts."""
    N.put_block(y[0, :], x[0, :], pe)
    if right:
        T.sync_threads()
    if tx == 0:
        N.signal(flag[0], 1, pe, fence=True)
    receive(out, y, flag, tx)


@bug(blocks=2)
def signal_of_another_block(right, x, y, flag, out, pe, block, tx, n):
    if block == 1:
        N.put_block(y[0, :], x[0, :], pe)
        T.sync_threads()
    if block == (1 if right else 0):
        if tx == 0:
            N.fence(pe)
            N.signal(flag[0], 1, pe)
    if block == 0:
        receive(out, y, flag, tx)


@bug()
def sends_what_another_warp_writes(right, x, y, flag, out, pe, block, tx, n):
    if tx >= 32:
        for i in T.serial(T.ceildiv(M, 96)):
            if i * 96 + tx - 32 < M:
                x[1, i * 96 + tx - 32] = x[0, i * 96 + tx - 32]
    if right:
        T.sync_threads()
    if tx < 32:
        N.put_signal_warp(y[0, :], x[1, :], pe, flag[0], 1)
    receive(out, y, flag, tx)


@bug()
def get_without_a_wait(right, x, y, flag, out, pe, block, tx, n):
    take(y, 1, x, 0, tx)
    T.sync_threads()
    if tx == 0:
        N.signal(flag[0], 1, pe)
    if right:
        N.wait_block(flag[0], "ge", 1)
    N.get_block(y[2, :], y[1, :], pe)
    take(out, 0, y, 2, tx)


@bug()
def set_and_add(right, x, y, flag, out, pe, block, tx, n):
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1, op="set")
    if tx == 0:
        N.signal(flag[1 if right else 0], 1, pe, op="add")
    receive(out, y, flag, tx)


@bug()
def store_to_a_signal_word(right, x, y, flag, out, pe, block, tx, n):
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    receive(out, y, flag, tx)
    if tx == 0:
        flag[1 if right else 0] = T.uint64(0)


# Wrong data, or reported at the end of the kernel: all of them run in one set of ranks. By name: the row of the table.
GOES_ON = {
    missing_wait: "1", missing_fence: "2", source_reused: "3", missing_credit: "4", missing_barrier: "6",
    one_thread_waits: "7", read_before_the_wait: "8a", wrong_slot: "10", get_of_a_put: "11", fence_of_another_warp: "12",
    fence_of_thread_0: "17", fence_beside_the_block: "17b", signal_of_another_block: "18", sends_what_another_warp_writes: "19", early_credit: "20",
    get_without_a_wait: "21", set_and_add: "22", store_to_a_signal_word: "23",
}  # fmt: skip
THREE_RANKS = {one_word_for_all_senders: "5b", one_place_for_all_senders: "9"}
# A sample of the bugs that the detector reports in every schedule.
RULES = (
    fence_of_another_warp, fence_of_thread_0, fence_beside_the_block, signal_of_another_block, sends_what_another_warp_writes, set_and_add,
    store_to_a_signal_word, missing_fence, source_reused, get_of_a_put, wrong_slot, read_before_the_wait,
)  # fmt: skip
