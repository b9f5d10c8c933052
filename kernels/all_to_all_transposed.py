"""All-to-all that cuts one axis and joins another, as sequence parallelism (Ulysses) needs it: heads for sequence and back.

A message is a box of the input and a box of the output, so that no copy reorders anything before or after.
"""

import math

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from .collective import STATUS_WORDS, Collective, all_agree, announce, as_bytes
from .exchange import await_room


@tsn.jit(name="all_to_all_transposed")
def all_to_all_transposed(n_pes, joins_rows, threads=512, blocks=16, unroll=None):
    """Kernel `(out, x, batches, tag, status, calls, ready, arrived)` on rows of bytes; every PE gets a box of `rows` rows, `width` bytes
    wide, of each batch from every PE.

    Args:
        n_pes: number of PEs, at most `threads`.
        joins_rows: `x` is [batches * rows, n_pes * width], and PE p gets the p-th columns, which become the rows
            me * rows … of its `out` [batches * n_pes * rows, width]. Otherwise the reverse: `x` is [batches * n_pes *
            rows, width], and PE p gets the p-th rows, which become the columns me * width … of its `out`.
        threads, blocks: launch geometry; all blocks must be able to run at once.
        unroll: see `tilescale_net.language.put_block`.

    `out` is symmetric; `calls`, `ready` and `arrived` as in `exchange`. `tag` stands for what must be equal on all PEs; where it is not, nothing moves, and what differs is reported to `status`
    (int64 [STATUS_WORDS]), see `collective.call_word`.
    """
    out_rows, out_pitch, x_rows, x_pitch = (
        T.dynamic(name, "int64") for name in ("out_rows", "out_pitch", "x_rows", "x_pitch")
    )

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((out_rows, out_pitch), "uint8"),
        x: T.Tensor((x_rows, x_pitch), "uint8"),
        batches: T.int64,
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
            rows = (x_rows if joins_rows else out_rows) // batches
            width = out_pitch if joins_rows else x_pitch
            share = T.ceildiv(rows, T.int64(blocks))
            first = share * block
            size = T.min(share, rows - first)
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if first < rows:
                same = T.alloc_var("int32")
                same = 1
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes)
                agreed = T.alloc_var("int32")
                all_agree(agreed, agrees, n_pes)
                moved = T.alloc_var("int64")
                moved = T.if_then_else(agreed != 0, batches, T.int64(0))
                for hop in T.serial(n_pes):
                    pe = (me + hop) % n_pes
                    for batch in T.serial(moved):
                        narrow = batch * rows + first  # of the side whose rows are n_pes boxes wide
                        if joins_rows:
                            to = (batch * n_pes + me) * rows + first
                            N.put_block(
                                out[to : to + size, 0:width],
                                x[narrow : narrow + size, pe * width : (pe + 1) * width],
                                pe, unroll=unroll,
                            )  # fmt: skip
                        else:
                            of = (batch * n_pes + pe) * rows + first
                            N.put_block(
                                out[narrow : narrow + size, me * width : (me + 1) * width],
                                x[of : of + size, 0:width],
                                pe, unroll=unroll,
                            )  # fmt: skip
                T.sync_threads()
                if thread < n_pes and agreed != 0:
                    N.signal(arrived[me, block], call, thread, fence=True)
                    N.wait(arrived[thread, block], "ge", call)
                    N.quiet(thread)
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main


class AllToAllTransposed(Collective):
    """All-to-all that cuts one axis and joins another; constructed and called by all ranks.

    Args:
        threads, blocks: see `Collective`.
        unroll: see `put_block`.
        group: whose ranks these are; see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry that the kernel or the GPU cannot run.
        RankMismatch: ranks that want different ones.
    """

    def __init__(
        self, *, threads: int = 512, blocks: int = 16, unroll: int | None = None, group: "tsn.Group" = None
    ) -> None:
        super().__init__("AllToAllTransposed", f"unroll={unroll}", threads, blocks, group)
        self._options = dict(threads=threads, blocks=blocks, unroll=unroll)
        self._words = self.counters(blocks), self._signals(self.n_pes), self._signals(self.n_pes, blocks)

    @named("tilescale_net.AllToAllTransposed")
    def __call__(self, out: torch.Tensor, x: torch.Tensor, cut: int, join: int) -> torch.Tensor:
        """The p-th part of `x` along axis `cut` goes to PE p, and parts are joined along axis `join` in the order of the
        PEs; asynchronous on the current stream.

        From a part of the sequence with all heads to the whole sequence with a part of the heads, of tensors [batch,
        sequence, heads, dim]: `op(out, x, cut=2, join=1)`; back: `op(out, x, cut=1, join=2)`.

        Args:
            out: symmetric, contiguous, of x's dtype; its shape is that of `x` with axis `cut` divided, and axis `join`
                multiplied, by the number of PEs.
            x: contiguous, of the same shape on all ranks, apart from `out` in memory. Symmetric where some PEs are on
                other nodes.
            cut, join: two axes; negative ones count from the end.

        Returns:
            `out`. Later work on the stream may write `x` again.

        Raises:
            TypeError, ValueError, HeapError: an argument that does not fit, by name; nothing was sent.
            RankMismatch: ranks that pass different ones: nothing moves. Raised at once where they are new, else by the next
                call or `check`.
        """
        self._begin()
        self._check("out", out, symmetric=True)
        self._check("x", x, out.dtype, symmetric=self._needs_symmetric_source)
        cut, join = self._axis("cut", cut, x), self._axis("join", join, x)
        if cut == join:
            raise ValueError(f"{self.name}: cut and join are both axis {cut}; they must be two axes")
        if x.shape[cut] % self.n_pes:
            raise ValueError(
                f"{self.name}: axis {cut} of x of shape {list(x.shape)} is cut among {self.n_pes} PEs, of which it is no "
                "multiple"
            )
        shape = list(x.shape)
        shape[cut] //= self.n_pes
        shape[join] *= self.n_pes
        if list(out.shape) != shape:
            raise ValueError(
                f"{self.name}: out has shape {list(out.shape)}; for x of shape {list(x.shape)} it is {shape}"
            )
        self._check_apart("out", out, "x", x)
        tag = self._agree("x of shape {} and {}, cut {}, join {}, out at heap offset {}", x.shape, x.dtype, cut, join, self.place(out))  # fmt: skip
        if x.nbytes:
            self._launch_checked(lambda: self._launch(out, x, cut, join, tag))
        return out

    def _launch(self, out: torch.Tensor, x: torch.Tensor, cut: int, join: int, tag: int) -> None:
        joins_rows = join < cut
        batches = math.prod(x.shape[: min(cut, join)])
        # The side whose rows are one box wide; the other has rows of n_pes boxes.
        width = math.prod((out if joins_rows else x).shape[max(cut, join) :]) * x.element_size()
        wide = width * self.n_pes
        kernel = all_to_all_transposed(self.n_pes, joins_rows, **self._options)
        kernel(
            as_bytes(out, out.nbytes // (width if joins_rows else wide), width if joins_rows else wide),
            as_bytes(x, x.nbytes // (wide if joins_rows else width), wide if joins_rows else width),
            batches,
            tag,
            self.status_record,
            *self._words,
        )

    def _axis(self, name: str, axis: int, x: torch.Tensor) -> int:
        if isinstance(axis, bool) or not isinstance(axis, int) or not -x.dim() <= axis < x.dim():
            raise ValueError(f"{self.name}: {name} is {axis!r}; x of shape {list(x.shape)} has {x.dim()} axes")
        return axis % x.dim()
