"""Point to point: push and pull a buffer, and a ping-pong of put_signal.

The kernels move bytes, so one compiled kernel serves every size: the number of bytes, the peer and the number of loops are
run-time arguments; threads, blocks and the copy engine are compile-time choices.
"""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N

PARTITIONS = ("contiguous", "interleaved", "dynamic")
ALIGN = 128  # bytes; alignment of each block's part


def _transfer(copy, complete, capacity, threads, blocks, options, partition, chunk):
    """A kernel in which `blocks` blocks share one copy; `complete`: whether it ends with a quiet. Loops write the same bytes
    to the same addresses without waiting for each other, to measure the rate."""
    if partition not in PARTITIONS:
        raise ValueError(f"partition {partition!r} is not one of {', '.join(PARTITIONS)}")
    if chunk < ALIGN or chunk % ALIGN:
        raise ValueError(f"chunk is {chunk} bytes; it must be a positive multiple of {ALIGN}")

    dynamic, interleaved = partition == "dynamic", partition == "interleaved" and blocks > 1

    @T.prim_func
    def main(
        ctx: N.Context(),
        dst: T.Tensor((capacity,), "uint8"),
        src: T.Tensor((capacity,), "uint8"),
        work: T.Tensor((2,), "int32") if dynamic else None,
        count: T.int64,
        pe: T.int32,
        loops: T.int32,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            N.benign_race(dst)
            if dynamic:
                thread = T.get_thread_binding()
                ticket = T.alloc_shared((1,), "int32")
                chunks = T.ceildiv(count, T.int64(chunk))
                more = T.alloc_var("bool", True)
                while more:
                    if thread == 0:
                        ticket[0] = T.atomic_add(work[0], 1, return_prev=True)
                    T.sync_threads()
                    taken = T.alloc_var("int64", T.cast(ticket[0], "int64"))
                    T.sync_threads()
                    more = taken < chunks * loops
                    if more:
                        first = (taken % chunks) * T.int64(chunk)
                        copy(dst[first], src[first], pe, count=T.min(T.int64(chunk), count - first), **options)
                if thread == 0:
                    if complete:
                        N.quiet(pe)
                    # The last block resets the counters for the next launch, when all others have taken their tickets.
                    if T.atomic_add(work[1], 1, memory_order="acq_rel", return_prev=True) == blocks - 1:
                        work[0] = 0
                        work[1] = 0
            elif interleaved:
                for _ in T.serial(loops):
                    for turn in T.serial(T.ceildiv(count, T.int64(blocks * chunk))):
                        first = T.min((turn * blocks + block) * T.int64(chunk), count)
                        copy(dst[first], src[first], pe, count=T.min(T.int64(chunk), count - first), **options)
            else:
                part = T.ceildiv(count, T.int64(blocks * ALIGN)) * ALIGN
                first = T.min(part * block, count)
                for _ in T.serial(loops):
                    copy(dst[first], src[first], pe, count=T.min(part, count - first), **options)
            if complete and not dynamic:
                N.quiet_block(pe)

    return main


@tsn.jit
def push(capacity, threads=128, blocks=1, engine="auto", unroll=None, ring=None, partition="contiguous", chunk=1 << 20):
    """Kernel `(dst, src, count, pe, loops)`: push `count` bytes of `src` to `dst` on `pe`, `loops` times, then quiet.

    Args:
        capacity: bytes of both tensors, which are uint8 and symmetric; `count` is at most that.
        threads, blocks: launch geometry.
        engine, unroll, ring: see `tilescale_net.language.put_block`.
        partition: how blocks share the bytes: `contiguous` parts, `interleaved` chunks in turn, or `dynamic`: each block
            takes the next chunk when it is done with one. Blocks whose SMs share a port of the GPU's crossbar are slower,
            so equal shares leave stragglers; dynamic ones do not. A dynamic kernel has one more argument after `src`:
            `work`, two int32 in local memory, zero before and after the kernel.
        chunk: bytes of a chunk, a multiple of 128.
    """
    options = dict(engine=engine, unroll=unroll, ring=ring)
    return _transfer(N.put_block, True, capacity, threads, blocks, options, partition, chunk)


@tsn.jit
def pull(capacity, threads=128, blocks=1, engine="auto", unroll=None, ring=None, partition="contiguous", chunk=1 << 20):
    """Kernel `(dst, src, count, pe, loops)`: pull `count` bytes of `src` on `pe` into local `dst`, `loops` times.
    Arguments as in `push`."""
    options = dict(engine=engine, unroll=unroll, ring=ring)
    return _transfer(N.get_block, False, capacity, threads, blocks, options, partition, chunk)


@tsn.jit
def ping_pong(capacity, threads=128, engine="auto", unroll=None, ring=None):
    """Kernel `(dst, src, flag, count, pe, base, starts, loops)`: `loops` round trips of put_signal with `pe`, one block.

    Args:
        capacity: bytes of the symmetric uint8 tensors `dst` and `src`; `count` is at most that.
        threads, engine, unroll, ring: see `tilescale_net.language.put_signal_block`.

    Of the two PEs, the one with `starts` = 1 sends first. The signal values are base + 1 … base + loops, so `flag` (one
    uint64, symmetric) need not be cleared between launches that raise `base` by `loops`.
    """

    @T.prim_func
    def main(
        ctx: N.Context(),
        dst: T.Tensor((capacity,), "uint8"),
        src: T.Tensor((capacity,), "uint8"),
        flag: T.Tensor((1,), "uint64"),
        count: T.int64,
        pe: T.int32,
        base: T.int64,
        starts: T.int32,
        loops: T.int32,
    ):
        with T.Kernel(1, threads=threads):
            for i in T.serial(loops):
                if starts == 0:
                    N.wait_block(flag, "ge", base + i + 1)
                N.put_signal_block(
                    dst, src, pe, flag, base + i + 1, count=count, engine=engine, unroll=unroll, ring=ring
                )
                if starts != 0:
                    N.wait_block(flag, "ge", base + i + 1)

    return main


@tsn.jit
def meet():
    """Kernel `()`: a barrier of all PEs by one block; aligns ranks on the device."""

    @T.prim_func
    def main(ctx: N.Context()):
        with T.Kernel(1, threads=32):
            N.barrier_all()

    return main
