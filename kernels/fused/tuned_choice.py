"""What was tuned for a product: which way a call takes, and the geometry of the fused one; see `tilescale_net.tuning`."""

from dataclasses import dataclass

from tilescale_net.runtime import tuned

from .choice import Product
from .matmul import Tiling
from .matmul_reduce_scatter import check_ring

ENGINES = ("auto", "ldst", "bulk")
_FIELDS = ("tile", "stages", "panel", "columns")


@dataclass(frozen=True)
class Chosen:
    """How a call is made.

    Attributes:
        fused: by the fused kernels; else the product and the collective one after the other,
        pipelined: or an all-gather by copy engines beside cuBLAS.
        tiling, blocks, engine: of the fused call.
    """

    fused: bool
    tiling: Tiling = Tiling()
    blocks: int = 1
    engine: str = "auto"
    pipelined: bool = False

    @property
    def options(self) -> dict[str, object]:
        """For the constructor of the product's class."""
        return {"tiling": self.tiling, "blocks": self.blocks, "engine": self.engine}


def key_of(product: Product) -> str:
    """Of calls that one choice serves: up to the next power of two of rows."""
    p = product
    return f"{p.kind} {str(p.dtype).removeprefix('torch.')} k={p.k} n={p.n} rows<={tuned.up_to(p.rows)}"


def as_choice(chosen: Chosen) -> tuned.Choice:
    """As it is kept."""
    if not chosen.fused:
        return {"fused": False, "pipelined": True} if chosen.pipelined else {"fused": False}
    t = chosen.tiling
    return {
        "fused": True, "tile": list(t.tile), "stages": t.stages, "panel": t.panel, "columns": t.columns,
        "blocks": chosen.blocks, "engine": chosen.engine,
    }  # fmt: skip


def of_choice(choice: tuned.Choice, product: Product) -> Chosen:
    """What was kept. Raises ValueError for what makes no sense for the product."""
    fused = choice.get("fused")
    if fused is False:
        pipelined = choice.get("pipelined", False)
        if not isinstance(pipelined, bool) or (pipelined and product.kind != "all_gather_matmul"):
            raise ValueError(f"{choice} is no choice for a product")
        return Chosen(False, pipelined=pipelined)
    tile, blocks, engine = choice.get("tile"), choice.get("blocks"), choice.get("engine")
    if fused is not True or not isinstance(tile, list) or engine not in ENGINES:
        raise ValueError(f"{choice} is no choice for a product")
    if isinstance(blocks, bool) or not isinstance(blocks, int) or not 1 <= blocks <= 64:
        raise ValueError(f"blocks is {blocks!r}; it must be between 1 and 64")
    tiling = Tiling(tuple(tile), *(choice.get(name) for name in _FIELDS[1:]))  # type: ignore[arg-type]
    if product.kind != "all_gather_matmul":
        check_ring(product.kind, tiling, product.dtype)
    return Chosen(True, tiling, blocks, engine)


def chosen(product: Product, world) -> Chosen | None:
    """What was tuned for a call, or None. Collective the first time in a world."""
    key = key_of(product)
    choice = tuned.of(world, "fused products").get(key)
    if choice is None:
        return None
    try:
        return of_choice(choice, product)
    except (TypeError, ValueError) as err:  # on all ranks alike
        tuned.ignore(world, key, err)
        return None
