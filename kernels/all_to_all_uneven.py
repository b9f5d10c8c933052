"""All-to-all by push with uneven splits.

The message with which a call begins holds, besides that the output may be overwritten, where in it the peer's rows belong
and how many are expected. So no PE needs more than the arguments of torch.distributed.all_to_all_single, and PEs that
disagree find out before any row moves. Its last word is the announcement of the call: a PE that makes another call at
this point has not written it, or has written another one.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N

from .announcement import STATUS_WORDS, TAG_BITS, report_other_call
from .partition import MIN_BYTES, slice_elements

# Words of the message between two PEs: where in the heap its sender wants the receiver's rows (in bytes), how many rows it
# expects there, how many it will send itself, and the announcement (see `announcement`). A PE whose own splits do not add up
# sends REFUSED instead of numbers.
PLACE, EXPECTED, SENDING, ANNOUNCED, WORDS = range(5)
REFUSED = -1
# What `differences[p]` holds: nothing wrong, or one of these with the rows here and the rows that PE p named.
OWN_SPLITS, SEND_DIFFERS, RECEIVE_DIFFERS = 1, 2, 3


@tsn.jit(name="all_to_all_uneven")
def all_to_all_uneven(n_pes, threads=512, blocks=16, engine="auto", unroll=None, ring=None, least_bytes=MIN_BYTES):
    """Kernel `(heap, x, out_place, out_rows, in_rows, row_bytes, receives, sends, tag, status, differences, outbox,
    inbox, calls, ready, arrived)`: rows to and from every PE.

    Args:
        n_pes, threads, blocks, engine, unroll, ring, least_bytes: as in `all_to_all`.

    `x` (uint8) holds `in_rows` rows of `row_bytes` bytes. The output has room for `out_rows` rows, `out_place` bytes
    behind the beginning of `heap`, which is the whole symmetric heap (uint8); it may lie elsewhere on every PE.
    `sends[p]` and `receives[p]` (int64 [n_pes]) are the rows that go to and come from PE p, in the order of the PEs;
    they must add up to `in_rows` and `out_rows`. `differences` (int64 [n_pes, 3]) stays zero unless splits do not fit: then
    no row moves between the two PEs, and both find the reason in `differences`. `tag` and `status` are as in `exchange`.
    `outbox` and `inbox` (int64 [n_pes, WORDS] and [2, n_pes, WORDS]) are symmetric; the signals are as in `all_to_all`.
    """
    heap_bytes, x_bytes = T.dynamic("heap_bytes", "int64"), T.dynamic("x_bytes", "int64")

    @T.macro
    def refuse(differences, pe, reason, here, there):
        if differences[pe, 0] == 0:
            differences[pe, 0] = reason
            differences[pe, 1] = here
            differences[pe, 2] = there

    @T.prim_func
    def main(
        ctx: N.Context(),
        heap: T.Tensor((heap_bytes,), "uint8"),
        x: T.Tensor((x_bytes,), "uint8"),
        out_place: T.int64,
        out_rows: T.int64,
        in_rows: T.int64,
        row_bytes: T.int64,
        receives: T.Tensor((n_pes,), "int64"),
        sends: T.Tensor((n_pes,), "int64"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        differences: T.Tensor((n_pes, 3), "int64"),
        outbox: T.Tensor((n_pes, WORDS), "int64"),
        inbox: T.Tensor((2, n_pes, WORDS), "int64"),
        calls: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = calls[block] + T.uint64(1)
            announcement = (call << T.uint64(TAG_BITS)) | T.cast(tag, "uint64")
            parity = T.cast(call % T.uint64(2), "int32")  # a fast peer writes into the other half already
            source = T.alloc_shared((n_pes,), "int64")  # where rows for each PE begin in `x`, in bytes
            target = T.alloc_shared((n_pes,), "int64")  # and where they go
            size = T.alloc_shared((n_pes,), "int64")  # bytes
            coming = T.alloc_local((1,), "int64")  # bytes that come from PE `thread`
            coming[0] = 0

            if thread < n_pes:
                before = T.alloc_local((2,), "int64")
                total = T.alloc_local((2,), "int64")
                least = T.alloc_local((1,), "int64")
                for i in T.unroll(2):
                    before[i] = 0
                    total[i] = 0
                least[0] = 0
                for p in T.serial(n_pes):
                    if p < thread:
                        before[0] += sends[p]
                        before[1] += receives[p]
                    total[0] += sends[p]
                    total[1] += receives[p]
                    least[0] = T.min(least[0], T.min(sends[p], receives[p]))
                valid = least[0] == 0 and total[0] == in_rows and total[1] == out_rows
                # One block signals the peers; work before this kernel on the stream is done with the output.
                if block == 0:
                    outbox[thread, PLACE] = out_place + before[1] * row_bytes
                    outbox[thread, EXPECTED] = T.if_then_else(valid, receives[thread], T.int64(REFUSED))
                    outbox[thread, SENDING] = T.if_then_else(valid, sends[thread], T.int64(REFUSED))
                    outbox[thread, ANNOUNCED] = T.cast(announcement, "int64")
                    N.put_signal_thread(
                        inbox[parity, me, 0], outbox[thread, 0], thread, ready[me], announcement, count=WORDS, unroll=2
                    )
                word = N.wait(ready[thread], "ge", call << T.uint64(TAG_BITS))
                announced = T.cast(inbox[parity, thread, ANNOUNCED], "uint64")
                same = announced == announcement
                may_send = valid and same and inbox[parity, thread, EXPECTED] == sends[thread]
                may_receive = valid and same and inbox[parity, thread, SENDING] == receives[thread]
                if block == 0:
                    if not same:
                        # A PE that has gone on has said more in `ready` since, but not in this half of `inbox`.
                        theirs = T.if_then_else(announced >> T.uint64(TAG_BITS) == call, announced, word)
                        report_other_call(status, thread, call, tag, theirs)
                    if not valid:
                        refuse(differences, thread, OWN_SPLITS, total[0], total[1])
                    if same and not may_send:
                        refuse(differences, thread, SEND_DIFFERS, sends[thread], inbox[parity, thread, EXPECTED])
                    if same and not may_receive:
                        refuse(differences, thread, RECEIVE_DIFFERS, receives[thread], inbox[parity, thread, SENDING])
                source[thread] = before[0] * row_bytes
                target[thread] = inbox[parity, thread, PLACE]
                size[thread] = T.if_then_else(may_send, sends[thread] * row_bytes, T.int64(0))
                coming[0] = T.if_then_else(may_receive, receives[thread] * row_bytes, T.int64(0))
            T.sync_threads()
            for hop in T.serial(n_pes):
                pe = (me + hop) % n_pes
                share = slice_elements(size[pe], blocks, "uint8", least_bytes)
                first = share * block
                if first < size[pe]:
                    N.put_block(
                        heap[target[pe] + first], x[source[pe] + first], pe, count=T.min(share, size[pe] - first),
                        engine=engine, unroll=unroll, ring=ring,
                    )  # fmt: skip
            # One fence for all peers, by a thread each: put_signal would wait for them one after the other.
            T.sync_threads()
            if thread < n_pes:
                if slice_elements(size[thread], blocks, "uint8", least_bytes) * block < size[thread]:
                    N.signal(arrived[me, block], call, thread, fence=True)
                if slice_elements(coming[0], blocks, "uint8", least_bytes) * block < coming[0]:
                    N.wait(arrived[thread, block], "ge", call)
                N.quiet(thread)
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main
