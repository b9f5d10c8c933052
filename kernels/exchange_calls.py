"""What all-gather and all-to-all with equal splits share on the host: how their parts move, chosen by size and place."""

from __future__ import annotations

import torch

import tilescale_net as tsn

from .collective import Collective, is_aligned
from .sum_of_peers import VECTOR_BYTES
from .vector_streams import UNROLL

ALGORITHMS = ("auto", "puts", "stores")
# Bytes of a part from which stores are taken; they were faster than puts in all sizes measured, from 32 KiB on.
STORES_FROM = 4096
# As many push fastest when all PEs send at once; in the simulator, where times mean nothing, each one costs.
BLOCKS, SIMULATED_BLOCKS = 64, 16
# Vectors that the registers of a block hold of a tile and of the one after.
TILE_VECTORS = 4096


class Exchange(Collective):
    """Base of the two.

    Args:
        name, shown, group: see `Collective`.
        threads, blocks, engine, unroll, ring, stores_from, algorithm: see `AllGather`.
    """

    def __init__(
        self, name: str, shown: str, threads: int, blocks: int | None, engine: str, unroll: int | None,
        ring: tuple[int, int] | None, stores_from: int, algorithm: str, group: tsn.Group = None,
    ):  # fmt: skip
        if algorithm not in ALGORITHMS:
            raise ValueError(f"{name}: algorithm is {algorithm!r}; it must be {', '.join(ALGORITHMS)}")
        if blocks is None:
            blocks = BLOCKS if tsn.world(group).device_kind == "cuda" else SIMULATED_BLOCKS
        shown = f"engine={engine}, unroll={unroll}, ring={ring}, algorithm={algorithm}{shown}"
        super().__init__(name, shown, threads, blocks, group)
        self._options = dict(
            threads=threads, blocks=blocks, engine=engine, unroll=unroll, ring=ring, least_bytes=self._least_bytes
        )
        self._algorithm, self._stores_from = algorithm, stores_from
        self._mapped_options = dict(
            threads=threads, blocks=blocks, unroll=max(1, min(unroll or UNROLL, 16, TILE_VECTORS // threads))
        )

    def _by_vectors(self, x: torch.Tensor, out: torch.Tensor, part: int) -> bool:
        """Whether parts of as many bytes go through registers, over mapped memory. Ranks may differ in this."""
        wanted = part >= self._stores_from if self._algorithm == "auto" else self._algorithm == "stores"
        return wanted and not self._sources_travel and is_aligned(VECTOR_BYTES, x, out) and part % VECTOR_BYTES == 0
