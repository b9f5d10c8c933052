"""Puts through the CPU proxy: blocking, with a quiet after each, or with one quiet at the end (NBI); and
signals behind them, ordered in three ways."""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N


@tsn.jit
def write(capacity):
    """Kernel `(dst, src, count, piece, pe, writes, blocking)`: write `count` bytes of `src` to `dst` on `pe`, `writes` times.

    Args:
        capacity: bytes of the symmetric uint8 tensors `dst` and `src`; `count` is at most that.

    Run-time arguments: `piece` is the number of bytes of one put, so that a write is ceil(count / piece) descriptors;
    `blocking` = 1 completes each write before the next begins, 0 completes all at the end. One thread writes all
    descriptors. The proxy chooses the number of network channels of a put.
    """

    @T.prim_func
    def main(
        ctx: N.Context(),
        dst: T.Tensor((capacity,), "uint8"),
        src: T.Tensor((capacity,), "uint8"),
        count: T.int64,
        piece: T.int64,
        pe: T.int32,
        writes: T.int32,
        blocking: T.int32,
    ):
        with T.Kernel(1, threads=32):
            N.benign_race(dst)  # writes put the same bytes to the same addresses
            if T.get_thread_binding() == 0:
                for _ in T.serial(writes):
                    for i in T.serial(T.ceildiv(count, piece)):
                        first = i * piece
                        N.put_thread(dst[first], src[first], pe, count=T.min(piece, count - first))
                    if blocking != 0:
                        N.quiet(pe)
                if blocking == 0:
                    N.quiet(pe)

    return main


@tsn.jit
def signals(capacity):
    """Kernel `(dst, src, counter, count, first_pe, n_pes, turns, ordering)`: in each turn, `count` bytes and a signal to
    each of the PEs `first_pe` … `first_pe + n_pes - 1`.

    Args:
        capacity: bytes of the symmetric uint8 tensors `dst` and `src`; `count` is at most that.

    Run-time arguments: the signal adds 1 to `counter` (one uint64, symmetric). `ordering` = 0: a put_signal, ordered behind
    its own data only; 1: behind all earlier puts to the PE, by a fence; 2: the same, by waiting for these puts, like a proxy
    that drains its queue at a fence. All is complete when the kernel ends. One thread does the work.
    """

    @T.prim_func
    def main(
        ctx: N.Context(),
        dst: T.Tensor((capacity,), "uint8"),
        src: T.Tensor((capacity,), "uint8"),
        counter: T.Tensor((1,), "uint64"),
        count: T.int64,
        first_pe: T.int32,
        n_pes: T.int32,
        turns: T.int32,
        ordering: T.int32,
    ):
        with T.Kernel(1, threads=32):
            N.benign_race(dst)  # every turn puts the same bytes to the same address
            if T.get_thread_binding() == 0:
                for _ in T.serial(turns):
                    for i in T.serial(n_pes):
                        pe = first_pe + i
                        if ordering == 0:
                            N.put_signal_thread(dst, src, pe, counter, 1, "add", count=count)
                        else:
                            N.put_thread(dst, src, pe, count=count)
                            if ordering == 1:
                                N.fence(pe)
                            else:
                                N.quiet(pe)
                            N.signal(counter, 1, pe, "add")
                N.quiet()

    return main
