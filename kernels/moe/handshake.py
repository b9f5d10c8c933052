"""Begin and end of a call: announcements to every rank, tickets for its work, and the count of blocks that have sent.

The call number (uint64, from 1) lives in device memory: `calls[block]` is the number of calls so far. Its parity
selects between two sets of buffers, signals and tickets.
"""

from typing import Any, NamedTuple

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import TAG_BITS, announce, report
from tilescale_net.kernels.moe.layout import CODE_BITS, NO_FAULT, OTHER_OUTPUT

# Phases of a latency-mode kernel, bits of its argument `phases`.
SENDS, RECEIVES = 1, 2


class CallState(NamedTuple):
    """The call that a kernel makes, in variables of the kernel. `me`: int32, this rank. `call`: uint64, the call
    number. `parity`: int32, selects the set of buffers, signals and tickets."""

    me: Any
    call: Any
    parity: Any


class Chunk(NamedTuple):
    """The chunk of rows that a warp sends, in int32 variables of the kernel. `peer`: the receiving rank. `c`: the
    number of the chunk. `n`: its rows. `size`: rows of a chunk to this rank, in a combine that sends straight to
    ranks."""

    peer: Any
    c: Any
    n: Any
    size: Any = None


class Blocks(NamedTuple):
    """The blocks of a call, known when its kernel is compiled. `ranks`: of the job. blocks, threads: of the launch.
    `senders`: the number of blocks that send; they are the first. `absent`, `absent_senders`: how many more blocks, and
    senders among them, other calls have; block 0 counts for them."""

    ranks: int
    blocks: int
    threads: int
    senders: int
    absent: int = 0
    absent_senders: int = 0


class CompletionSignals(NamedTuple):
    """The words by which calls end. `active`: int32 [ranks], 0 for a rank that is left out. `done`: uint64 [ranks],
    symmetric: blocks of each rank that have sent everything, over all calls. `calls`: uint64 [blocks + absent], the
    calls so far."""

    active: Any
    done: Any
    calls: Any


@tsn.macro
def check_announcement(word, tag, rank, status):
    """Compare the tag in the call word of `rank` with this rank's; report the fault of `rank`, if it has one."""
    code = T.cast(word & T.uint64((1 << CODE_BITS) - 1), "int32")
    theirs = T.cast(word & T.uint64((1 << TAG_BITS) - 1), "int32")
    if tag & ((1 << CODE_BITS) - 1) == 0:
        if code != NO_FAULT:
            report(status, code, rank, 0)
        elif theirs != tag:
            report(status, OTHER_OUTPUT, rank, 0)


@tsn.macro
def open_call(ready, active, status, me, call, tag, block, senders, rank):
    """Begin a call with rank `rank`, by thread `rank` of every block; blocks that send wait until that rank has begun.
    `ready`: uint64 [ranks], symmetric. active: int32 [ranks]. status: int64 [STATUS_WORDS]. `call`: number of the call.
    tag: of this rank's call. senders: the number of blocks that send; they are the first."""
    word = T.alloc_var("uint64")
    if active[rank] != 0:
        if block == 0:
            announce(ready, me, call, tag, rank)
        if block < senders:
            word = N.wait(ready[rank], "ge", call << T.uint64(TAG_BITS))
            if block == 0:
                check_announcement(word, tag, rank, status)


@tsn.macro
def take_ticket(tickets, parity: T.Ref, kind, ahead: T.Ref, lane):
    """Lane 0 takes the warp's next ticket, which the other lanes get by a shuffle when they need it.

    Warps take the next chunk when they finish one: equal shares would take unequal time, because SMs share ports to the
    links. A ticket taken one chunk ahead has arrived when the warp needs it.

    Args:
        tickets: int32 [2, 2], by parity of the call and kind; those of the next call are zero.
        kind: 0 to send, 1 to receive.
    """
    if lane == 0:
        ahead = T.atomic_add(tickets[parity, kind], 1, return_prev=True)


@tsn.macro
def first_ticket(tickets, parity: T.Ref, kind, ahead: T.Ref, ticket: T.Ref, lane):
    """ticket = the warp's first one; see take_ticket."""
    take_ticket(tickets, parity, kind, ahead, lane)
    ticket = T.shfl_sync(ahead, 0)


@tsn.macro
def clear_tickets(tickets, parity: T.Ref, block, thread):
    """Reset the next call's tickets, which the previous call used."""
    if block == 0 and thread < 2:
        tickets[1 - parity, thread] = 0


@tsn.macro
def count_sender(done, active, me: T.Ref, thread, ranks):
    """Signal to every rank, one thread per rank, that another block of this rank has sent everything."""
    if thread < ranks:
        if active[thread] != 0:
            N.signal(done[me], 1, thread, op="add", fence=True)


@tsn.macro
def close_call(of, ends, me: T.Ref, call: T.Ref, block, thread):
    """End a call: block 0 waits until all blocks of all ranks have sent, so no signal of a call meets one of the next.
    `of`: the Blocks. ends: the CompletionSignals."""
    if of.absent:
        stand_in(of, ends, me, call, block, thread)
    if block == 0 and thread < of.ranks:
        if ends.active[thread] != 0:
            N.wait(ends.done[thread], "ge", call * T.uint64(of.senders))
    if thread == 0:
        # After this kernel the caller may overwrite the source, and the next call the staged rows.
        if block < of.senders:
            N.quiet()
        ends.calls[block] = call


@tsn.macro
def stand_in(of, ends, me: T.Ref, call: T.Ref, block, thread):
    """Block 0 counts for the `absent` blocks, which only larger calls have."""
    if block == 0:
        if of.absent_senders:
            if thread < of.ranks:
                if ends.active[thread] != 0:
                    N.signal(ends.done[me], of.absent_senders, thread, op="add")
        count_for(ends.calls, call, of.blocks, of.absent, thread, of.threads)


@tsn.macro
def count_for(calls, call: T.Ref, blocks, absent, thread, threads):
    """Raise the counts of `absent` blocks behind the first `blocks`."""
    for i in T.serial((absent + threads - 1) // threads):
        if i * threads + thread < absent:
            calls[blocks + i * threads + thread] = call


@tsn.macro
def begin_phase(calls, call: T.Ref, parity: T.Ref, block):
    """Latency mode: call = the number of this phase's call, parity = its set of buffers."""
    call = calls[block] + T.uint64(1)
    parity = T.cast(call & T.uint64(1), "int32")


@tsn.macro
def end_phase(calls, call: T.Ref, blocks, absent, block, thread, threads):
    """Count the call as done by this block; block 0 also counts for blocks that the call lacks."""
    if thread == 0:
        calls[block] = call
    if absent:
        if block == 0:
            count_for(calls, call, blocks, absent, thread, threads)


@tsn.macro
def sum_of(counts, total: T.Ref, n):
    """total = the sum of the first `n` of `counts`."""
    total = 0
    for r in T.serial(n):
        total = total + counts[r]


@tsn.macro
def find_source(counts, source: T.Ref, slot: T.Ref):
    """Turn index `slot` over all sources into `source` and the index `slot` within this source."""
    source = 0
    while slot >= counts[source]:
        slot = slot - counts[source]
        source = source + 1


@tsn.macro
def wait_timed(word, value, waited, rank):
    """`N.wait(word(), "ge", value)`; adds its clocks to `waited` (uint64 [ranks]) of `rank`. A timed wait precedes the
    untimed waits, which order later accesses."""
    began = T.alloc_var("uint64", T.call_extern("uint64", "clock64"))
    N.wait(word(), "ge", value)
    # The result is unused; tilelang has a 64-bit add only with a result.
    began = T.atomic_add(waited[rank], T.call_extern("uint64", "clock64") - began, return_prev=True)


@tsn.macro
def time_announcements(timed, begun, active, parity: T.Ref, call: T.Ref, bits, waited, block, thread, ranks):
    """Latency mode, if `timed`: block 0 waits until all ranks have begun the call, see `wait_timed`."""
    if timed:
        if block == 0 and thread < ranks:
            if active[thread] != 0:
                wait_timed(lambda: begun[parity * ranks + thread], call << T.uint64(bits), waited, thread)


@tsn.macro
def time_message(timed, arrived, index: T.Ref, call: T.Ref, waited, source: T.Ref, lane):
    """Latency mode, if `timed`: lane 0 waits for a message of `source`, or a forwarded one, see `wait_timed`."""
    if timed:
        if lane == 0:
            wait_timed(lambda: arrived[index], call, waited, source)


@tsn.macro
def await_previous(begun, parity: T.Ref, call: T.Ref, bits, rank, ranks):
    """Latency mode: wait until `rank` has begun the previous call; then its buffers of the call before that are free.
    `begun`: uint64 [2 * ranks], symmetric. parity: of call `call`. bits: that follow the call number in a word."""
    N.wait(begun[(1 - parity) * ranks + rank], "ge", (call - T.uint64(1)) << T.uint64(bits))
