"""Writes that a CPU proxy makes for a GPU: blocking, with a quiet after each, or with one quiet at the end (NBI)."""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N


@tsn.jit
def write(capacity):
    """Kernel `(dst, src, count, piece, pe, writes, blocking)`: write `count` bytes of `src` to `dst` on `pe`, `writes` times.

    Args:
        capacity: bytes of the symmetric uint8 tensors `dst` and `src`; `count` is at most that.

    Run-time arguments: `piece` is the number of bytes of one put, so that a write is ceil(count / piece) descriptors;
    `blocking` = 1 completes each write before the next begins, 0 completes all of them at the end. One thread does the
    work: descriptors are all that it moves. How many network channels a put takes is the proxy's choice.
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
            N.benign_race(dst)  # writes put the same bytes to the same places
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
