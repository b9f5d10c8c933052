"""All-gather and all-to-all with equal splits over mapped memory, through registers: every warp moves rows of one PE's part.

A PE's peers may do the same by puts (`exchange`): blocks share a part in the same way, and tell each other the same.
"""

import tilelang.language as T

import tilescale_net.language as N

from .announcement import STATUS_WORDS, announce
from .exchange import await_room
from .partition import slice_elements
from .sum_of_peers import VECTOR_BYTES
from .vector_streams import LANES, UNROLL, WORDS, stream


def exchange_mapped(n_pes, threads, blocks, unroll=UNROLL, *, split, in_place=False):
    """Traced kernel as `exchange`, for PEs that are all mapped.

    Args:
        n_pes, threads, blocks, split: see `exchange`. `out` is [n_pes * count, 16 bytes as int32] and `x` [n_pes * count,
            16 bytes] (`split`) or [count, 16 bytes].
        unroll: see `stream`.
        in_place: `x` is `out[my_pe]` already.
    """
    rows, x_rows = T.dynamic("rows", "int64"), T.dynamic("x_rows", "int64")
    hops = n_pes - in_place  # the last one is this PE itself
    groups, warps = max(1, hops), threads // LANES

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((rows, WORDS), "int32"),
        x: T.Tensor((x_rows, WORDS), "int32"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        calls: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = calls[block] + T.uint64(1)
            count = rows // n_pes
            share = T.alloc_var("int64")
            share = slice_elements(count * VECTOR_BYTES, blocks, "uint8") // VECTOR_BYTES
            first = T.alloc_var("int64")
            first = share * block
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if first < count:
                same = T.alloc_var("int32")
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes)
                size = T.alloc_var("int64")
                size = T.min(share, count - first)
                # A warp has one PE; where there are fewer warps than PEs, one after the other.
                for turn in T.serial(-(-hops // warps)):
                    hop = thread // LANES % groups + turn * warps
                    pe = (me + hop + 1) % n_pes
                    if hop < hops and agrees[pe] != 0:
                        place = thread // LANES // groups * LANES + thread % LANES
                        step = (warps - thread // LANES % groups + groups - 1) // groups * LANES
                        start = pe * count if split else T.int64(0)
                        stream(N.remote(out, pe), me * count + first, x, start + first, size, place, step, unroll)
                T.sync_threads()
                if thread < n_pes and same != 0:
                    N.signal(arrived[me, block], call, thread, fence=True)
                    N.wait(arrived[thread, block], "ge", call)
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main
