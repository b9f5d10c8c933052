"""All-gather by push: every PE puts its part into the same place of everybody's output.

A call begins by telling every peer that the output may be overwritten and ends when every peer's part has arrived, so
that calls follow one another without a barrier. Blocks share each part; block b waits for the blocks b of its peers.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.collective import Collective, as_bytes
from tilescale_net.kernels.slices import slice_elements


@tsn.jit(name="all_gather")
def all_gather(n_pes, dtype="uint8", threads=512, blocks=16, in_place=False, engine="auto", unroll=None, ring=None):
    """Kernel `(out, x, epochs, ready, arrived)`: afterwards `out[p]` is the `x` of PE p, for all p.

    Args:
        n_pes: number of PEs, at most `threads`.
        dtype: of `out` [n_pes, count] (symmetric) and `x` [count]; count is taken from the tensors.
        threads, blocks: launch geometry; all blocks must be able to run at once.
        in_place: `x` is `out[my_pe]` already.
        engine, unroll, ring: see `tilescale_net.language.put_block`.

    `epochs` [blocks] (any device memory), `ready` [n_pes] and `arrived` [n_pes, blocks] (symmetric) are uint64, zero
    before the first call, and then left alone.
    """
    count = T.dynamic("count", "int64")

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((n_pes, count), dtype),
        x: T.Tensor((count,), dtype),
        epochs: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            epoch = epochs[block] + T.uint64(1)
            share = slice_elements(count, blocks, dtype)
            first = share * block
            # Work before this kernel on the stream is done with `out`, so one block can say so for all.
            if block == 0 and thread < n_pes:
                N.signal(ready[me], epoch, thread)
            if first < count:
                if thread < n_pes:
                    N.wait(ready[thread], "ge", epoch)
                T.sync_threads()
                for hop in T.serial(1 if in_place else 0, n_pes):
                    N.put_block(
                        out[me, first], x[first], (me + hop) % n_pes, count=T.min(share, count - first),
                        engine=engine, unroll=unroll, ring=ring,
                    )  # fmt: skip
                # One fence for all peers, by a thread each: put_signal would wait for them one after the other.
                T.sync_threads()
                if thread < n_pes:
                    N.signal(arrived[me, block], epoch, thread, fence=True)
                    N.wait(arrived[thread, block], "ge", epoch)
                    N.quiet(thread)
            T.sync_threads()
            if thread == 0:
                epochs[block] = epoch

    return main


class AllGather(Collective):
    """All-gather of tensors of any dtype and size; constructed and called by all ranks.

    Args:
        threads, blocks, engine, unroll, ring: see the kernel.
        group: whose ranks these are; see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry that the kernel or the GPU cannot run.
        RankMismatch: ranks that want different ones.
    """

    def __init__(
        self,
        *,
        threads: int = 512,
        blocks: int = 16,
        engine: str = "auto",
        unroll: int | None = None,
        ring: tuple[int, int] | None = None,
        group: "tsn.Group" = None,
    ) -> None:
        super().__init__("AllGather", f"engine={engine}, unroll={unroll}, ring={ring}", threads, blocks, group)
        self._options = dict(threads=threads, blocks=blocks, engine=engine, unroll=unroll, ring=ring)
        self._epochs = self.counters(blocks)
        self._ready, self._arrived = self._signals(self.n_pes), self._signals(self.n_pes, blocks)

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`out[p]` becomes the `x` of PE p; asynchronous on the current stream.

        Args:
            out: symmetric, contiguous, [n_pes, *x.shape] or [n_pes * x.shape[0], *x.shape[1:]].
            x: contiguous, of out's dtype, of the same shape on all ranks; may be this PE's own part of `out`. Symmetric
                where some PEs are on other nodes.

        Returns:
            `out`. Later work on the stream may write `x` again.

        Raises:
            TypeError, ValueError, HeapError: an argument that does not fit, by name; nothing was sent.
            RankMismatch: ranks that pass different shapes or dtypes; seen when a shape is used for the first time.
        """
        self._begin()
        self._check("out", out, symmetric=True)
        self._check("x", x, out.dtype, symmetric=self._sources_travel)
        self._check_parts("out", out, "x", x)
        in_place = x.data_ptr() == out.data_ptr() + self.rank * x.nbytes
        if not in_place:
            self._check_apart("out", out, "x", x)
        self._agree("x of shape {} and {}, out at heap offset {}", x.shape, x.dtype, self.place(out))
        if x.nbytes:
            kernel = all_gather(self.n_pes, in_place=in_place, **self._options)
            flat = as_bytes(out, self.n_pes, x.nbytes), as_bytes(x, x.nbytes)
            kernel(*flat, self._epochs, self._ready, self._arrived)
        return out
