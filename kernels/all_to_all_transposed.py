"""All-to-all that splits one axis and concatenates another, for sequence parallelism (Ulysses): heads for sequence and back.

A message is a box of the input and a box of the output, so no extra copy reorders elements. Parts of the earlier axis may
differ in length, and a call may move a chunk of the later axis.

Over mapped memory, parts of whole 16-byte vectors move through registers, as in exchange.py, and further blocks copy
arrived parts to a result in ordinary memory while others are in flight. A PE's peers may use puts for the same call.
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

from .collective import (
    EXPLICIT_SYNC,
    PIECE_BITS,
    STATUS_WORDS,
    Collective,
    all_agree,
    announce,
    count_call,
    is_aligned,
    piece_number,
)
from .exchange import BLOCKS, LANES, SIMULATED_BLOCKS, TILE_VECTORS, WORDS, await_room
from .launches import VECTORS, Form, Launch
from .sums import VECTOR_BYTES

# A signal's value for all pieces of a call, whatever their number.
ALL_PIECES = (1 << PIECE_BITS) - 1


@tsn.jit(name="all_to_all_transposed")
def all_to_all_transposed(n_pes, joins_rows, threads=512, blocks=16, unroll=None):
    """Kernel `(out, x, starts, batches, column, tag, status, calls, ready, arrived)` on rows of bytes; every PE receives a box
    of each batch from every PE.

    Args:
        n_pes: number of PEs, at most `threads`.
        joins_rows: `x` is [batches * rows of this PE, n_pes * width], `out` [batches * rows of all PEs, size]. PE p gets `size`
            bytes of each row, from p * width + column on, as the rows starts[me] … of each batch of its `out`. Otherwise the
            reverse: `x` is [batches * rows of all PEs, size], `out` [batches * rows of this PE, n_pes * width]. PE p gets the
            rows starts[p] … of each batch, as `size` bytes from me * width + column on of each row of its `out`.
        threads, blocks: launch geometry; all blocks must be able to run at once.
        unroll: see `tilescale_net.language.put_block`.

    `starts` (int64 [n_pes + 1]) has each PE's first row in the concatenation, and the number of all rows. `out` is
    symmetric, with the most rows of any PE. `calls` has [2 * blocks]; the others are as in `exchange`, but `arrived` counts
    pieces (`collective.piece_number`), which this kernel signals all at once.
    """
    out_rows, out_pitch, x_rows, x_pitch = (
        T.dynamic(name, "int64") for name in ("out_rows", "out_pitch", "x_rows", "x_pitch")
    )

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((out_rows, out_pitch), "uint8"),
        x: T.Tensor((x_rows, x_pitch), "uint8"),
        starts: T.Tensor((n_pes + 1,), "int64"),
        batches: T.int64,
        column: T.int64,
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        calls: T.Tensor((2 * blocks,), "uint64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            size = out_pitch if joins_rows else x_pitch
            width = (x_pitch if joins_rows else out_pitch) // n_pes
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            same = T.alloc_var("int32", 1)
            await_room(agrees, same, ready, call, tag, status, block, thread, n_pes)
            agreed = T.alloc_var("int32")
            all_agree(agreed, agrees, n_pes)
            moved = T.alloc_var("int64", T.if_then_else(agreed != 0, batches, T.int64(0)))
            for hop in T.serial(n_pes):
                # Blocks begin with different PEs, so that local copies do not delay sends.
                pe = (me + hop + block) % n_pes
                first_row = starts[me] if joins_rows else starts[pe]
                rows = (starts[me + 1] if joins_rows else starts[pe + 1]) - first_row
                first = rows * block // blocks
                end = rows * (block + 1) // blocks
                if first < end:
                    for batch in T.serial(moved):
                        wide = batch * rows + first  # first row in the tensor whose rows have n_pes parts
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
            T.sync_threads()
            if thread < n_pes and agreed != 0:
                every = piece_number(call, ALL_PIECES)
                N.signal(arrived[me, block], every, thread, fence=True)
                N.wait(arrived[thread, block], "ge", every)
                N.quiet(thread)
            T.sync_threads()
            count_call(calls, block, call, T.int64(blocks), thread, threads, 2 * blocks)

    return main


# ---------------------------------------------------------------------------------------------------------------------
# The same over mapped memory, in vectors of 16 bytes.


# Vectors per lane and step; with the offsets of boxes, more do not fit into registers.
UNROLL = 4


@tsn.macro
def move_tile(tile, memory, loads, first, pitch, at, size, width, flat, unroll):
    """tile[u] = vector at + u * LANES of a box, below `size`; without `loads`, the inverse. Each row of the box has `width`
    vectors of `memory` [vectors, WORDS] from first + row * pitch on. `flat`: pitch is width."""
    row, column = T.alloc_var("int32"), T.alloc_var("int32")
    row, column = 0, at
    for u in T.unroll(unroll):
        i = at + u * LANES
        if i < size:
            if not flat:
                if column >= width:  # mostly false for u > 0; a division takes as long as twenty additions
                    rows = T.cast(T.cast(column, "uint32") // T.cast(width, "uint32"), "int32")
                    row += rows
                    column -= rows * width
            source = first + i if flat else first + T.cast(row, "int64") * pitch + column
            if loads:
                for v in T.vectorized(WORDS):
                    tile[u, v] = memory[source, v]
            else:
                for v in T.vectorized(WORDS):
                    memory[source, v] = tile[u, v]
        column += LANES


@tsn.macro
def move_box(
    target, target_first, target_pitch, target_flat, source, source_first, source_pitch, source_flat, size, width, thread, step, unroll
):  # fmt: skip
    """Copy a box of `size` vectors, see `move_tile`; called by a set of warps, with `thread` and `step` as in
    `exchange.stream`."""
    even, odd = T.alloc_local((unroll, WORDS), "int32"), T.alloc_local((unroll, WORDS), "int32")
    i = T.alloc_var("int32", thread // LANES * (LANES * unroll) + thread % LANES)
    move_tile(even, source, True, source_first, source_pitch, i, size, width, source_flat, unroll)
    while i < size:
        move_tile(odd, source, True, source_first, source_pitch, i + step * unroll, size, width, source_flat, unroll)
        move_tile(even, target, False, target_first, target_pitch, i, size, width, target_flat, unroll)
        i += step * unroll
        move_tile(even, source, True, source_first, source_pitch, i + step * unroll, size, width, source_flat, unroll)
        move_tile(odd, target, False, target_first, target_pitch, i, size, width, target_flat, unroll)
        i += step * unroll


@tsn.jit(name="all_to_all_transposed_mapped", pass_configs=EXPLICIT_SYNC)
def all_to_all_transposed_mapped(n_pes, joins_rows, threads=512, blocks=64, unroll=UNROLL, copies=False):
    """Kernel `(out, x, result, starts, batches, column, size, width, pieces, tag, status, calls, ready, arrived)`, as
    `all_to_all_transposed`, for PEs that are all mapped, with `out`, `x` and `result` as [vectors, 16 bytes as int32].

    Args:
        n_pes, joins_rows, threads, blocks: as in `all_to_all_transposed`. unroll: see `exchange.stream`.
        copies: `result`, any memory with this PE's rows, gets the output, and `out` is scratch: `blocks` more blocks copy
            arrived rows. All blocks must be able to run at once.

    Numbers of vectors: `size` per row of the narrower tensor, `width` per PE's part of a row of the wider one, `column` from
    there to the moved columns. `pieces`, equal on all PEs: parts in which a block sends its rows, each with a signal.
    """
    out_vectors, x_vectors, result_vectors = (T.dynamic(f"{name}_vectors", "int64") for name in ("out", "x", "result"))
    warps = threads // LANES

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((out_vectors, WORDS), "int32"),
        x: T.Tensor((x_vectors, WORDS), "int32"),
        result: T.Tensor((result_vectors, WORDS), "int32") if copies else None,
        starts: T.Tensor((n_pes + 1,), "int64"),
        batches: T.int64,
        column: T.int64,
        size: T.int32,
        width: T.int64,
        pieces: T.int32,
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        calls: T.Tensor((2 * blocks,), "uint64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
    ):
        with T.Kernel(2 * blocks if copies else blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            # Sending blocks come first and tell the copying blocks whether PEs agree: a peer may finish the call, and
            # announce the next one, before the copying blocks compare tags.
            sends = block < blocks
            share = block % blocks
            agreed = T.alloc_var("int32")
            if sends:
                same = T.alloc_var("int32", 1)
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes)
                all_agree(agreed, agrees, n_pes)
                if copies and thread == 0:
                    N.signal(arrived[me, share], piece_number(call, T.if_then_else(agreed != 0, ALL_PIECES, 1)), me)
            elif copies:
                if thread == 0:
                    word = N.wait(arrived[me, share], "ge", piece_number(call, 1))
                    agrees[0] = T.cast(word == piece_number(call, ALL_PIECES), "int32")
                T.sync_threads()
                agreed = agrees[0]
            others = T.alloc_var(
                "int32", T.if_then_else(sends, n_pes, n_pes - 1)
            )  # a PE's own part goes directly to `result`
            if not copies:
                others = n_pes
            warp = thread // LANES
            begin = T.alloc_var("int64")
            end = T.alloc_var("int64")
            for piece in T.serial(T.if_then_else(agreed != 0, pieces, 0)):
                number = piece_number(call, T.if_then_else(piece + 1 < pieces, piece + 1, ALL_PIECES))
                # One PE per warp; several in turn if there are fewer warps than PEs.
                for turn in T.serial(-(-n_pes // warps)):
                    groups = T.max(others, 1)
                    hop = warp % groups + turn * warps
                    worker = warp // groups * LANES + thread % LANES
                    step = (warps - warp % groups + groups - 1) // groups * LANES
                    if hop < others:
                        pe = T.if_then_else(sends, me + hop + 1, me + n_pes - hop - 1) % n_pes
                        # The PE with fewer rows, which owns these rows.
                        owner = T.if_then_else(sends if joins_rows else block >= blocks, me, pe)
                        rows = starts[owner + 1] - starts[owner]
                        begin = rows * share // blocks
                        end = rows * (share + 1) // blocks
                        rows_here = end - begin
                        end = begin + rows_here * (piece + 1) // pieces
                        begin = begin + rows_here * piece // pieces
                        if copies and not sends:
                            N.wait_warp(arrived[pe, share], "ge", number)
                        for batch in T.serial(batches):
                            wide = (batch * rows + begin) * (n_pes * width) + column
                            narrow = (batch * starts[n_pes] + starts[owner] + begin) * size
                            vectors = T.cast((end - begin) * size, "int32")
                            if sends:
                                to = me * width + wide
                                of = pe * width + wide
                                if copies and pe == me:
                                    move_box(
                                        result, narrow if joins_rows else to, n_pes * width, joins_rows,
                                        x, of if joins_rows else narrow, n_pes * width, not joins_rows,
                                        vectors, size, worker, step, unroll,
                                    )  # fmt: skip
                                else:
                                    move_box(
                                        N.remote(out, pe), narrow if joins_rows else to, n_pes * width, joins_rows,
                                        x, of if joins_rows else narrow, n_pes * width, not joins_rows,
                                        vectors, size, worker, step, unroll,
                                    )  # fmt: skip
                            elif copies:
                                at = narrow if joins_rows else pe * width + wide
                                move_box(
                                    result, at, n_pes * width, joins_rows, out, at, n_pes * width, joins_rows,
                                    vectors, size, worker, step, unroll,
                                )  # fmt: skip
                if sends:
                    T.sync_threads()
                    if thread < n_pes and thread != me:
                        N.signal(arrived[me, share], number, thread, fence=True)
            if not copies:
                if thread < n_pes and thread != me and agreed != 0:
                    N.wait(arrived[thread, share], "ge", piece_number(call, ALL_PIECES))
            T.sync_threads()
            count_call(calls, block, call, T.int64(2 * blocks if copies else blocks), thread, threads, 2 * blocks)

    return main


# Bytes of a piece of a rank's result, and most pieces of a call: a piece is copied while the next one is sent.
PIECE_BYTES, MOST_PIECES = 16 << 20, 8


def checked_lengths(name: str, lengths: Sequence[int], n_pes: int) -> list[int]:
    """Lengths of the parts of all PEs. Raises TypeError or ValueError, with the collective's name."""
    try:
        parts = [operator.index(length) for length in lengths]
    except TypeError:
        raise TypeError(f"{name}: lengths is {lengths!r}; it must be whole numbers") from None
    if len(parts) != n_pes or min(parts) < 0:
        raise ValueError(f"{name}: lengths is {parts}; it must have a number of 0 or more for each of {n_pes} PEs")
    return parts


class AllToAllTransposed(Collective):
    """All-to-all that splits one axis and concatenates another; constructed and called by all ranks.

    Args:
        threads: see `Collective`.
        blocks: see `Collective`; None: 64, and 16 in the simulator.
        unroll: see `put_block`.
        group: the ranks; see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry that the kernel or the GPU cannot run.
        RankMismatch: ranks pass different arguments.
    """

    def __init__(
        self, *, threads: int = 512, blocks: int | None = None, unroll: int | None = None, group: "tsn.Group" = None
    ) -> None:
        if blocks is None:
            blocks = BLOCKS if tsn.world(group).device_kind == "cuda" else SIMULATED_BLOCKS
        super().__init__("AllToAllTransposed", f"unroll={unroll}", threads, blocks, group)
        self._options = dict(threads=threads, blocks=blocks, unroll=unroll)
        tile = max(1, min(unroll or UNROLL, 16, TILE_VECTORS // threads))
        self._mapped_options = dict(threads=threads, blocks=blocks, unroll=tile)
        self._words = dict(
            calls=self.counters(2 * blocks), ready=self._signals(self.n_pes), arrived=self._signals(self.n_pes, blocks)
        )
        self._heap = self._world.heap.as_bytes()
        self._starts: dict[tuple[int, ...], torch.Tensor] = {}  # by lengths

    @named("tilescale_net.AllToAllTransposed")
    def __call__(
        self, out: torch.Tensor, x: torch.Tensor, cut: int, join: int, *, lengths: Sequence[int] | None = None,
        chunk: tuple[int, int] = (0, 1), result: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The p-th part of `x` along axis `cut` goes to PE p, and parts are concatenated along axis `join` in the order of the
        PEs; asynchronous on the current stream.

        From a part of the sequence with all heads to the whole sequence with a part of the heads, of tensors [batch,
        sequence, heads, dim]: `op(out, x, cut=2, join=1)`; back: `op(out, x, cut=1, join=2)`.

        Args:
            out: symmetric, contiguous, of x's dtype; has the shape of `x` with axis `cut` divided, and axis `join`
                multiplied, by the number of PEs; or by `lengths` and `chunk`.
            x: contiguous, of the same shape on all ranks except for `lengths`, disjoint from `out`. Symmetric if some PEs are
                on other nodes.
            cut, join: two axes; negative ones count from the end.
            lengths: number of elements of each PE's part of the earlier of the two axes, equal on all ranks; 0 or more. By
                default parts are equal.
            chunk: (c, count): move only the c-th of `count` equal parts of each PE's part of the later axis, to or from a
                tensor of that size, for chunk-by-chunk computation.
            result: like `out`, in any memory, disjoint from `out` and `x`; gets the result, and `out` is scratch. It is
                copied while other parts arrive if all parts are whole vectors of 16 bytes. Excludes `chunk`.

        Returns:
            `out`, or `result`. Later work on the stream may overwrite `x`.

        Raises:
            TypeError, ValueError, HeapError: a wrong argument, by name; nothing was sent.
            RankMismatch: ranks pass different arguments: no data move. Raised at once for new arguments, else by the next
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
        offset, shape = self._offset_of(out), list(x.shape)
        if lengths is not None:
            shape[min(cut, join)] = -1
        noted = (
            "x of shape {} and {}, cut {}, join {}, lengths {}, chunk {}, out at heap offset {}",
            tuple(shape), x.dtype, cut, join, None if lengths is None else tuple(parts), chunk, offset,
        )  # fmt: skip
        tag = self._agree(*noted)
        if sum(parts) * math.prod(shape[: min(cut, join)]) * math.prod(shape[min(cut, join) + 1 :]):
            again = self._launch(out, x, result, cut, join, parts, chunk, offset, tag)
            if key is not None:
                self._again[key] = noted, again
        return out if result is None else result

    @staticmethod
    def _kind_of(result: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> Hashable:
        """The properties of `result` on which checks and launch depend."""
        if type(result) is not torch.Tensor or result.device != out.device or not result.is_contiguous():
            return False, id(result)
        first, end = result.data_ptr(), result.data_ptr() + result.nbytes
        overlaps = any(first < t.data_ptr() + t.nbytes and t.data_ptr() < end for t in (out, x))
        return result.shape, result.dtype, first & 15, overlaps, result.is_neg() or result.is_conj()

    def _launch(
        self, out: torch.Tensor, x: torch.Tensor, result: torch.Tensor | None, cut: int, join: int, parts: list[int],
        chunk: tuple[int, int], offset: int, tag: int,
    ) -> Callable[..., None]:  # fmt: skip
        joins_rows, (early, late) = join < cut, sorted((cut, join))
        middle = math.prod(x.shape[early + 1 : late])
        size = math.prod((out if joins_rows else x).shape[late:]) * x.element_size()
        wide = size * chunk[1] * self.n_pes
        batches = math.prod(x.shape[:early])
        out_pitch, x_pitch = (size, wide) if joins_rows else (wide, size)
        extents = (middle, *parts)
        starts_of = list(itertools.accumulate((middle * part for part in parts), initial=0))
        starts = self._starts.get(extents)
        if starts is None:
            with torch.inference_mode(False):
                starts = self._starts[extents] = torch.tensor(starts_of, dtype=torch.int64, device=self.device)
        caller_out, caller_x = out, x
        if not joins_rows and len(set(parts)) > 1:
            # Peers may have more rows; an empty tensor has no address.
            out = self._heap[offset : offset + batches * max(parts) * middle * out_pitch]
        if not x.numel():
            x = self._heap[:x_pitch]
        tensors: tuple[torch.Tensor, ...] = out, x
        if result is not None:
            tensors = out, x, result if result.numel() else self._heap[:out_pitch]
            if 2 * self.blocks > self.block_limit or not self._by_vectors(size, *tensors):
                return self._launch_and_copy(caller_out, caller_x, result, cut, join, parts, chunk, offset, tag)
        constants = {"status": self.status_record, **self._words}
        if self._by_vectors(size, *tensors):
            names = ("out", "x", "result")[: len(tensors)]
            nbytes = starts_of[-1] * batches * size  # of a result, with equal parts
            pieces = 1 if result is None else min(MOST_PIECES, 1 + nbytes // PIECE_BYTES)

            def make() -> Launch:
                kernel = all_to_all_transposed_mapped(
                    self.n_pes, joins_rows, **self._mapped_options, copies=result is not None
                )
                parameters = "starts", "batches", "column", "size", "width", "pieces", "tag", *names
                return Launch(kernel, constants, parameters, self._world, forms=dict.fromkeys(names, VECTORS))

            launch = self.prepared(("mapped", joins_rows, result is not None), make)
            vectors = size // VECTOR_BYTES
            numbers: tuple[int, ...] = batches, chunk[0] * vectors, vectors, chunk[1] * vectors, pieces
        else:

            def make() -> Launch:
                forms: dict[str, Form] = {"out": ((-1, out_pitch), torch.uint8), "x": ((-1, x_pitch), torch.uint8)}
                kernel = all_to_all_transposed(self.n_pes, joins_rows, **self._options)
                parameters = "starts", "batches", "column", "tag", "out", "x"
                return Launch(kernel, constants, parameters, self._world, forms=forms)

            launch = self.prepared((joins_rows, out_pitch, x_pitch), make)
            numbers = batches, chunk[0] * size
        again = functools.partial(launch, starts, *numbers, tag)
        self._launch_checked(again, *tensors)
        return again

    def _by_vectors(self, size: int, *tensors: torch.Tensor) -> bool:
        """Whether parts go through registers, over mapped memory. `size`: bytes per row of the narrower tensor."""
        return (
            not self.needs_symmetric_source
            and size % VECTOR_BYTES == 0
            and is_aligned(VECTOR_BYTES, *tensors)
            and max(tensor.nbytes for tensor in tensors) < 1 << 34  # a box has less than 2**31 vectors
        )

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
        expected = sum(parts) if early == cut else parts[self.rank]
        if x.shape[early] != expected:
            raise ValueError(
                f"{self.name}: axis {early} of x of shape {list(x.shape)} has {x.shape[early]} elements; with lengths {parts} it "
                f"must have {expected} on rank {self.rank}"
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
            f"{self.name}: axis {cut} of x of shape {list(x.shape)} must be a multiple of {self.n_pes} PEs{chunks} to be cut "
            "among them"
        )

    def _offset_of(self, out: torch.Tensor) -> int:
        """Heap offset, also of an empty tensor, to which peers with more rows refer."""
        offset: int = (
            out.untyped_storage().data_ptr() + int(out.storage_offset()) * out.element_size() - self._world.heap.base
        )
        if not 0 <= offset <= self._world.heap.size:
            raise tsn.HeapError(
                f"{self.name}: out of shape {list(out.shape)} is not in the symmetric heap; make it with tilescale_net.empty or zeros"
            )
        return offset

    def _axis(self, name: str, axis: int, x: torch.Tensor) -> int:
        if isinstance(axis, bool) or not isinstance(axis, int) or not -x.dim() <= axis < x.dim():
            raise ValueError(f"{self.name}: {name} is {axis!r}; x of shape {list(x.shape)} has {x.dim()} axes")
        return axis % x.dim()
