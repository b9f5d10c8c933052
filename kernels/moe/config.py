"""The configuration of an all-to-all, checked once."""

from dataclasses import dataclass, fields

import torch

from tilescale_net.kernels.moe.dropping import DROPS
from tilescale_net.kernels.moe.row_ops import groups_of

FP8 = torch.float8_e4m3fn
COMBINE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("expert", "rank")


@dataclass(frozen=True)
class Traits:
    """What a mode offers; checks of arguments ask for a trait, not for the mode.

    Attributes:
        layouts: of the rows that dispatch gives.
        max_tokens: the largest that it takes; None: any.
        reuses_plan: dispatch takes the handle of an earlier one instead of choices.
        quantises_rows: dispatch quantises rows on the way where `dtype` is FP8.
        weighs_rows: combine takes weights of expert-major rows, and brings numbers of them back.
        weighs_choices: combine takes weights of the choices.
        counts_tiles: dispatch tells which tiles are there, and combine sends those that are.
    """

    layouts: tuple[str, ...] = LAYOUTS
    max_tokens: int | None = None
    reuses_plan: bool = False
    quantises_rows: bool = False
    weighs_rows: bool = False
    weighs_choices: bool = False
    counts_tiles: bool = False


# What the host's checks know of each mode; implementations.py names its class.
MODES = {
    "throughput": Traits(reuses_plan=True, weighs_rows=True, counts_tiles=True),
    "latency": Traits(layouts=("expert",), max_tokens=1024, quantises_rows=True, weighs_choices=True),
}


@dataclass(frozen=True)
class Config:
    """What all ranks must agree on; see AllToAll for the meaning of each field. Raises ValueError or TypeError."""

    ranks: int
    num_experts: int
    max_tokens: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    mode: str
    layout: str
    alignment: int
    capacity: int
    combine_dtype: torch.dtype
    quantize_combine: bool
    zero_copy: bool
    scale_words: int
    expert_capacity: int | None = None
    drop: str = DROPS[0]
    tile_rows: int | None = None
    column_scales: bool = False

    def __post_init__(self):
        whole = ["num_experts", "max_tokens", "hidden", "top_k", "alignment", "capacity"]
        for name in [*whole, *(n for n in ("expert_capacity", "tile_rows") if getattr(self, n) is not None)]:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"AllToAll: {name} is {value!r}; it must be a whole number of 1 or more")
        if self.num_experts % self.ranks:
            raise ValueError(
                f"AllToAll: num_experts is {self.num_experts}; it must be a multiple of the number of ranks ({self.ranks})"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"AllToAll: top_k is {self.top_k}; it must be at most num_experts, {self.num_experts}")
        if self.dtype not in (*COMBINE_DTYPES, FP8):
            raise TypeError(f"AllToAll: dtype is {self.dtype}; it must be one of {[*COMBINE_DTYPES, FP8]}")
        if self.combine_dtype not in COMBINE_DTYPES:
            raise TypeError(f"AllToAll: combine_dtype is {self.combine_dtype}; it must be one of {[*COMBINE_DTYPES]}")
        for name, dtype in (("dtype", self.dtype), ("combine_dtype", self.combine_dtype)):
            if self.hidden * dtype.itemsize % 16:
                raise ValueError(
                    f"AllToAll: hidden is {self.hidden}, a row of {self.hidden * dtype.itemsize} bytes of {name}; rows must "
                    "be a multiple of 16 bytes"
                )
        if type(self.scale_words) is not int or (self.scale_words < 1) == (self.dtype == FP8):
            wanted = "a whole number of 1 or more for float8_e4m3fn rows, and not given for others"
            raise ValueError(f"AllToAll: scale_words is {self.scale_words!r}; it must be {wanted}")
        if self.mode not in MODES:
            raise ValueError(f"AllToAll: mode is {self.mode!r}; it must be one of {', '.join(MODES)}")
        if self.drop not in DROPS:
            raise ValueError(f"AllToAll: drop is {self.drop!r}; it must be one of {', '.join(DROPS)}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"AllToAll: layout is {self.layout!r}; it must be one of {', '.join(LAYOUTS)}")
        limit, others = self.traits.max_tokens, [m for m, t in MODES.items() if t.max_tokens is None]
        if limit is not None and self.max_tokens > limit:
            raise ValueError(
                f'AllToAll: max_tokens is {self.max_tokens}; {self.mode} mode takes up to {limit}, use mode="{others[0]}"'
            )
        if self.layout not in self.traits.layouts:
            has = " and ".join(m for m, t in MODES.items() if self.layout in t.layouts)
            raise ValueError(f'AllToAll: layout "{self.layout}" exists in {has} mode only')
        if self.tile_rows is not None:
            self._check_tiles()
        if not isinstance(self.column_scales, bool):
            raise TypeError(f"AllToAll: column_scales is {self.column_scales!r}; it must be True or False")
        if self.column_scales and not self.scale_words:
            raise ValueError("AllToAll: column_scales goes with float8_e4m3fn rows, which have scales")

    def _check_tiles(self) -> None:
        if not self.traits.counts_tiles or self.layout != "expert":
            has = " and ".join(m for m, t in MODES.items() if t.counts_tiles)
            raise ValueError(
                f'AllToAll: tile_rows is {self.tile_rows}; tiles are counted in {has} mode with layout "expert"'
            )
        if self.alignment % self.tile_rows:
            raise ValueError(
                f"AllToAll: tile_rows is {self.tile_rows}; alignment, {self.alignment}, must be a multiple of it, so that a "
                "tile is of one expert"
            )

    @property
    def tiles(self) -> int:
        """Tiles of `tile_rows` rows of which a dispatch and a combine know when they are there; 0: none."""
        return 0 if self.tile_rows is None else -(-self.capacity // self.tile_rows)

    @property
    def traits(self) -> Traits:
        return MODES[self.mode]

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.ranks

    def most_rows(self, max_tokens: int) -> int:
        """Rows that a rank receives at most from so many tokens of each; layout "expert": with the gaps of alignment."""
        if self.layout == "rank":
            return self.ranks * max_tokens
        return min(self.capacity, self.ranks * max_tokens * self.top_k + self.local_experts * (self.alignment - 1))

    @property
    def row_bytes(self) -> int:
        """Bytes of a dispatched row."""
        return self.hidden * self.dtype.itemsize

    @property
    def row_words(self) -> int:
        return self.row_bytes // 4

    @property
    def can_quantise(self) -> bool:
        """Whether rows may be quantised on their way: to FP8, with a scale per 128 elements."""
        return self.traits.quantises_rows and self.dtype == FP8 and self.scale_words == groups_of(self.hidden)

    @property
    def signature(self) -> tuple:
        """What a handle must have been made with to be used: sizes that its tensors and its rows depend on."""
        shared = (self.ranks, self.num_experts, self.max_tokens, self.top_k, self.mode)
        return (*shared, self.alignment, self.capacity) if self.traits.reuses_plan else shared

    def describe(self) -> str:
        """Every field that is given, for the agreement of all ranks."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name}={value}" for name, value in values if value is not None)


def default_capacity(
    ranks: int, experts: int, max_tokens: int, top_k: int, alignment: int, expert_capacity: int | None = None
) -> int:
    """Expert-major rows that a rank receives at most if no token names an expert twice, with the gaps of alignment."""
    local = max(1, experts // ranks)
    worst = ranks * max_tokens * min(top_k, local) + local * (alignment - 1)
    if type(expert_capacity) is not int or expert_capacity < 1:
        return worst
    return min(worst, local * -(-ranks * expert_capacity // alignment) * alignment)


def configure(
    ranks, num_experts, max_tokens, hidden, top_k, dtype=torch.bfloat16, mode="throughput", *, layout="expert", alignment=1,
    capacity=None, combine_dtype=None, quantize_combine=False, zero_copy=True, scale_words=None, expert_capacity=None,
    drop=DROPS[0], tile_rows=None, column_scales=False,
) -> Config:  # fmt: skip
    """The configuration, with the defaults that depend on others filled in."""
    if combine_dtype is None:
        combine_dtype = torch.bfloat16 if dtype == FP8 else dtype
    if capacity is None:
        capacity = default_capacity(ranks, num_experts, max_tokens, top_k, alignment, expert_capacity)
    if scale_words is None:
        known = dtype == FP8 and isinstance(hidden, int)
        scale_words = groups_of(hidden) if known else 0
    return Config(
        ranks, num_experts, max_tokens, hidden, top_k, dtype, mode, layout, alignment, capacity, combine_dtype,
        quantize_combine, zero_copy, scale_words, expert_capacity, drop, tile_rows, column_scales,
    )  # fmt: skip


def as_words(tensor: torch.Tensor, words: int) -> torch.Tensor:
    """Rows as 4-byte words: [rows, words], without a copy."""
    tensor = tensor.view(torch.int32)
    return tensor if tensor.dim() == 2 else tensor.view(-1, words)
