"""All-gather by push: every PE puts its part into the same place of the output of every PE."""

import torch

import tilescale_net as tsn
from tilescale_net.runtime.profiling import named

from .collective import as_bytes, as_vectors, check_chunk
from .exchange import exchange
from .exchange_calls import STORES_FROM, Exchange
from .exchange_mapped import exchange_mapped
from .moe.row_ops import EXPLICIT_SYNC
from .node_all_gather import node_all_gather
from .partition import MIN_BYTES
from .vector_streams import UNROLL


@tsn.jit(name="all_gather")
def all_gather(
    n_pes, dtype="uint8", threads=512, blocks=16, in_place=False, engine="auto", unroll=None, ring=None,
    least_bytes=MIN_BYTES,
):  # fmt: skip
    """Kernel `(out, x, tag, status, calls, ready, arrived)`: afterwards `out[p]` is the `x` of PE p, for all p; see `exchange`."""
    return exchange(n_pes, dtype, threads, blocks, engine, unroll, ring, least_bytes, split=False, in_place=in_place)


@tsn.jit(name="all_gather_mapped", pass_configs=EXPLICIT_SYNC)
def all_gather_mapped(n_pes, threads=512, blocks=16, unroll=UNROLL, in_place=False):
    """Kernel `(out, x, tag, status, calls, ready, arrived)`; see `exchange_mapped`."""
    return exchange_mapped(n_pes, threads, blocks, unroll, split=False, in_place=in_place)


class AllGather(Exchange):
    """All-gather of tensors of any dtype and size; constructed and called by all ranks.

    Args:
        threads, engine, unroll, ring: see `exchange`.
        blocks: default 64; in the simulator 16.
        algorithm: "stores" to mapped PEs, where `x`, `out` and its parts are aligned to 16 bytes, else puts; "puts" always;
            "auto": by puts and, from `stores_from` bytes of `x`, by stores.
        once_per_node: where nodes have several ranks, a part crosses the network once per node; else once per rank.
        chunk_bytes: of a part that is passed on within a node while the next bytes are under way.
        group: whose ranks these are; see `tilescale_net.world`.

    Raises:
        ValueError: a launch geometry that the kernel or the GPU cannot run.
        RankMismatch: ranks that want different ones.
    """

    def __init__(
        self,
        *,
        threads: int = 512,
        blocks: int | None = None,
        engine: str = "auto",
        unroll: int | None = None,
        ring: tuple[int, int] | None = None,
        stores_from: int = STORES_FROM,
        algorithm: str = "auto",
        once_per_node: bool = True,
        chunk_bytes: int = 256 * 1024,
        group: "tsn.Group" = None,
    ) -> None:
        check_chunk("AllGather", chunk_bytes)
        shown = f", once_per_node={once_per_node}, chunk_bytes={chunk_bytes}"
        super().__init__("AllGather", shown, threads, blocks, engine, unroll, ring, stores_from, algorithm, group)
        self._over_nodes = once_per_node and self.has_gateways
        self._chunk_bytes = chunk_bytes
        self._calls = self.counters(self.blocks)
        self._ready, self._arrived = self._signals(self.n_pes), self._signals(self.n_pes, self.blocks)

    @named("tilescale_net.AllGather")
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
            RankMismatch: ranks that pass different shapes, dtypes or places of `out` in the heap. Between those nothing
                moves. Raised at once where arguments are new, else by the next call or `check`.
        """
        self._begin()
        self._check("out", out, symmetric=True)
        self._check("x", x, out.dtype, symmetric=self._sources_travel)
        self._check_parts("out", out, "x", x)
        in_place = x.data_ptr() == out.data_ptr() + self.rank * x.nbytes
        if not in_place:
            self._check_apart("out", out, "x", x)
        tag = self._agree("x of shape {} and {}, out at heap offset {}", x.shape, x.dtype, self.place(out))
        if x.nbytes:
            words = tag, self._agreement.status, self._calls, self._ready, self._arrived
            if self._by_vectors(x, out, x.nbytes):
                kernel = all_gather_mapped(self.n_pes, **self._mapped_options, in_place=in_place)
                kernel(as_vectors(out), as_vectors(x), *words)
            else:
                if self._over_nodes:
                    geometry = self._world.topology.node_size, self._chunk_bytes
                    kernel = node_all_gather(self.n_pes, *geometry, in_place=in_place, **self._options)
                else:
                    kernel = all_gather(self.n_pes, in_place=in_place, **self._options)
                kernel(as_bytes(out, self.n_pes, x.nbytes), as_bytes(x, x.nbytes), *words)
            self._raise_mismatch_if_simulated()
        return out
