"""All-reduce: the host class, which chooses among three kernels by the number of bytes.

    packets    few bytes: data that carry their own flag, one hop            all_reduce_packets.py
    one_shot   more: every PE reads all PEs' data, one exchange           all_reduce_one_shot.py
    two_shot   the rest: every PE adds up its part, two exchanges            all_reduce_two_shot.py

All of them add up in the order of the PEs, in float32, and round once: which one runs cannot be seen in the result. Where
some PEs are on other nodes, a reduce-scatter and an all-gather take their place, and a node's sum is rounded too; small
tensors are gathered whole and added up everywhere, which spares one of two exchanges over the network.
"""

import torch

import tilescale_net as tsn
from tilescale_net.runtime.profiling import named

from . import all_reduce_packets as packets
from .all_gather import AllGather
from .all_reduce_one_shot import all_reduce_one_shot
from .all_reduce_two_shot import all_reduce_two_shot
from .collective import Collective, dtype_name, is_aligned
from .reduce_scatter import ReduceScatter
from .sums import VECTOR_BYTES, sum_of_rows

ALGORITHMS = ("packets", "one_shot", "two_shot")
# Bytes, times the number of PEs, up to which packets are chosen: twice the bytes travel to every PE.
PACKETS_UP_TO = 512 * 1024
PACKET_BLOCKS = 128
# One shot spares an exchange, but more bytes travel; measured on two H200.
EXCHANGE_US, US_PER_MIB = 1.4, 3.0
LARGEST_ONE_SHOT = 2 << 20
# Over nodes: bytes of all PEs' tensors, and PEs, up to which they are gathered whole.
GATHERED_UP_TO, MOST_GATHERED = 128 * 1024, 8


def one_shot_up_to(n_pes: int) -> int:
    """Bytes up to which one shot is faster than two, a multiple of 16."""
    more = (n_pes - 1) * (1 - 2 / n_pes)  # tensors that each PE reads beyond what two shots move
    if more <= 0:
        return LARGEST_ONE_SHOT
    return min(LARGEST_ONE_SHOT, int(EXCHANGE_US / US_PER_MIB / more * 2**20) // VECTOR_BYTES * VECTOR_BYTES)


class AllReduce(Collective):
    """Sum of tensors over all PEs, which each of them gets; constructed and called by all ranks.

    Args:
        threads, blocks: launch geometry.
        staging_bytes: of tensors that the kernel cannot reach in the other PEs' memory, so many bytes are copied and
            summed at a time; twice as many are allocated in the symmetric heap, beside up to 8 MiB for small tensors.
        algorithm: "packets", "one_shot", "two_shot" or "auto": by the size.
        once_per_node: as that of `AllGather`.
        group: whose ranks these are; see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry, an algorithm or a size that the kernels or the GPU cannot run.
        RankMismatch: ranks that want different ones.
        HeapError: no room for the staging memory.
    """

    DTYPES = ReduceScatter.DTYPES

    def __init__(
        self,
        *,
        threads: int = 512,
        blocks: int = 64,
        staging_bytes: int = 4 << 20,
        algorithm: str = "auto",
        once_per_node: bool = True,
        group: "tsn.Group" = None,
    ) -> None:
        if algorithm not in ("auto", *ALGORITHMS):
            raise ValueError(f"AllReduce: algorithm is {algorithm!r}; it must be auto, {', '.join(ALGORITHMS)}")
        if isinstance(staging_bytes, bool) or not isinstance(staging_bytes, int) or staging_bytes < 1:
            raise ValueError(f"AllReduce: staging_bytes is {staging_bytes!r}; it must be a positive number of bytes")
        shown = f"staging_bytes={staging_bytes}, algorithm={algorithm}, once_per_node={once_per_node}"
        super().__init__("AllReduce", shown, threads, blocks, group)
        self._algorithm = algorithm
        step = self.n_pes * VECTOR_BYTES
        self._staging_bytes = -(-staging_bytes // step) * step
        self._parts: tuple = ()
        if self._sources_travel:
            self._source = self._symmetric(self._staging_bytes, torch.uint8)
            options = dict(threads=threads, blocks=blocks, group=self._world)
            self._parts = (
                ReduceScatter(**options, algorithm="auto" if once_per_node else "push").within(self._made),
                AllGather(**options, once_per_node=once_per_node).within(self._made),
            )
        else:
            self._allocate_direct()

    def _allocate_direct(self) -> None:
        n, blocks = self.n_pes, self.blocks
        self._packet_blocks = min(PACKET_BLOCKS, self._block_limit)
        capacity = self._packet_blocks * (self.threads // n)
        self._packet_capacity = min(capacity, PACKETS_UP_TO // n // packets.DATA_BYTES)
        self._one_shot_capacity = one_shot_up_to(n) // VECTOR_BYTES
        memory = self.allocate(
            {
                "packets": ((2, n, self._packet_capacity, packets.PACKET_BYTES), torch.uint8),
                "inbox": ((2 * self._one_shot_capacity, VECTOR_BYTES), torch.uint8),
                "source": ((self._staging_bytes,), torch.uint8),
                "target": ((self._staging_bytes,), torch.uint8),
                "one_shot_arrived": ((n, blocks), torch.uint64),
                "ready": ((n, blocks), torch.uint64),
                "arrived": ((n, blocks), torch.uint64),
                "done": ((n, blocks), torch.uint64),
            }
        )
        self._packets, self._inbox = memory["packets"], memory["inbox"]
        self._source, self._target = memory["source"], memory["target"]
        self._one_shot_words = memory["one_shot_arrived"], self.counters(blocks)
        self._two_shot_words = memory["ready"], memory["arrived"], memory["done"], self.counters(blocks)
        self._packet_calls = self.counters(self._packet_blocks)

    @named("tilescale_net.AllReduce")
    def __call__(self, out: torch.Tensor, x: torch.Tensor | None = None, *, overwrite_x: bool = False) -> torch.Tensor:
        """`out` becomes the sum over all PEs of their `x`; asynchronous on the current stream.

        Args:
            out: contiguous, one of `DTYPES`, of the same shape on all ranks.
            x: contiguous, of out's shape and dtype, apart from `out` in memory or `out` itself, which is the default.
            overwrite_x: `x` may be overwritten, with what nobody needs; equal on all ranks.

        Tensors may lie anywhere. Large ones are fastest where both are symmetric and begin and end at multiples of 16
        bytes, or `x` alone does and may be overwritten: they are not copied then.

        Returns:
            `out`, with equal bits on all ranks: sums are made in float32 (float64 and integers in their own type), in the
            order of the PEs, and rounded once; where a node's sum crosses the network, as it does of all but small
            tensors, it is rounded too.

        Raises:
            TypeError, ValueError: an argument that does not fit, by name; nothing was sent.
            RankMismatch: ranks that pass different shapes or dtypes, or of large tensors symmetric ones that are not the same
                on all ranks. Between those nothing moves. Raised at once where arguments are new, else by the next call or
                `check`.
        """
        self._begin()
        x = out if x is None else x
        self._check("out", out)
        self._check("x", x, out.dtype)
        if out.dtype not in self.DTYPES:
            raise TypeError(f"{self.name}: dtype {out.dtype} is not one of {', '.join(str(d) for d in self.DTYPES)}")
        if x.shape != out.shape:
            raise ValueError(f"{self.name}: x has shape {list(x.shape)} and out {list(out.shape)}; they must be equal")
        if x.data_ptr() != out.data_ptr():
            self._check_apart("out", out, "x", x)
        algorithm, direct, what = self._choose(out.nbytes), False, ("out of shape {} and {}", out.shape, out.dtype)
        pulled = overwrite_x and x.data_ptr() != out.data_ptr()
        if algorithm == "two_shot":  # the others copy anyway, so that places do not matter
            places = [self.place_of_vectors(x)]
            if pulled:
                what = ("x of shape {} and {}, which may be overwritten", out.shape, out.dtype)
            else:
                places.insert(0, self.place_of_vectors(out))
            direct, self._tag = self._agree_on_places(*what, places=places)
        else:
            self._tag = self._agree(*what)
        if out.numel() == 0:
            return out
        flat_out, flat_x = out.view(-1), x.view(-1)
        if self.n_pes == 1:
            if x is not out:
                out.copy_(x)
        elif self._parts:
            self._over_nodes(algorithm, direct, pulled, flat_out, flat_x)
        else:
            self._explained(lambda: self._directly(algorithm, direct, pulled, flat_out, flat_x))
        return out

    def is_faster_overwritten(self, nbytes: int) -> bool:
        """Whether a result comes sooner from a symmetric `x` that may be overwritten than from one that lies elsewhere."""
        fits = self._choose(nbytes) == "two_shot" and nbytes % VECTOR_BYTES == 0
        return fits and (self.n_pes == 2 or nbytes > self._staging_bytes)

    def is_copied_in_pieces(self, nbytes: int) -> bool:
        """Whether a tensor that is not symmetric takes several kernels, and a symmetric one a single one."""
        return self._choose(nbytes) == "two_shot" and nbytes > self._staging_bytes and nbytes % VECTOR_BYTES == 0

    def _choose(self, nbytes: int) -> str:
        if self._parts:
            is_small = self.n_pes <= MOST_GATHERED and self.n_pes * nbytes <= min(GATHERED_UP_TO, self._staging_bytes)
            if is_small and self._algorithm == "auto":
                return "gather"
            # Tensors can be used where they lie if every PE's part has as many vectors.
            return "two_shot" if nbytes % (self.n_pes * VECTOR_BYTES) == 0 else "parts"
        if self.n_pes == 1:
            return "parts"
        if self._algorithm != "auto":
            return self._algorithm
        if nbytes <= self._packet_capacity * packets.DATA_BYTES:
            return "packets"
        return "one_shot" if nbytes <= self._one_shot_capacity * VECTOR_BYTES else "two_shot"

    def _directly(self, algorithm: str, direct: bool, pulled: bool, out: torch.Tensor, x: torch.Tensor) -> None:
        if algorithm == "packets":
            self._in_pieces(self._by_packets, self._packet_capacity * packets.DATA_BYTES, out, x)
        elif algorithm == "one_shot":
            self._in_pieces(self._by_one_shot, self._one_shot_capacity * VECTOR_BYTES, out, x)
        elif direct:
            source = x.view(-1, VECTOR_BYTES // x.element_size())
            self._by_two_shot(out, x, source if pulled else out.view(source.shape), source, pulled=pulled)
        else:
            self._in_pieces(self._by_staged_two_shot, self._staging_bytes, out, x)

    def _in_pieces(self, run, nbytes: int, out: torch.Tensor, x: torch.Tensor) -> None:
        size = nbytes // out.element_size()
        for first in range(0, out.numel(), size):
            run(out[first : first + size], x[first : first + size])

    def _by_packets(self, out: torch.Tensor, x: torch.Tensor) -> None:
        kernel = packets.all_reduce_packets(
            self.n_pes, dtype_name(out.dtype), self._packet_capacity, is_aligned(packets.DATA_BYTES, out, x), self.threads,
            self._packet_blocks,
        )  # fmt: skip
        values = self._packets.view(out.dtype)
        words = self._packets.view(torch.uint64), self._packet_calls
        kernel(out, x, self._tag, self._agreement.status, values, *words)

    def _by_one_shot(self, out: torch.Tensor, x: torch.Tensor) -> None:
        kernel = all_reduce_one_shot(
            self.n_pes,
            dtype_name(out.dtype),
            self._one_shot_capacity,
            is_aligned(VECTOR_BYTES, out, x),
            self.threads,
            self.blocks,
        )
        kernel(out, x, self._tag, self._agreement.status, self._inbox.view(out.dtype), *self._one_shot_words)

    def _by_staged_two_shot(self, out: torch.Tensor, x: torch.Tensor) -> None:
        vectors = (
            tensor.view(out.dtype).view(-1, VECTOR_BYTES // out.element_size())
            for tensor in (self._target, self._source)
        )
        self._by_two_shot(out, x, *vectors, staged=True)

    def _by_two_shot(self, out, x, target, source, staged: bool = False, pulled: bool = False) -> None:
        aligned, dtype = is_aligned(VECTOR_BYTES, out, x), dtype_name(out.dtype)
        kernel = all_reduce_two_shot(self.n_pes, dtype, staged, pulled, aligned, self.threads, self.blocks)
        kernel(out, x, target, source, self._tag, self._agreement.status, *self._two_shot_words)

    def _over_nodes(self, algorithm: str, direct: bool, pulled: bool, out: torch.Tensor, x: torch.Tensor) -> None:
        """Where some PEs are on other nodes."""
        if algorithm == "gather":
            self._by_gather(out, x)
        elif direct and pulled:
            self._by_parts(x, x)
            out.copy_(x)
        elif direct:
            self._by_parts(out, x)
        else:
            self._in_pieces(self._by_staged_parts, self._staging_bytes, out, x)

    def _by_parts(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """The parts' sums, then those of all PEs. Both tensors are symmetric."""
        reduce, gather = self._parts
        rows = out.view(self.n_pes, -1)
        reduce(rows[self.rank], x.view(self.n_pes, -1))
        gather(rows, rows[self.rank])

    def _by_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        _, gather = self._parts
        rows = self._source[: self.n_pes * x.nbytes].view(x.dtype).view(self.n_pes, -1)
        rows[self.rank].copy_(x)
        gather(rows, rows[self.rank])
        sum_of_rows(self.n_pes, dtype_name(x.dtype), self.threads)(out, rows)

    def _by_staged_parts(self, out: torch.Tensor, x: torch.Tensor) -> None:
        vector = VECTOR_BYTES // out.element_size()
        part = -(-out.numel() // (self.n_pes * vector)) * vector
        whole = self._source.view(out.dtype)[: self.n_pes * part]
        whole[: out.numel()].copy_(x)
        self._by_parts(whole, whole)
        out.copy_(whole[: out.numel()])

    def free(self) -> None:
        """Give the symmetric memory back. Collective; the object cannot be called afterwards."""
        self._check_alive()
        parts, self._parts = self._parts, ()
        for collective in parts:
            collective.free()
        super().free()
