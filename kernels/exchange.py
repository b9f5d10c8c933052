"""Kernels of all-gather and of all-to-all with equal splits: every PE puts a part to the same offset at every PE.

`exchange` supports any PE and any alignment, `exchange_mapped` mapped PEs.

A call begins with a signal to every peer that the output may be overwritten, which also identifies the output, and ends
when every peer's part has arrived, so calls need no barrier between them. No data move between PEs with different outputs.
Blocks share each part; block b waits only for blocks b of its peers.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

from .buffered import MOST_BYTES, Parted, few_bytes
from .collective import (
    STATUS_WORDS,
    TAG_BITS,
    all_agree,
    announce,
    check_tag_or_newer,
    compare,
    end_call,
    is_aligned,
    slice_elements,
)
from .launches import Form, Launch
from .sums import VECTOR_BYTES, add_up, batch_of, vector_of


@tsn.macro
def await_room(agrees, same: T.Ref, ready, call, tag, status, block, thread, n_pes, runs_ahead=False):
    """Wait, one thread per PE, until all PEs have begun the call; agrees[p], and `same` of thread p, = whether PE p makes
    the same call. `runs_ahead`: a PE may finish the call before all have compared tags, like the root of a broadcast."""
    if thread < n_pes:
        word = N.wait(ready[thread], "ge", call << T.uint64(TAG_BITS))
        if runs_ahead:
            check_tag_or_newer(same, thread, call, tag, word, status, block == 0)
        else:
            compare(same, thread, call, tag, word, status, block == 0)
        agrees[thread] = same
    T.sync_threads()


def exchange(n_pes, dtype, threads, blocks, engine, unroll, ring, least_bytes, *, split, in_place=False):
    """Traced kernel `(out, x, tag, status, calls, ready, arrived)`; afterwards `out[p]` is PE p's part for this PE.

    Args:
        n_pes: number of PEs, at most `threads`.
        dtype: dtype of `out` [n_pes, count] (symmetric) and `x`.
        threads, blocks: launch geometry; all blocks must be able to run at once.
        engine, unroll, ring: see `tilescale_net.language.put_block`.
        least_bytes: minimum of a block's slice, see `slice_elements`; equal on all PEs.
        split: `x` is [n_pes, count], and PE p gets `x[p]`; otherwise it is [count], and every PE gets all of it.
        in_place: `x` is `out[my_pe]`.

    `tag` and `status`: see `collective.call_word`, as for `calls` [blocks] and the signals `ready` [n_pes] and `arrived`
    [n_pes, blocks].
    """
    count = T.dynamic("count", "int64")
    shape = (n_pes, count) if split else (count,)

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((n_pes, count), dtype),
        x: T.Tensor(shape, dtype),
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
            share = slice_elements(count, blocks, dtype, least_bytes)
            first = share * block
            agrees = T.alloc_shared((n_pes,), "int32")
            # Earlier work on the stream no longer uses `out`, so one block signals for all.
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if first < count:
                same = T.alloc_var("int32")
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes)
                for hop in T.serial(1 if in_place else 0, n_pes):
                    pe = (me + hop) % n_pes
                    if agrees[pe] != 0:
                        N.put_block(
                            out[me, first], x[pe, first] if split else x[first], pe, count=T.min(share, count - first),
                            engine=engine, unroll=unroll, ring=ring,
                        )  # fmt: skip
                # One fence for all peers, a thread per peer; put_signal would wait for each peer in turn.
                T.sync_threads()
                if thread < n_pes:
                    if same != 0:
                        N.signal(arrived[me, block], call, thread, fence=True)
                        N.wait(arrived[thread, block], "ge", call)
                    N.quiet(thread)
            end_call(calls, block, call, thread)

    return main


# ---------------------------------------------------------------------------------------------------------------------
# Copies of vectors through registers, whose loads do not wait for earlier stores.
#
# Stores to a peer are limited by the links, and loads behind them return late. So a thread loads the next rows before it
# stores the loaded ones. Each warp copies for one PE, so all links are always busy, and local copies do not delay sends.


WORDS = VECTOR_BYTES // 4
UNROLL = 8  # rows of a tile: vectors per lane and step
LANES = 32


@tsn.macro
def load_tile(tile, source, at, limit, unroll):
    """tile[u] = source[at + u * LANES], below `limit`."""
    for u in T.unroll(unroll):
        if at + u * LANES < limit:
            for v in T.vectorized(WORDS):
                tile[u, v] = source[at + u * LANES, v]


@tsn.macro
def store_tile(target, at, limit, tile, unroll):
    """Inverse of `load_tile`."""
    for u in T.unroll(unroll):
        if at + u * LANES < limit:
            for v in T.vectorized(WORDS):
                target[at + u * LANES, v] = tile[u, v]


@tsn.macro
def stream(target, target_first, source, source_first, size, thread, step, unroll):
    """target[target_first + i] = source[source_first + i] for i in [0, size). Called by a set of warps. `target`, `source`:
    int32 [rows, WORDS]. `size`: int64, equal for all threads of a warp. `thread`: index of the thread in the set. `step`:
    its number of threads. `unroll`: vectors that a thread loads before it stores earlier ones."""
    even, odd = T.alloc_local((unroll, WORDS), "int32"), T.alloc_local((unroll, WORDS), "int32")
    i = T.alloc_var("int64", thread // LANES * (LANES * unroll) + thread % LANES)
    load_tile(even, source, source_first + i, source_first + size, unroll)
    while i < size:
        load_tile(odd, source, source_first + i + step * unroll, source_first + size, unroll)
        store_tile(target, target_first + i, target_first + size, even, unroll)
        i += step * unroll
        load_tile(even, source, source_first + i + step * unroll, source_first + size, unroll)
        store_tile(target, target_first + i, target_first + size, odd, unroll)
        i += step * unroll


# ---------------------------------------------------------------------------------------------------------------------
# All-gather, all-to-all with equal splits, and sums of their parts, over mapped memory through registers: every warp
# moves rows of one PE's part. Peers may use puts for the same call (`exchange`): slices and signals are the same.


def exchange_mapped(n_pes, threads, blocks, unroll=UNROLL, *, split, in_place=False, staged=False, sums=None):
    """Traced kernel as `exchange`, for mapped PEs. `n_pes`, `threads`, `blocks`, `split`, `in_place`: see `exchange`. `out`
    is [n_pes * count, 16 bytes as int32] and `x` [n_pes * count, 16 bytes] (`split`) or [count, 16 bytes]. `unroll`: see
    `stream`. `staged`: parts arrive in `through`, a last argument like `out` and symmetric, and are copied to `out` in
    ordinary memory; excludes `in_place`. `sums`: a dtype; parts arrive in `through`, and `out`, [count, 16 bytes of this
    dtype], is their sum as in `reduce_scatter`; a last argument `parts` is a view of `through` as such rows."""
    rows, x_rows, out_rows = (T.dynamic(name, "int64") for name in ("rows", "x_rows", "out_rows"))
    between = staged or sums is not None
    hops = n_pes - (in_place or staged)  # the last one is this PE itself
    vector, batch = vector_of(sums) if sums is not None else WORDS, batch_of(n_pes)
    groups, warps = max(1, hops), threads // LANES

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((out_rows, vector), sums) if sums is not None else T.Tensor((rows, WORDS), "int32"),
        x: T.Tensor((x_rows, WORDS), "int32"),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        calls: T.Tensor((blocks,), "uint64"),
        ready: T.Tensor((n_pes,), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
        through: T.Tensor((rows, WORDS), "int32") if between else None,
        parts: T.Tensor((rows, vector), sums) if sums is not None else None,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = calls[block] + T.uint64(1)
            count = rows // n_pes
            share = T.alloc_var("int64", slice_elements(count * VECTOR_BYTES, blocks, "uint8") // VECTOR_BYTES)
            first = T.alloc_var("int64", share * block)
            agrees = T.alloc_shared((n_pes,), "int32")
            if block == 0 and thread < n_pes:
                announce(ready, me, call, tag, thread)
            if first < count:
                same = T.alloc_var("int32")
                await_room(agrees, same, ready, call, tag, status, block, thread, n_pes)
                size = T.alloc_var("int64", T.min(share, count - first))
                # One PE per warp; several in turn if there are fewer warps than PEs.
                for turn in T.serial(-(-hops // warps)):
                    hop = thread // LANES % groups + turn * warps
                    pe = (me + hop + 1) % n_pes
                    if hop < hops and agrees[pe] != 0:
                        worker = thread // LANES // groups * LANES + thread % LANES
                        step = (warps - thread // LANES % groups + groups - 1) // groups * LANES
                        start = pe * count if split else T.int64(0)
                        stream(
                            N.remote(through if between else out, pe), me * count + first, x, start + first, size, worker, step,
                            unroll,
                        )  # fmt: skip
                T.sync_threads()
                if staged:
                    # Copy this PE's own part while the others' are in flight.
                    if thread < n_pes and same != 0:
                        N.signal(arrived[me, block], call, thread, fence=True)
                    mine = me * count + first
                    stream(out, mine, x, mine if split else first, size, thread, threads, unroll)
                    for hop in T.serial(1, n_pes):
                        pe = (me + hop) % n_pes
                        if agrees[pe] != 0:
                            N.wait_block(arrived[pe, block], "ge", call)
                            stream(out, pe * count + first, through, pe * count + first, size, thread, threads, unroll)
                elif thread < n_pes and same != 0:
                    N.signal(arrived[me, block], call, thread, fence=True)
                    N.wait(arrived[thread, block], "ge", call)
                if sums is not None:
                    T.sync_threads()
                    agreed = T.alloc_var("int32")
                    all_agree(agreed, agrees, n_pes)
                    end = T.alloc_var("int64", T.if_then_else(agreed != 0, first + size, first))
                    result = T.alloc_local((batch, vector), sums)
                    for turn in T.serial(T.ceildiv(end - first, T.int64(threads * batch))):
                        i = first + turn * threads * batch + thread
                        add_up(result, [parts] * n_pes, sums, i, end, threads, batch, count)
                        for u in T.unroll(batch):
                            if i + u * threads < end:
                                for v in T.vectorized(vector):
                                    out[i + u * threads, v] = result[u, v]
            end_call(calls, block, call, thread)

    return main


# ---------------------------------------------------------------------------------------------------------------------
# Host side of all-gather and all-to-all with equal splits: chooses the algorithm by size and memory.


ALGORITHMS = ("auto", "puts", "stores")
# Minimum part size for stores, which beat puts at all measured sizes. Four H100s: 16 KiB of all ranks take 7.9 us by
# stores, 8 KiB 12.0 by puts.
STORES_FROM = 1024
# Fastest number of blocks when all PEs send at once; in the simulator each block costs time.
BLOCKS, SIMULATED_BLOCKS = 64, 16
# Vectors of two consecutive tiles in the registers of a block.
TILE_VECTORS = 4096


class Exchange(Parted):
    """Base of AllGather and AllToAll.

    Args:
        name, shown, group: see `Collective`.
        threads, blocks, engine, unroll, ring, stores_from, algorithm: see `AllGather`.
        split, most_bytes: see `few_bytes`.
    """

    _new_launch: Callable[..., Launch]  # by_vectors, staged and further options, by name

    def __init__(
        self, name: str, shown: str, threads: int, blocks: int | None, engine: str, unroll: int | None,
        ring: tuple[int, int] | None, stores_from: int, algorithm: str, group: "tsn.Group" = None, *, split: bool,
        most_bytes: int = MOST_BYTES,
    ):  # fmt: skip
        if algorithm not in ALGORITHMS:
            raise ValueError(f"{name}: algorithm is {algorithm!r}; it must be {', '.join(ALGORITHMS)}")
        if blocks is None:
            blocks = BLOCKS if tsn.world(group).device_kind == "cuda" else SIMULATED_BLOCKS
        shown = f"engine={engine}, unroll={unroll}, ring={ring}, algorithm={algorithm}{shown}"
        super().__init__(name, shown, threads, blocks, group)
        self._options = dict(
            threads=threads, blocks=blocks, engine=engine, unroll=unroll, ring=ring, least_bytes=self.min_slice_bytes
        )
        self._algorithm, self._stores_from = algorithm, stores_from
        self._calls = self.counters(self.blocks)
        self._ready, self._arrived = self._signals(self.n_pes), self._signals(self.n_pes, self.blocks)
        most = most_bytes if algorithm == "auto" else 0
        self._buffers = few_bytes(self, split, most, self._calls, self._ready, engine=engine, unroll=unroll, ring=ring)
        self._mapped_options = dict(
            threads=threads, blocks=blocks, unroll=max(1, min(unroll or UNROLL, 16, TILE_VECTORS // threads))
        )

    def _noted(self, out: torch.Tensor, x: torch.Tensor, part: int) -> tuple[Any, ...]:
        """The description and values on which ranks agree; checks `out`."""
        self._check("out", out, symmetric=not self.takes_any_memory(part))
        if out.numel() and not self._heap_range[0] <= out.data_ptr() < self._heap_range[1]:
            return "x of shape {} and {}, out outside of the heap", x.shape, x.dtype
        return "x of shape {} and {}, out at heap offset {}", x.shape, x.dtype, self.heap_offset(out)

    def _copied(
        self, call: Callable[..., torch.Tensor], out: torch.Tensor, x: torch.Tensor, through: torch.Tensor, part: int
    ) -> bool:
        """Check `through` and make the call through it with `call` and a copy; False if one kernel does both. Ranks may
        differ in this."""
        self._check_through(through, "out", out)
        if self.takes_any_memory(part):
            call(out, x)
        elif (
            self._by_vectors(x, out, part) and is_aligned(VECTOR_BYTES, through) and out.nbytes <= self.one_launch_up_to
        ):
            return False
        else:
            out.copy_(call(through, x))
        return True

    def _send(
        self, key: Hashable, out: torch.Tensor, x: torch.Tensor, through: torch.Tensor | None, part: int, **variant: bool
    ) -> None:  # fmt: skip
        """A call with checked tensors and parts of `part` bytes. `variant`: options of `_new_launch`."""
        shared, tensors = (out, (out, x)) if through is None else (through, (out, x, through))
        noted = self._noted(shared, x, part)
        tag = self._agree(*noted)
        if not x.nbytes:
            return
        if self._buffers.holds(part):
            launch = self._buffers.launch(out, x)
        else:
            variant |= dict(by_vectors=self._by_vectors(x, out, part), staged=through is not None)
            launch = self.prepared(tuple(variant.values()), lambda: self._new_launch(**variant))
        self._launch_and_remember(key, noted, functools.partial(launch, tag), *tensors)

    def _launch_of(self, kernel: Any, out: Form, x: Form, staged: bool = False) -> Launch:
        """Launch of a kernel `(out, x, tag, status, calls, ready, arrived[, through])` with tensors in these forms."""
        constants = dict(status=self.status_record, calls=self._calls, ready=self._ready, arrived=self._arrived)
        forms = {"out": out, "x": x} | ({"through": out} if staged else {})
        return Launch(kernel, constants, ("tag", *forms), self._world, forms=forms)

    def _by_vectors(self, x: torch.Tensor, out: torch.Tensor, part: int) -> bool:
        """Whether parts of this many bytes go through registers, over mapped memory. Ranks may differ in this."""
        stores = part >= self._stores_from if self._algorithm == "auto" else self._algorithm == "stores"
        return (
            stores and not self.needs_symmetric_source and is_aligned(VECTOR_BYTES, x, out) and part % VECTOR_BYTES == 0
        )
