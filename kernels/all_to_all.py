"""All-to-all by push: the host class, for equal splits (exchange.py) and uneven ones (this file)."""

import operator
from collections.abc import Hashable, Sequence

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.runtime.profiling import named

from .collective import (
    EXPLICIT_SYNC,
    MIN_BYTES,
    STATUS_WORDS,
    TAG_BITS,
    as_bytes,
    call_word,
    end_call,
    report_other_call,
    slice_elements,
)
from .exchange import STORES_FROM, UNROLL, Exchange, exchange, exchange_mapped
from .launches import VECTORS, Form, Launch

# ---------------------------------------------------------------------------------------------------------------------
# All-to-all by push with uneven splits.
#
# The first message of a call announces that the output may be overwritten, the offset of the peer's rows in it, and the
# number of rows expected. So PEs need only the arguments of torch.distributed.all_to_all_single, and find a difference
# before any row moves. The last word is the call's (`collective.call_word`), which differs if a PE makes another call.


# Words of the message between two PEs: heap offset of the receiver's rows (in bytes), rows expected, rows to be sent, and
# the call's word. A PE whose own splits do not add up sends INVALID instead of numbers.
OFFSET, EXPECTED, SENDING, ANNOUNCED, WORDS = range(5)
INVALID = -1
# Codes in `differences[p]`, followed by the number of rows here and at PE p.
OWN_SPLITS, SEND_DIFFERS, RECEIVE_DIFFERS = 1, 2, 3


@tsn.jit(name="all_to_all_uneven")
def all_to_all_uneven(n_pes, threads=512, blocks=16, engine="auto", unroll=None, ring=None, least_bytes=MIN_BYTES):
    """Kernel `(heap, x, out_place, out_rows, in_rows, row_bytes, receives, sends, tag, status, differences, outbox,
    inbox, calls, ready, arrived)`: rows to and from every PE.

    Args:
        n_pes, threads, blocks, engine, unroll, ring, least_bytes: as in `all_to_all`.

    `x` (uint8) holds `in_rows` rows of `row_bytes` bytes. The output has `out_rows` rows at byte `out_place` of `heap`, the
    whole symmetric heap (uint8); the offset may differ between PEs. `sends[p]` and `receives[p]` (int64 [n_pes]) are the
    numbers of rows to and from PE p; they must add up to `in_rows` and `out_rows`. `differences` (int64 [n_pes, 3]) stays
    zero unless splits differ: then no row moves between the two PEs, and both find the reason in `differences`. `outbox`
    and `inbox` (int64 [n_pes, WORDS] and [2, n_pes, WORDS]) are symmetric; others are as in `exchange`.
    """
    heap_bytes, x_bytes = T.dynamic("heap_bytes", "int64"), T.dynamic("x_bytes", "int64")

    @T.macro
    def reject(differences, pe, reason, mine, theirs):
        if differences[pe, 0] == 0:
            differences[pe, 0] = reason
            differences[pe, 1] = mine
            differences[pe, 2] = theirs

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
            begun = call_word(call, tag)
            parity = T.cast(call % T.uint64(2), "int32")  # a fast peer may already write to the other half
            source = T.alloc_shared((n_pes,), "int64")  # byte offset in `x` of the rows for each PE
            target = T.alloc_shared((n_pes,), "int64")  # heap offset of these rows at the PE
            size = T.alloc_shared((n_pes,), "int64")  # their bytes
            coming = T.alloc_local((1,), "int64")  # bytes from PE `thread`
            coming[0] = 0

            if thread < n_pes:
                before, total = T.alloc_local((2,), "int64"), T.alloc_local((2,), "int64")
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
                # One block signals the peers: earlier work on the stream no longer uses the output.
                if block == 0:
                    outbox[thread, OFFSET] = out_place + before[1] * row_bytes
                    outbox[thread, EXPECTED] = T.if_then_else(valid, receives[thread], T.int64(INVALID))
                    outbox[thread, SENDING] = T.if_then_else(valid, sends[thread], T.int64(INVALID))
                    outbox[thread, ANNOUNCED] = T.cast(begun, "int64")
                    N.put_signal_thread(
                        inbox[parity, me, 0], outbox[thread, 0], thread, ready[me], begun, count=WORDS, unroll=2
                    )
                word = N.wait(ready[thread], "ge", call << T.uint64(TAG_BITS))
                announced = T.cast(inbox[parity, thread, ANNOUNCED], "uint64")
                same = announced == begun
                may_send = valid and same and inbox[parity, thread, EXPECTED] == sends[thread]
                may_receive = valid and same and inbox[parity, thread, SENDING] == receives[thread]
                if block == 0:
                    if not same:
                        # A PE that runs ahead has overwritten its word in `ready`, but not this half of `inbox`.
                        theirs = T.if_then_else(announced >> T.uint64(TAG_BITS) == call, announced, word)
                        report_other_call(status, thread, call, tag, theirs)
                    if not valid:
                        reject(differences, thread, OWN_SPLITS, total[0], total[1])
                    if same and not may_send:
                        reject(differences, thread, SEND_DIFFERS, sends[thread], inbox[parity, thread, EXPECTED])
                    if same and not may_receive:
                        reject(differences, thread, RECEIVE_DIFFERS, receives[thread], inbox[parity, thread, SENDING])
                source[thread] = before[0] * row_bytes
                target[thread] = inbox[parity, thread, OFFSET]
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
            # One fence for all peers, a thread per peer; put_signal would wait for each peer in turn.
            T.sync_threads()
            if thread < n_pes:
                if slice_elements(size[thread], blocks, "uint8", least_bytes) * block < size[thread]:
                    N.signal(arrived[me, block], call, thread, fence=True)
                if slice_elements(coming[0], blocks, "uint8", least_bytes) * block < coming[0]:
                    N.wait(arrived[thread, block], "ge", call)
                N.quiet(thread)
            end_call(calls, block, call, thread)

    return main


@tsn.jit(name="all_to_all")
def all_to_all(
    n_pes, dtype="uint8", threads=512, blocks=16, engine="auto", unroll=None, ring=None, least_bytes=MIN_BYTES
):
    """Kernel `(out, x, tag, status, calls, ready, arrived)`: afterwards `out[p]` is `x[my_pe]` of PE p, for all p; see `exchange`."""
    return exchange(n_pes, dtype, threads, blocks, engine, unroll, ring, least_bytes, split=True)


@tsn.jit(name="all_to_all_mapped", pass_configs=EXPLICIT_SYNC)
def all_to_all_mapped(n_pes, threads=512, blocks=16, unroll=UNROLL, staged=False):
    """Kernel `(out, x, tag, status, calls, ready, arrived[, through])`; see `exchange.exchange_mapped`."""
    return exchange_mapped(n_pes, threads, blocks, unroll, split=True, staged=staged)


class AllToAll(Exchange):
    """All-to-all of tensors of any dtype and size, as torch.distributed.all_to_all_single; constructed and called by all
    ranks.

    Args:
        threads, blocks, engine, unroll, ring: as in `AllGather`.
        stores_from, algorithm: as in `AllGather`; for equal parts.
        group: the ranks; see `tilescale_net.world`.

    Raises:
        ValueError, RankMismatch: as `AllGather`.
    """

    def __init__(
        self, *, threads: int = 512, blocks: int | None = None, engine: str = "auto", unroll: int | None = None,
        ring: tuple[int, int] | None = None, stores_from: int = STORES_FROM, algorithm: str = "auto",
        group: "tsn.Group" = None,
    ) -> None:  # fmt: skip
        super().__init__(
            "AllToAll", "", threads, blocks, engine, unroll, ring, stores_from, algorithm, group, split=True
        )
        self._signal_words = self._calls, self._ready, self._arrived
        self._heap = self._world.heap.as_bytes()
        self._outbox = self._symmetric((self.n_pes, WORDS), torch.int64)
        self._inbox = self._symmetric((2, self.n_pes, WORDS), torch.int64)
        self._differences = torch.zeros((self.n_pes, 3), dtype=torch.int64, device=self.device)

    @named("tilescale_net.AllToAll")
    def __call__(
        self, out: torch.Tensor, x: torch.Tensor, output_splits: torch.Tensor | Sequence[int] | None = None,
        input_splits: torch.Tensor | Sequence[int] | None = None, *, through: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Rows of `x` go to all PEs, rows of `out` come from all PEs, both in the order of the PEs; asynchronous on the
        current stream.

        Args:
            out: [rows, ...], symmetric, contiguous; with splits its offset in the heap may differ between PEs. Without
                splits, if `takes_any_memory` of a part's bytes, it may be ordinary memory, on all ranks or on none.
            x: [rows, ...], contiguous, of out's dtype and row shape, apart from `out` in memory. Symmetric if some PEs are
                on other nodes.
            output_splits, input_splits: rows from and to each PE, zero included: n_pes numbers, or an int64 tensor of them
                on this rank's device, which the kernel reads. Pass both or neither; without them all PEs get the same
                number of rows.
            through: without splits: symmetric memory of out's shape and dtype, apart from `x`; see `AllGather.__call__`.

        Returns:
            `out`. Later work on the stream may overwrite `x` and the splits.

        The kernel checks splits in tensors, and splits that differ between two ranks; see `check`.

        Raises:
            TypeError, ValueError, HeapError: a wrong argument, by name; nothing was sent.
            RankMismatch: ranks pass different row shapes or dtypes, without splits also another number of rows or heap
                offset of `out`, or splits on some ranks only. No data move between such ranks. Raised at once for new
                arguments, else by the next call or `check`.
        """
        self._begin()
        key = self._key_through(out, x, through) if output_splits is None and input_splits is None else None
        if self._made_again(key, *((out, x) if through is None else (out, x, through))):
            return out
        self._check("out", out, symmetric=output_splits is not None)
        self._check("x", x, out.dtype, symmetric=self.needs_symmetric_source)
        if out.dim() == 0 or x.dim() == 0 or out.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"{self.name}: out of shape {list(out.shape)} and x of shape {list(x.shape)} must have rows of one shape"
            )
        self._check_apart("out", out, "x", x)
        if (output_splits is None) != (input_splits is None):
            raise ValueError(f"{self.name}: output_splits and input_splits are given together or not at all")
        if output_splits is None:
            self._equal(out, x, through, key)
        elif through is not None:
            raise ValueError(f"{self.name}: through is for calls without splits; with splits out is symmetric")
        else:
            receives = self._splits("output_splits", output_splits, "out", out)
            sends = self._splits("input_splits", input_splits, "x", x)
            self._uneven(out, x, receives, sends)
        return out

    def _equal(self, out: torch.Tensor, x: torch.Tensor, through: torch.Tensor | None, key: Hashable) -> None:
        if out.shape != x.shape or x.shape[0] % self.n_pes:
            raise ValueError(
                f"{self.name}: out of shape {list(out.shape)} and x of shape {list(x.shape)} must have the same number of "
                f"rows, a multiple of the {self.n_pes} PEs; give output_splits and input_splits for uneven ones"
            )
        part = x.nbytes // self.n_pes
        if through is not None:
            self._check_apart("through", through, "x", x)
            if self._copied(self, out, x, through, part):
                return
        self._send(key, out, x, through, part)

    def _new_launch(self, *, by_vectors: bool, staged: bool) -> Launch:
        if by_vectors:
            kernel = all_to_all_mapped(self.n_pes, **self._mapped_options, staged=staged)
            return self._launch_of(kernel, VECTORS, VECTORS, staged)
        parts: Form = (self.n_pes, -1), torch.uint8
        return self._launch_of(all_to_all(self.n_pes, **self._options), parts, parts)

    def _uneven(self, out: torch.Tensor, x: torch.Tensor, receives: torch.Tensor, sends: torch.Tensor) -> None:
        tag = self._agree("rows of shape {} and {} with splits", x.shape[1:], x.dtype)
        row_bytes = x.shape[1:].numel() * x.element_size()
        if row_bytes == 0:
            return
        source = x if x.numel() else self._outbox  # an empty tensor has no address
        kernel = all_to_all_uneven(self.n_pes, **self._options)
        kernel(
            self._heap, as_bytes(source, source.nbytes), self.heap_offset(out), out.shape[0], x.shape[0], row_bytes, receives, sends,
            tag, self.status_record, self._differences, self._outbox, self._inbox, *self._signal_words,
        )  # fmt: skip
        if self.device.type == "cpu":  # the simulator has run the kernel by now
            self.check()

    def _splits(self, name: str, splits, tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Splits as a tensor for the kernel. Raises TypeError or ValueError for faults that the host can see."""
        if isinstance(splits, torch.Tensor):
            self._check(name, splits, torch.int64)
            if splits.shape != (self.n_pes,):
                raise ValueError(f"{self.name}: {name} has shape {list(splits.shape)}; it must be [{self.n_pes}]")
            if splits.device.type != "cpu":
                return splits
            numbers = splits.tolist()
        else:
            try:
                numbers = [operator.index(n) for n in splits]
            except TypeError:
                raise TypeError(
                    f"{self.name}: {name} is {splits!r}; it must be whole numbers, or a tensor of them"
                ) from None
            splits = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        if len(numbers) != self.n_pes:
            raise ValueError(
                f"{self.name}: {name} holds {len(numbers)} numbers, one for each of {self.n_pes} PEs is needed"
            )
        if min(numbers) < 0:
            raise ValueError(f"{self.name}: {name} is {numbers}; a split cannot be negative")
        if sum(numbers) != tensor.shape[0]:
            raise ValueError(
                f"{self.name}: {name} is {numbers}, {sum(numbers)} rows in all, but {tensor_name} has {tensor.shape[0]}"
            )
        return splits

    def check(self) -> None:
        """Wait for the calls so far and raise errors of their arguments or splits. Not collective.

        In the simulator each call does this; on a GPU it synchronises with the host. Between two PEs with different splits
        no rows were moved, and both raise.

        Raises:
            ValueError: splits of this rank, given as tensors, that were negative or did not add up.
            RankMismatch: another PE made another call, or expected or announced another number of rows; names both.
        """
        differences = self._differences.tolist()
        super().check()  # an aborted call is no difference of splits
        self._differences.zero_()
        for pe, (reason, mine, other) in enumerate(differences):
            if reason == OWN_SPLITS:
                raise ValueError(
                    f"{self.name}: input_splits add up to {mine} and output_splits to {other} rows, or one is negative; "
                    "they must add up to the rows of x and out"
                )
            if reason:
                verb = ("sends", "expects") if reason == SEND_DIFFERS else ("expects", "sends")
                theirs = f"{verb[1]} {other}" if other != INVALID else "was given splits that do not add up"
                raise tsn.RankMismatch(
                    f"{self.name}: rank {self.rank} {verb[0]} {mine} rows {'to' if reason == SEND_DIFFERS else 'from'} "
                    f"rank {pe}, which {theirs}; no rows were moved between the two"
                )
