"""Small kernels with one bug each that is reported where it happens, which ends the job, beside their right forms."""

import tilelang.language as T

import tilescale_net.language as N
from tests.simulator.seeded_bugs import ROUNDS, M, bug, receive, take


@bug()
def load_through_the_read_only_cache(right, x, y, flag, out, pe, block, tx, n):
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    N.wait_block(flag[0], "ge", 1)
    for i in T.serial(T.ceildiv(M, 128)):
        if i * 128 + tx < M:
            out[0, i * 128 + tx] = y[0, i * 128 + tx] if right else T.__ldg(y[0, i * 128 + tx])


@bug()
def range_in_the_next_tensor(right, x, y, flag, out, pe, block, tx, n):
    """`n` is M: M elements from element M of the last row on lie in the tensor allocated after y."""
    N.put_signal_block(y[0, 0] if right else y[ROUNDS - 1, n - 500], x[0, 0], pe, flag[0], 1, count=n)
    receive(out, y, flag, tx)


@bug()
def range_past_the_end(right, x, y, flag, out, pe, block, tx, n):
    N.put_signal_block(y[0, 0] if right else y[ROUNDS - 1, 0], x[0, 0], pe, flag[0], 1, count=n if right else n + 1)
    receive(out, y, flag, tx)


@bug()
def range_far_outside(right, x, y, flag, out, pe, block, tx, n):
    N.put_signal_block(y[0, 0] if right else y[n * 1000, 0], x[0, 0], pe, flag[0], 1, count=n)
    receive(out, y, flag, tx)


@bug()
def value_outside(right, x, y, flag, out, pe, block, tx, n):
    if tx == 0:
        N.put_value(y[0, n - 1 if right else n], x[0, 0], pe)
    N.quiet_block(pe)
    N.barrier_all()


@bug()
def wait_for_a_count_that_goes_on(right, x, y, flag, out, pe, block, tx, n):
    for r in T.serial(ROUNDS):
        N.put_signal_block(y[r, :], x[r, :], pe, flag[0], r + 1)
    for r in T.serial(ROUNDS):
        N.wait_block(flag[0], "ge" if right else "eq", r + 1)
        take(out, r, y, r, tx)


@bug()
def word_that_alternates(right, x, y, flag, out, pe, block, tx, n):
    """One word goes from 0 to 1 and back, and its sender waits for an answer each time, or does not."""
    for r in T.serial(ROUNDS):
        N.put_signal_block(y[0 if right else r, :], x[r, :], pe, flag[0], 1 - r % 2)
        N.wait_block(flag[0], "eq", 1 - r % 2)
        take(out, r, y, 0 if right else r, tx)
        if right:
            N.signal_block(flag[1], r + 1, pe)
            N.wait_block(flag[1], "ge", r + 1)


@bug()
def both_wait_first(right, x, y, flag, out, pe, block, tx, n):
    if not right:
        N.wait_block(flag[0], "ge", 1)
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    if right:
        N.wait_block(flag[0], "ge", 1)
    take(out, 0, y, 0, tx)


@bug()
def loop_of_plain_loads(right, x, y, flag, out, pe, block, tx, n):
    N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    if right:
        N.wait_block(flag[0], "ge", 1)
    while flag[0] < T.uint64(1):
        out[1, tx] = 0.0
    take(out, 0, y, 0, tx)


@bug()
def part_of_a_block_by_thread(right, x, y, flag, out, pe, block, tx, n):
    """The condition on the thread is known when the kernel is built."""
    if right or tx < 40:
        N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
    receive(out, y, flag, tx)


@bug()
def part_of_a_warp(right, x, y, flag, out, pe, block, tx, n):
    if tx < 32:
        if right or x[0, 0] + tx < x[0, 0] + n - M + 16:
            N.put_signal_warp(y[0, :], x[0, :], pe, flag[0], 1)
    T.sync_threads()
    receive(out, y, flag, tx)


@bug()
def peers_that_differ(right, x, y, flag, out, pe, block, tx, n):
    N.put_signal_block(y[0, :], x[0, :], pe if right else T.if_then_else(tx < 64, pe, 1 - pe), flag[0], 1)
    receive(out, y, flag, tx)


@bug()
def part_of_the_block(right, x, y, flag, out, pe, block, tx, n):
    """A condition on data, which is unknown when the kernel is built."""
    if right or x[0, 0] + tx < x[0, 0] + n - M + 64:
        N.put_signal_block(y[0, :], x[0, :], pe, flag[0], 1)
        receive(out, y, flag, tx)


# The row of the table, and kinds and text of what some rank raises. A report of the
# detector comes at the end of a kernel that came to its end in spite of the bug.
ENDS = {
    wait_for_a_count_that_goes_on: ("5", {"WaitTimeout": "seeded_errors.py:", "DataRace": "may go on to"}),
    word_that_alternates: ("5c", {"WaitTimeout": "seeded_errors.py:", "DataRace": "may go on to"}),
    load_through_the_read_only_cache: ("8b", {"KernelError": "__ldg"}),
    loop_of_plain_loads: ("8c", {"SimulatorDeadlock": "without N.ld or a wait", "DataRace": "N.wait or N.test"}),
    range_past_the_end: ("13", {"OutOfBounds": "y: "}),
    range_far_outside: ("13b", {"OutOfBounds": "y: "}),
    range_in_the_next_tensor: ("14", {"OutOfBounds": "y: "}),
    value_outside: ("14b", {"OutOfBounds": "y: "}),
    both_wait_first: ("15", {"WaitTimeout": "a deadlock: "}),
    part_of_a_block_by_thread: ("16", {"KernelError": "which holds for some threads of a block"}),
    part_of_the_block: ("16b", {"SimulatorDeadlock": "N.put_signal_block (seeded_errors.py:"}),
    part_of_a_warp: ("16c", {"SimulatorDeadlock": "N.put_signal_warp (seeded_errors.py:"}),
    peers_that_differ: ("16d", {"KernelError": "N.put_signal_block (seeded_errors.py:"}),
}
