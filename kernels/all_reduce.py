"""All-reduce: the host class, which chooses an algorithm by the number of bytes.

    one_shot        few floats: every PE sends all data to all; data are their own flags      all_reduce_push.py
    two_shot_push   more floats, or ordinary memory: every PE sums its part, likewise         all_reduce_push.py
    packets         few bytes of other types: packets of data and flag                        packets.py
    two_shot        larger tensors: every PE reads and sums its part                          all_reduce_two_shot.py
    two_shot_pull   by name: as two_shot, but peers read the sums from the PE that made       all_reduce_two_shot.py
                    them, as two_shot does from 64 MiB on between more than two PEs
    fp8             by name only: data are sent as FP8, with an error                         all_reduce_fp8.py

Each file has one or two rows (`Algorithm`); `register_algorithm` adds rows, also from outside of the package.
All but "fp8" sum in the order of the PEs, in float32, and round once, so results do not depend on the algorithm. If some
PEs are on other nodes, a reduce-scatter and an all-gather replace these; small tensors are sent whole and summed by every
PE, which saves one of two exchanges over the network (buffered.py). Either way a node's sum is rounded too.
"""

import functools
import sys
from collections.abc import Callable

import torch

import tilescale_net as tsn
from tilescale_net.runtime.profiling import named

from .algorithms import ALGORITHMS, Again, Algorithm, Call, register_algorithm
from .all_gather import AllGather
from .all_reduce_fp8 import ALL_REDUCE_FP8
from .all_reduce_push import ONE_SHOT, TWO_SHOT_PUSH
from .all_reduce_two_shot import TWO_SHOT, TWO_SHOT_PULL
from .buffered import MOST_BYTES, MOST_BYTES_PER_RANK, Buffers, Parted
from .collective import Collective, is_integer
from .packets import PACKETS
from .reduce_scatter import ReduceScatter
from .sums import VECTOR_BYTES

__all__ = ["ALGORITHMS", "Algorithm", "AllReduce", "Call", "register_algorithm"]

for _row in (TWO_SHOT_PULL, TWO_SHOT, PACKETS, TWO_SHOT_PUSH, ONE_SHOT, ALL_REDUCE_FP8):
    register_algorithm(_row)


class AllReduce(Collective):
    """Sum of tensors over all PEs, on each PE; constructed and called by all ranks.

    Args:
        threads, blocks: see `Collective`.
        staging_bytes: tensors outside the symmetric heap are reduced in chunks of this many bytes, floats of up to 32 bits
            in chunks of twice as many; up to ten times as many bytes are allocated in the heap, and up to 8 MiB for small
            tensors.
        algorithm: "one_shot", "two_shot_push", "packets", "two_shot", "two_shot_pull", a name of `register_algorithm`, or
            "auto": by the size. "fp8": data are sent as FP8, in half the bytes of bfloat16, with the error that
            `all_reduce_fp8` states; for tensors of some MiB and more, of floats of up to 32 bits, if all PEs are mapped;
            takes 32 times `staging_bytes` of the heap.
        once_per_node: as in `AllGather`.
        group: the ranks; see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry, an algorithm or a size that the kernels or the GPU cannot run; "fp8" with PEs on
            several nodes.
        RankMismatch: ranks pass different arguments.
        HeapError: no room for the staging memory.
    """

    DTYPES = ReduceScatter.DTYPES

    def __init__(
        self, *, threads: int = 512, blocks: int = 64, staging_bytes: int = 4 << 20, algorithm: str = "auto",
        once_per_node: bool = True, group: "tsn.Group" = None,
    ) -> None:  # fmt: skip
        if algorithm not in ("auto", *ALGORITHMS):
            raise ValueError(f"AllReduce: algorithm is {algorithm!r}; it must be auto, {', '.join(ALGORITHMS)}")
        if not is_integer(staging_bytes):
            raise ValueError(f"AllReduce: staging_bytes is {staging_bytes!r}; it must be a positive number of bytes")
        shown = f"staging_bytes={staging_bytes}, algorithm={algorithm}, once_per_node={once_per_node}"
        super().__init__("AllReduce", shown, threads, blocks, group)
        self._algorithm = algorithm
        step = self.n_pes * VECTOR_BYTES
        self.staging_bytes = -(-staging_bytes // step) * step
        self._parts: tuple[ReduceScatter, AllGather] | None = None
        # (row, largest bytes, launch of a call), in this order.
        self._choices: list[tuple[Algorithm, int, Callable[[Call], Again]]] = []
        if self.needs_symmetric_source and not (algorithm in ALGORITHMS and ALGORITHMS[algorithm].across_nodes):
            if algorithm in ALGORITHMS and not ALGORITHMS[algorithm].is_exact:
                raise ValueError(
                    f"AllReduce: algorithm {algorithm!r} needs PEs that are all mapped, and these are on "
                    f"{self._world.topology.nodes} nodes; take a group of the ranks of one node, or another algorithm"
                )
            self._source = self._symmetric(self.staging_bytes, torch.uint8)
            way = "auto" if once_per_node else "push"
            reduce = ReduceScatter(threads=threads, blocks=blocks, algorithm=way, group=self._world)
            gather = AllGather(threads=threads, blocks=blocks, once_per_node=once_per_node, group=self._world)
            self._parts = self._use(reduce), self._use(gather)
            # Between two PEs, whole tensors send as many bytes as parts.
            most = MOST_BYTES if self.n_pes == 2 else MOST_BYTES_PER_RANK
            self._buffers = Buffers(self, False, min(most, self.staging_bytes) if algorithm == "auto" else 0)
        else:
            self._prepare(list(ALGORITHMS.values()) if algorithm == "auto" else [ALGORITHMS[algorithm]])

    def _prepare(self, rows: list[Algorithm]) -> None:
        """Allocate the algorithms' buffers, all or none."""
        limits = {row.name: sys.maxsize if self._algorithm != "auto" else row.auto_up_to(self) for row in rows}
        rows = [row for row in reversed(rows) if limits[row.name]]
        memory = self.allocate({f"{r.name}.{n}": spec for r in rows for n, spec in r.buffers(self).items()})
        for row in rows:
            own = {n: memory[f"{row.name}.{n}"] for n in row.buffers(self)}
            own |= {n: self.counters(count) for n, count in row.counters(self).items()}
            launch = functools.partial(self._in_pieces, functools.partial(row.launch, self, own), row.capacity(self))
            self._choices.append((row, limits[row.name], launch))

    @named("tilescale_net.AllReduce")
    def __call__(self, out: torch.Tensor, x: torch.Tensor | None = None, *, overwrite_x: bool = False) -> torch.Tensor:
        """`out` becomes the sum over all PEs of their `x`; asynchronous on the current stream.

        Args:
            out: contiguous, one of `DTYPES`, of the same shape on all ranks.
            x: contiguous, of out's shape and dtype, apart from `out` in memory, or `out` itself, the default.
            overwrite_x: the kernel may use `x` as scratch; its contents are undefined afterwards. Equal on all ranks.

        Tensors may be in any memory. Large ones are fastest, because they are not copied, if both are symmetric and begin
        and end at multiples of 16 bytes, or if `x` alone does and may be overwritten.

        Returns:
            `out`, bitwise equal on all ranks: sums are in float32 (float64 and integers in their own type), in the order of
            the PEs, and rounded once; if nodes have several PEs each, a node's sum is rounded too. Bits do not depend on
            the algorithm, on other elements or on addresses. With "fp8", rounded as `all_reduce_fp8` states.

        Raises:
            TypeError, ValueError: a wrong argument, by name; nothing was sent.
            RankMismatch: ranks pass different shapes or dtypes, or, of large tensors, symmetric ones that do not match on
                all ranks. No data move between such ranks. Raised at once for new arguments, else by the next call or
                `check`.
        """
        self._begin()
        x = out if x is None else x
        key = self._key(out, x, overwrite_x)
        if self._made_again(key, out, x):
            return out
        self._check("out", out)
        self._check("x", x, out.dtype)
        self._check_dtype(out, self.DTYPES)
        if x.shape != out.shape:
            raise ValueError(f"{self.name}: x has shape {list(x.shape)} and out {list(out.shape)}; they must be equal")
        if x.data_ptr() != out.data_ptr():
            self._check_apart("out", out, "x", x)
        launch, can_stay, _ = self._choose(out.nbytes, out.dtype)
        overwrite_x = overwrite_x and x.data_ptr() != out.data_ptr()
        description, zero_copy = "out of shape {} and {}", False
        if can_stay:  # else tensors are copied anyway, and their offsets do not matter
            offsets = [self.aligned_offset(x)]
            if overwrite_x:
                description = "x of shape {} and {}, which may be overwritten"
            else:
                offsets.insert(0, self.aligned_offset(out))
            zero_copy, tag, noted = self._agree_on_offsets(description, out.shape, out.dtype, offsets=offsets)
            if not zero_copy:
                launch = self._choose(out.nbytes, out.dtype, copies=True)[0]
        else:
            tag, noted = self._agree(description, out.shape, out.dtype), (description, out.shape, out.dtype)
        if out.numel():
            again = launch(Call(out.view(-1), x.view(-1), tag, zero_copy, overwrite_x))
            if again is not None and key is not None:
                self._again[key] = noted, again
        return out

    def is_faster_overwritten(self, nbytes: int) -> bool:
        """Whether a symmetric `x` that may be overwritten is faster than an ordinary one."""
        fits = self._choose(nbytes)[1] and nbytes % VECTOR_BYTES == 0
        return fits and (self.n_pes == 2 or nbytes > self.staging_bytes)

    def is_copied_in_pieces(self, nbytes: int, dtype: torch.dtype = torch.float32) -> bool:
        """Whether an ordinary tensor takes several launches instead of one for a symmetric tensor, so that a copy of it
        costs less."""
        if nbytes <= self.staging_bytes or nbytes % VECTOR_BYTES or not self._choose(nbytes, dtype)[1]:
            return False
        _, copies, most = self._choose(nbytes, dtype, copies=True)
        return copies or most < nbytes <= Parted.one_launch_up_to

    def _choose(
        self, nbytes: int, dtype: torch.dtype = torch.float32, copies: bool = False
    ) -> tuple[Callable[[Call], Again], bool, int]:
        """The launch of a call of this size; whether it can use tensors in place; and the bytes of a launch that does not.
        `copies`: never in place."""
        if self.n_pes == 1:
            return self._copy, False, nbytes
        if self._parts is not None:
            if self._buffers.holds(nbytes):
                return self._in_one_hop, False, nbytes
            # Tensors can be used in place if every PE's part has equally many vectors.
            return self._over_nodes, nbytes % (self.n_pes * VECTOR_BYTES) == 0, self.staging_bytes
        rows = [choice for choice in self._choices if choice[0].dtypes is None or dtype in choice[0].dtypes]
        if not rows:
            raise TypeError(f"{self.name}: algorithm {self._algorithm!r} does not take dtype {dtype}")
        row, _, launch = next(choice for choice in rows if nbytes <= choice[1])
        if copies and row.zero_copy:  # in pieces, by the row with the largest capacity
            row, _, launch = max(rows, key=lambda choice: choice[0].capacity(self))
        return launch, row.zero_copy, row.capacity(self)

    @staticmethod
    def _copy(call: Call) -> None:
        if call.x.data_ptr() != call.out.data_ptr():
            call.out.copy_(call.x)

    def _in_pieces(self, launch: Callable[[Call], Again], nbytes: int, call: Call) -> Again:
        """Launch pieces of at most this many bytes; tensors in place in one launch."""
        size = call.out.numel() if call.zero_copy else nbytes // call.out.element_size()
        if size >= call.out.numel():
            return self._launch_checked(launch, call)

        def run() -> list[Again]:
            pieces = zip(call.out.split(size), call.x.split(size))
            return [launch(Call(out, x, call.tag, call.zero_copy, call.overwrite_x)) for out, x in pieces]

        def again(out: torch.Tensor, x: torch.Tensor) -> None:
            for same, out_piece, x_piece in zip(launches, out.view(-1).split(size), x.view(-1).split(size)):
                same(out_piece, x_piece)

        launches = [same for same in self._launch_checked(run) if same is not None]
        return again if len(launches) * size >= call.out.numel() else None

    def _over_nodes(self, call: Call) -> None:
        """For PEs on several nodes."""
        if call.zero_copy:
            result = call.x if call.overwrite_x else call.out
            self._by_parts(result, call.x)
            if call.overwrite_x:
                call.out.copy_(call.x)
            return
        size = self.staging_bytes // call.out.element_size()
        for first in range(0, call.out.numel(), size):
            self._by_staged_parts(call.out[first : first + size], call.x[first : first + size])

    def _by_parts(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Reduce-scatter, then all-gather. Both tensors are symmetric."""
        assert self._parts is not None
        reduce, gather = self._parts
        rows = out.view(self.n_pes, -1)
        reduce(rows[self.rank], x.view(self.n_pes, -1))
        gather(rows, rows[self.rank])

    def _in_one_hop(self, call: Call) -> Again:
        """For PEs on several nodes: send whole tensors."""
        again = functools.partial(self._buffers.launch(call.out, call.x, call.out.dtype), call.tag)
        self._launch_checked(again, call.out, call.x)
        return again

    def _by_staged_parts(self, out: torch.Tensor, x: torch.Tensor) -> None:
        vector = VECTOR_BYTES // out.element_size()
        part = -(-out.numel() // (self.n_pes * vector)) * vector
        whole = self._source.view(out.dtype)[: self.n_pes * part]
        whole[: out.numel()].copy_(x)
        self._by_parts(whole, whole)
        out.copy_(whole[: out.numel()])
