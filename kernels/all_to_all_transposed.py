"""All-to-all that cuts one axis and joins another, as sequence parallelism (Ulysses) needs it: heads for sequence and back.

A message is a box of the input and a box of the output, so that no copy reorders anything before or after. Parts of the
earlier axis may differ in length, and of the later one a call may move a chunk.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from .collective import STATUS_WORDS, Collective, all_agree, announce
from .exchange import await_room
from .launches import Form, Launch


@tsn.macro
def copy_arrived(result, out, starts, joins_rows, batches, column, size, width, block, blocks, pe, me, n_pes, unroll):
    """Copy what this block of PE `pe` has put to `out`. By a block."""
    first_row = starts[pe] if joins_rows else starts[me]
    rows = (starts[pe + 1] if joins_rows else starts[me + 1]) - first_row
    first = rows * block // blocks
    end = rows * (block + 1) // blocks
    if first < end:
        for batch in T.serial(batches):
            at = batch * starts[n_pes] + first_row + first if joins_rows else batch * rows + first
            left = 0 if joins_rows else pe * width + column
            N.get_block(
                result[at : at + (end - first), left : left + size],
                out[at : at + (end - first), left : left + size],
                me,
                unroll=unroll,
            )


@tsn.jit(name="all_to_all_transposed")
def all_to_all_transposed(n_pes, joins_rows, threads=512, blocks=16, unroll=None, copies=False):
    """Kernel `(out, x, result, starts, batches, column, tag, status, calls, ready, arrived)` on rows of bytes; every PE gets a
    box of each batch from every PE.

    Args:
        n_pes: number of PEs, at most `threads`.
        joins_rows: `x` is [batches * rows of this PE, n_pes * width], and of each batch PE p gets `size` bytes from p * width +
            column of each row, which become the rows starts[me] … of its `out` [batches * rows of all PEs, size]. Otherwise the
            reverse: `x` is [batches * rows of all PEs, size], and PE p gets the rows starts[p] …, which become `size` bytes from
            me * width + column of each row of its `out` [batches * rows of PE p, n_pes * width].
        threads, blocks: launch geometry; all blocks must be able to run at once.
        unroll: see `tilescale_net.language.put_block`.
        copies: `result`, any memory with the rows that `out` has on this PE, becomes what `out` is, which is scratch. A block
            copies what a PE sent while its own puts to the next one are in flight, which hides the copy. Else there is no
            `result`.

    `starts` (int64 [n_pes + 1]) has the first of each PE's rows among those of all, and their number at the end. `out` is
    symmetric, and given with as many rows as the PE with the most has; `calls`, `ready` and `arrived` as in `exchange`. `tag`
    stands for what must be equal on all PEs; where it is not, nothing moves, and what differs is reported to `status` (int64
    [STATUS_WORDS]), see `collective.call_word`.
    """
    out_rows, out_pitch, x_rows, x_pitch, result_rows = (
        T.dynamic(name, "int64") for name in ("out_rows", "out_pitch", "x_rows", "x_pitch", "result_rows")
    )

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((out_rows, out_pitch), "uint8"),
        x: T.Tensor((x_rows, x_pitch), "uint8"),
        result: T.Tensor((result_rows, out_pitch), "uint8") if copies else None,
        starts: T.Tensor((n_pes + 1,), "int64"),
        batches: T.int64,
        column: T.int64,
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
            size = out_pitch if joins_rows else x_pitch
            width = (x_pitch if joins_rows else out_pitch) // n_pes
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            same = T.alloc_var("int32")
            same = 1
            await_room(agrees, same, ready, call, tag, status, block, thread, n_pes)
            agreed = T.alloc_var("int32")
            all_agree(agreed, agrees, n_pes)
            moved = T.alloc_var("int64")
            moved = T.if_then_else(agreed != 0, batches, T.int64(0))
            # Variables: the compiler shall not make several loops of this one, nor compute a remainder in an index.
            puts = T.alloc_var("int32")
            puts = n_pes
            came_from = T.alloc_var("int32")
            for hop in T.serial(n_pes + 1 if copies else n_pes):
                if hop < puts:
                    # Blocks begin with different PEs, so that what stays here holds up nothing that leaves.
                    pe = (me + hop + block) % n_pes
                    first_row = starts[me] if joins_rows else starts[pe]
                    rows = (starts[me + 1] if joins_rows else starts[pe + 1]) - first_row
                    first = rows * block // blocks
                    end = rows * (block + 1) // blocks
                    if first < end:
                        for batch in T.serial(moved):
                            wide = batch * rows + first  # of the side whose rows are n_pes parts wide
                            narrow = batch * starts[n_pes] + first_row + first
                            if joins_rows:
                                N.put_block(
                                    out[narrow : narrow + (end - first), 0:size],
                                    x[wide : wide + (end - first), pe * width + column : pe * width + column + size],
                                    pe, unroll=unroll,
                                )  # fmt: skip
                            else:
                                N.put_block(
                                    out[wide : wide + (end - first), me * width + column : me * width + column + size],
                                    x[narrow : narrow + (end - first), 0:size],
                                    pe, unroll=unroll,
                                )  # fmt: skip
                if copies and agreed != 0:
                    # While the links still carry what was put.
                    if hop + puts > n_pes:
                        came_from = (me + n_pes - (hop + n_pes - 1 + block) % n_pes) % n_pes
                        if thread == 0:
                            N.wait(arrived[came_from, block], "ge", call)
                        T.sync_threads()
                        copy_arrived(
                            result, out, starts, joins_rows, moved, column, size, width, block, blocks, came_from, me, n_pes, unroll
                        )  # fmt: skip
                    T.sync_threads()
                    if thread == 0 and hop < puts:
                        N.signal(arrived[me, block], call, (me + hop + block) % n_pes, fence=True)
            T.sync_threads()
            if thread < n_pes and agreed != 0:
                if not copies:
                    N.signal(arrived[me, block], call, thread, fence=True)
                    N.wait(arrived[thread, block], "ge", call)
                N.quiet(thread)
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main


# Bytes of a result from which it is copied along; a smaller one is copied behind the kernel. Four H100s: 8 MiB 43.6 us along,
# 37.9 behind it; 32 MiB 103 and 113.
ALONG_FROM = 16 << 20
# As many push fastest when all PEs send at once; in the simulator, where times mean nothing, each one costs.
BLOCKS, SIMULATED_BLOCKS = 64, 16


def checked_lengths(name: str, lengths: Sequence[int], n_pes: int) -> list[int]:
    """Lengths of the parts of all PEs; TypeError or ValueError, in the name of the collective, for what is none."""
    try:
        parts = [operator.index(length) for length in lengths]
    except TypeError:
        raise TypeError(f"{name}: lengths is {lengths!r}; it must be whole numbers") from None
    if len(parts) != n_pes or min(parts) < 0:
        raise ValueError(f"{name}: lengths is {parts}; it must have a number of 0 or more for each of {n_pes} PEs")
    return parts


class AllToAllTransposed(Collective):
    """All-to-all that cuts one axis and joins another; constructed and called by all ranks.

    Args:
        threads: see `Collective`.
        blocks: see `Collective`; None: 64, and 16 in the simulator.
        unroll: see `put_block`.
        group: whose ranks these are; see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry that the kernel or the GPU cannot run.
        RankMismatch: ranks that want different ones.
    """

    def __init__(
        self, *, threads: int = 512, blocks: int | None = None, unroll: int | None = None, group: "tsn.Group" = None
    ) -> None:
        if blocks is None:
            blocks = BLOCKS if tsn.world(group).device_kind == "cuda" else SIMULATED_BLOCKS
        super().__init__("AllToAllTransposed", f"unroll={unroll}", threads, blocks, group)
        self._options = dict(threads=threads, blocks=blocks, unroll=unroll)
        self._words = dict(
            calls=self.counters(blocks), ready=self._signals(self.n_pes), arrived=self._signals(self.n_pes, blocks)
        )
        self._heap = self._world.heap.as_bytes()
        self._starts: dict[tuple[int, ...], torch.Tensor] = {}  # by lengths

    @named("tilescale_net.AllToAllTransposed")
    def __call__(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        cut: int,
        join: int,
        *,
        lengths: Sequence[int] | None = None,
        chunk: tuple[int, int] = (0, 1),
        result: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The p-th part of `x` along axis `cut` goes to PE p, and parts are joined along axis `join` in the order of the
        PEs; asynchronous on the current stream.

        From a part of the sequence with all heads to the whole sequence with a part of the heads, of tensors [batch,
        sequence, heads, dim]: `op(out, x, cut=2, join=1)`; back: `op(out, x, cut=1, join=2)`.

        Args:
            out: symmetric, contiguous, of x's dtype; its shape is that of `x` with axis `cut` divided, and axis `join`
                multiplied, by the number of PEs; with `lengths` and `chunk` as they say.
            x: contiguous, of the same shape on all ranks but for `lengths`, apart from `out` in memory. Symmetric where some PEs
                are on other nodes.
            cut, join: two axes; negative ones count from the end.
            lengths: number of elements of each PE's part of the earlier of the two axes, equal on all ranks; 0 or more. Without
                them parts are equal.
            chunk: (c, count): of each PE's part of the later axis only the c-th of `count` equal parts moves, to or from a tensor
                that has no more of this axis. So a result of all heads can be made, and used, chunk by chunk.
            result: like `out`, in any memory, apart from `out` and `x`; becomes what `out` would be, of 16 MiB and more while
                parts still arrive, and `out` is scratch. For all of the axis: chunk (0, 1).

        Returns:
            `out`, or `result`. Later work on the stream may write `x` again.

        Raises:
            TypeError, ValueError, HeapError: an argument that does not fit, by name; nothing was sent.
            RankMismatch: ranks that pass different ones: nothing moves. Raised at once where they are new, else by the next
                call or `check`.
        """
        self._begin()
        tensors = (out, x) if result is None else (out, x, result)
        key = None
        if lengths is None:
            key = self._key(out, x, cut, join, chunk, None if result is None else self._kind_of(result, out, x))
        if self._made_again(key, *tensors):
            return tensors[-1] if result is not None else out
        self._check("out", out, symmetric=True)
        self._check("x", x, out.dtype, symmetric=self.needs_symmetric_source)
        cut, join = self._axis("cut", cut, x), self._axis("join", join, x)
        if cut == join:
            raise ValueError(f"{self.name}: cut and join are both axis {cut}; they must be two axes")
        parts = self._parts(x, cut, join, lengths)
        self._check_shapes(out, x, cut, join, parts, chunk)
        self._check_apart("out", out, "x", x)
        if result is not None:
            self._check("result", result, out.dtype)
            if result.shape != out.shape or chunk != (0, 1):
                raise ValueError(
                    f"{self.name}: result has shape {list(result.shape)} and chunk is {chunk}; it must be that of out, "
                    f"{list(out.shape)}, and the chunk (0, 1)"
                )
            self._check_apart("result", result, "out", out)
            self._check_apart("result", result, "x", x)
        place, shape = self._place_of(out), list(x.shape)
        if lengths is not None:
            shape[min(cut, join)] = -1
        noted = (
            "x of shape {} and {}, cut {}, join {}, lengths {}, chunk {}, out at heap offset {}",
            tuple(shape), x.dtype, cut, join, None if lengths is None else tuple(parts), chunk, place,
        )  # fmt: skip
        tag = self._agree(*noted)
        if sum(parts) * math.prod(shape[: min(cut, join)]) * math.prod(shape[min(cut, join) + 1 :]):
            call = cut, join, parts, chunk, place, tag
            if result is not None and result.nbytes < ALONG_FROM:
                again = self._launch_and_copy(out, x, result, *call)
            else:
                again = self._launch(out, x, result, *call)
            if key is not None:
                self._again[key] = noted, again
        return out if result is None else result

    @staticmethod
    def _kind_of(result: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> Hashable:
        """What the checks and the launch of a call depend on, of `result`."""
        if type(result) is not torch.Tensor or result.device != out.device or not result.is_contiguous():
            return False, id(result)
        first, end = result.data_ptr(), result.data_ptr() + result.nbytes
        overlaps = any(first < t.data_ptr() + t.nbytes and t.data_ptr() < end for t in (out, x))
        return result.shape, result.dtype, first & 15, overlaps, result.is_neg() or result.is_conj()

    def _launch(
        self, out: torch.Tensor, x: torch.Tensor, result: torch.Tensor | None, cut: int, join: int, parts: list[int], chunk: tuple[int, int], place: int, tag: int
    ) -> Callable[..., None]:  # fmt: skip
        joins_rows, (early, late) = join < cut, sorted((cut, join))
        middle = math.prod(x.shape[early + 1 : late])
        size = math.prod((out if joins_rows else x).shape[late:]) * x.element_size()
        wide = size * chunk[1] * self.n_pes
        batches = math.prod(x.shape[:early])
        out_pitch, x_pitch = (size, wide) if joins_rows else (wide, size)
        extents = (middle, *parts)
        starts = self._starts.get(extents)
        if starts is None:
            with torch.inference_mode(False):
                sums = itertools.accumulate((middle * part for part in parts), initial=0)
                starts = self._starts[extents] = torch.tensor(list(sums), dtype=torch.int64, device=self.device)
        if not joins_rows and len(set(parts)) > 1:
            # Peers have more rows; an empty tensor has no address.
            out = self._heap[place : place + batches * max(parts) * middle * out_pitch]
        if not x.numel():
            x = self._heap[:x_pitch]
        tensors: tuple[torch.Tensor, ...] = out, x
        if copies := result is not None:
            tensors = out, x, result if result.numel() else self._heap[:out_pitch]

        def make() -> Launch:
            forms: dict[str, Form] = {"out": ((-1, out_pitch), torch.uint8), "x": ((-1, x_pitch), torch.uint8)}
            given: tuple[str, ...] = "starts", "batches", "column", "tag", "out", "x"
            if copies:
                given, forms["result"] = (*given, "result"), ((-1, out_pitch), torch.uint8)
            fixed = {"status": self.status_record, **self._words}
            return Launch(
                all_to_all_transposed(self.n_pes, joins_rows, **self._options, copies=copies),
                fixed, given, self._world, forms=forms,
            )  # fmt: skip

        launch = self.prepared((joins_rows, out_pitch, x_pitch, copies), make)
        again = functools.partial(launch, starts, batches, chunk[0] * size, tag)
        self._launch_checked(again, *tensors)
        return again

    def _launch_and_copy(
        self, out: torch.Tensor, x: torch.Tensor, result: torch.Tensor, *call: Any
    ) -> Callable[..., None]:
        launch = self._launch(out, x, None, *call)
        result.copy_(out)

        def again(out: torch.Tensor, x: torch.Tensor, result: torch.Tensor) -> None:
            launch(out, x)
            result.copy_(out)

        return again

    def _parts(self, x: torch.Tensor, cut: int, join: int, lengths: Sequence[int] | None) -> list[int]:
        """The number of elements of every PE's part of the earlier axis."""
        early = min(cut, join)
        if lengths is None:
            if early == cut and x.shape[cut] % self.n_pes:
                raise self._not_cut(x, cut, self.n_pes)
            return [x.shape[early] // (self.n_pes if early == cut else 1)] * self.n_pes
        parts = checked_lengths(self.name, lengths, self.n_pes)
        wanted = sum(parts) if early == cut else parts[self.rank]
        if x.shape[early] != wanted:
            raise ValueError(
                f"{self.name}: axis {early} of x of shape {list(x.shape)} has {x.shape[early]} elements; with lengths {parts} it "
                f"must have {wanted} on rank {self.rank}"
            )
        return parts

    def _check_shapes(
        self, out: torch.Tensor, x: torch.Tensor, cut: int, join: int, parts: list[int], chunk: tuple[int, int]
    ) -> None:
        if not (
            isinstance(chunk, tuple)
            and len(chunk) == 2
            and all(type(n) is int for n in chunk)
            and 0 <= chunk[0] < chunk[1]
        ):
            raise ValueError(f"{self.name}: chunk is {chunk!r}; it must be (c, count), with c from 0 to count - 1")
        shape, joins_rows = list(x.shape), join < cut
        of_all = self.n_pes * chunk[1]
        if joins_rows and x.shape[cut] % of_all:
            raise self._not_cut(x, cut, of_all)
        shape[cut] = x.shape[cut] // of_all if joins_rows else parts[self.rank]
        shape[join] = sum(parts) if joins_rows else x.shape[join] * of_all
        if list(out.shape) != shape:
            raise ValueError(
                f"{self.name}: out has shape {list(out.shape)}; for x of shape {list(x.shape)} it is {shape}"
            )

    def _not_cut(self, x: torch.Tensor, cut: int, parts: int) -> ValueError:
        chunks = f" in {parts // self.n_pes} chunks" if parts > self.n_pes else ""
        return ValueError(
            f"{self.name}: axis {cut} of x of shape {list(x.shape)} is cut among {self.n_pes} PEs{chunks}, of which it is no "
            "multiple"
        )

    def _place_of(self, out: torch.Tensor) -> int:
        """Heap offset, of a tensor without elements too, to which peers with more rows refer."""
        place: int = (
            out.untyped_storage().data_ptr() + int(out.storage_offset()) * out.element_size() - self._world.heap.base
        )
        if not 0 <= place <= self._world.heap.size:
            raise tsn.HeapError(
                f"{self.name}: out of shape {list(out.shape)} is not in the symmetric heap; make it with tilescale_net.empty or zeros"
            )
        return place

    def _axis(self, name: str, axis: int, x: torch.Tensor) -> int:
        if isinstance(axis, bool) or not isinstance(axis, int) or not -x.dim() <= axis < x.dim():
            raise ValueError(f"{self.name}: {name} is {axis!r}; x of shape {list(x.shape)} has {x.dim()} axes")
        return axis % x.dim()
