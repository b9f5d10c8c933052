"""What all-gather and all-to-all with equal splits share on the host: how their parts move, chosen by size and place."""

from __future__ import annotations

import torch

import tilescale_net as tsn
from tilescale_net.kernels.collective import Collective, is_aligned
from tilescale_net.kernels.sum_of_peers import VECTOR_BYTES
from tilescale_net.kernels.vector_streams import UNROLL

ALGORITHMS = ("auto", "puts", "stores", "bulk", "pull")
# Bytes of a part from which stores are faster than puts: a block's puts go to one PE after the other.
STORES_FROM = 256 * 1024
# Vectors that the registers of a block hold of a tile and of the one after.
TILE_VECTORS = 4096


class Exchange(Collective):
    """Base of the two.

    Args:
        name, shown, group: see `Collective`.
        threads, blocks, engine, unroll, ring: see `exchange`.
        stores_from, algorithm: see `AllGather`.
    """

    def __init__(
        self, name, shown, threads, blocks, engine, unroll, ring, stores_from, algorithm, group: tsn.Group = None
    ):
        if algorithm not in ALGORITHMS:
            raise ValueError(f"{name}: algorithm is {algorithm!r}; it must be {', '.join(ALGORITHMS)}")
        shown = f"engine={engine}, unroll={unroll}, ring={ring}, algorithm={algorithm}{shown}"
        super().__init__(name, shown, threads, blocks, group)
        if algorithm == "bulk" and blocks < self.n_pes:
            raise ValueError(f"{name}: blocks is {blocks}; algorithm bulk needs one for each of {self.n_pes} PEs")
        engine = "bulk" if algorithm == "bulk" and engine == "auto" else engine
        self._options = dict(threads=threads, blocks=blocks, engine=engine, unroll=unroll, ring=ring)
        self._algorithm, self._stores_from, self._spread = algorithm, stores_from, algorithm == "bulk"
        self._mapped_options = dict(
            threads=threads, blocks=blocks, unroll=max(1, min(unroll or UNROLL, 16, TILE_VECTORS // threads))
        )

    def _agree_on_parts(self, describe: str, x: torch.Tensor, out: torch.Tensor, part: int, in_place: bool) -> int:
        """The tag of a call. `part` is the number of bytes that a PE gets from another."""
        arguments = describe + " of shape {} and {}, out at heap offset {}", x.shape, x.dtype, self.place(out)
        if self._algorithm != "pull":
            return self._agree(*arguments)
        aligned = is_aligned(VECTOR_BYTES, out) and part % VECTOR_BYTES == 0 and not self._sources_travel
        place = self.place_of_vectors(out if in_place else x) if aligned else None
        mapped, tag = self._agree_on_places(*arguments, places=[place, int(in_place)])
        if not mapped:
            raise ValueError(
                f"{self.name}: x of shape {list(x.shape)} cannot be pulled on all ranks: it must be symmetric, at the same "
                "place of all heaps and mapped, and x, out and their parts aligned to 16 bytes; or choose another algorithm"
            )
        return tag

    def _by_vectors(self, x: torch.Tensor, out: torch.Tensor, part: int) -> bool:
        """Whether parts go through registers, over mapped memory. Ranks may differ in this, but for "pull"."""
        if self._algorithm == "auto":
            wanted = part >= self._stores_from
        else:
            wanted = self._algorithm in ("stores", "pull")
        return wanted and not self._sources_travel and is_aligned(VECTOR_BYTES, x, out) and part % VECTOR_BYTES == 0
