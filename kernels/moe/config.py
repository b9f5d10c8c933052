"""Configuration of an AllToAll, checked once, and its tuning, which does not change results."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from tilescale_net.kernels.collective import check_threads, is_integer
from tilescale_net.kernels.moe.routing import BLOCK_SHARED, bytes_of_choice, fixed_bytes, width_of
from tilescale_net.kernels.moe.row_ops import groups_of
from tilescale_net.runtime import tuned

if TYPE_CHECKING:
    from tilescale_net.runtime.world import World


FP8_DTYPE = torch.float8_e4m3fn
COMBINE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("expert", "rank")
# Choices of an expert that are not dropped:
DROPS = (
    "position",  # choices of the first tokens
    "choice",  # all first choices before all second ones, and so on; then by token
    "weight",  # choices with the largest weights; then by token
)


@dataclass(frozen=True)
class ModeCapabilities:
    """Capabilities of a mode; argument checks ask for a capability, not for the mode.

    Attributes:
        layouts: layouts of dispatched rows.
        max_tokens: upper limit of `max_tokens`; None: no limit.
        reuses_plan: dispatch takes the handle of an earlier dispatch instead of choices.
        quantises_rows: dispatch quantises rows if `dtype` is FP8.
        weighs_rows: combine takes weights of expert-major rows, and returns values of them.
        weighs_choices: combine takes weights of the choices.
        counts_tiles: dispatch announces complete tiles, and combine sends complete tiles.
    """

    layouts: tuple[str, ...] = LAYOUTS
    max_tokens: int | None = None
    reuses_plan: bool = False
    quantises_rows: bool = False
    weighs_rows: bool = False
    weighs_choices: bool = False
    counts_tiles: bool = False


# Capabilities of each mode for the host's checks; `buffers.IMPLEMENTATIONS` names its class.
MODES = {
    "throughput": ModeCapabilities(reuses_plan=True, weighs_rows=True, counts_tiles=True),
    "latency": ModeCapabilities(layouts=("expert",), max_tokens=1024, quantises_rows=True, weighs_choices=True),
}


@dataclass(frozen=True)
class Config:
    """Arguments that are equal on all ranks; AllToAll documents each field. Raises ValueError or TypeError."""

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

    def __post_init__(self) -> None:
        whole = ["num_experts", "max_tokens", "hidden", "top_k", "alignment", "capacity"]
        for name in [*whole, *(n for n in ("expert_capacity", "tile_rows") if getattr(self, n) is not None)]:
            value = getattr(self, name)
            if not is_integer(value):
                raise ValueError(f"AllToAll: {name} is {value!r}; it must be a positive integer")
        if self.num_experts % self.ranks:
            raise ValueError(
                f"AllToAll: num_experts is {self.num_experts}; it must be a multiple of the number of ranks ({self.ranks})"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"AllToAll: top_k is {self.top_k}; it must be at most num_experts, {self.num_experts}")
        if self.dtype not in (*COMBINE_DTYPES, FP8_DTYPE):
            raise TypeError(f"AllToAll: dtype is {self.dtype}; it must be one of {[*COMBINE_DTYPES, FP8_DTYPE]}")
        if self.combine_dtype not in COMBINE_DTYPES:
            raise TypeError(f"AllToAll: combine_dtype is {self.combine_dtype}; it must be one of {[*COMBINE_DTYPES]}")
        for name, dtype in (("dtype", self.dtype), ("combine_dtype", self.combine_dtype)):
            if self.hidden * dtype.itemsize % 16:
                raise ValueError(
                    f"AllToAll: hidden is {self.hidden}, a row of {self.hidden * dtype.itemsize} bytes of {name}; rows must "
                    "be a multiple of 16 bytes"
                )
        if type(self.scale_words) is not int or (self.scale_words < 1) == (self.dtype == FP8_DTYPE):
            expected = "a positive integer for float8_e4m3fn rows, and not given for others"
            raise ValueError(f"AllToAll: scale_words is {self.scale_words!r}; it must be {expected}")
        if self.mode not in MODES:
            raise ValueError(f"AllToAll: mode is {self.mode!r}; it must be one of {', '.join(MODES)}")
        if self.drop not in DROPS:
            raise ValueError(f"AllToAll: drop is {self.drop!r}; it must be one of {', '.join(DROPS)}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"AllToAll: layout is {self.layout!r}; it must be one of {', '.join(LAYOUTS)}")
        limit, others = self.capabilities.max_tokens, [m for m, t in MODES.items() if t.max_tokens is None]
        if limit is not None and self.max_tokens > limit:
            raise ValueError(
                f'AllToAll: max_tokens is {self.max_tokens}; {self.mode} mode takes up to {limit}, use mode="{others[0]}"'
            )
        if self.layout not in self.capabilities.layouts:
            has = " and ".join(m for m, t in MODES.items() if self.layout in t.layouts)
            raise ValueError(f'AllToAll: layout "{self.layout}" exists in {has} mode only')
        if self.tile_rows is not None:
            self._check_tiles(self.tile_rows)
        if not isinstance(self.column_scales, bool):
            raise TypeError(f"AllToAll: column_scales is {self.column_scales!r}; it must be True or False")
        if self.column_scales and not self.scale_words:
            raise ValueError("AllToAll: column_scales goes with float8_e4m3fn rows, which have scales")

    def _check_tiles(self, tile_rows: int) -> None:
        if not self.capabilities.counts_tiles or self.layout != "expert":
            has = " and ".join(m for m, t in MODES.items() if t.counts_tiles)
            raise ValueError(
                f'AllToAll: tile_rows is {self.tile_rows}; tiles are counted in {has} mode with layout "expert"'
            )
        if self.alignment % tile_rows:
            raise ValueError(
                f"AllToAll: tile_rows is {self.tile_rows}; alignment, {self.alignment}, must be a multiple of it, so that a "
                "tile is of one expert"
            )

    @property
    def tiles(self) -> int:
        """Tiles of `tile_rows` rows that dispatch and combine count; 0: none."""
        return 0 if self.tile_rows is None else -(-self.capacity // self.tile_rows)

    @property
    def capabilities(self) -> ModeCapabilities:
        return MODES[self.mode]

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.ranks

    def most_rows(self, max_tokens: int) -> int:
        """Rows that a rank receives at most from this many tokens of each; layout "expert": with the gaps of alignment."""
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
        return (
            self.capabilities.quantises_rows and self.dtype == FP8_DTYPE and self.scale_words == groups_of(self.hidden)
        )

    @functools.cached_property
    def signature(self) -> tuple:
        """Sizes on which a handle's tensors and rows depend; a handle is valid for calls of the same signature."""
        shared = (self.ranks, self.num_experts, self.max_tokens, self.top_k, self.mode)
        return (*shared, self.alignment, self.capacity) if self.capabilities.reuses_plan else shared

    def describe(self) -> str:
        """Text of all fields that are not None, which the ranks compare."""
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
    ranks: int, num_experts: int, max_tokens: int, hidden: int, top_k: int, dtype: torch.dtype = torch.bfloat16,
    mode: str = "throughput", *, layout: str = "expert", alignment: int = 1, capacity: int | None = None,
    combine_dtype: torch.dtype | None = None, quantize_combine: bool | str = False, zero_copy: bool = True,
    scale_words: int | None = None, expert_capacity: int | None = None, drop: str = DROPS[0], tile_rows: int | None = None,
    column_scales: bool = False,
) -> Config:  # fmt: skip
    """The configuration, with the defaults that depend on others filled in."""
    if quantize_combine not in (False, True, "always"):
        raise ValueError(f'AllToAll: quantize_combine is {quantize_combine!r}; it must be False, True or "always"')
    if combine_dtype is None:
        combine_dtype = torch.bfloat16 if dtype == FP8_DTYPE else dtype
    if capacity is None:
        sizes = num_experts, max_tokens, top_k, alignment, expert_capacity
        known = all(isinstance(n, int | None) for n in sizes)  # else Config names the wrong value
        capacity = default_capacity(ranks, *sizes) if known else 1
    if scale_words is None:
        known = dtype == FP8_DTYPE and isinstance(hidden, int)
        scale_words = groups_of(hidden) if known else 0
    return Config(
        ranks, num_experts, max_tokens, hidden, top_k, dtype, mode, layout, alignment, capacity, combine_dtype,
        bool(quantize_combine), zero_copy, scale_words, expert_capacity, drop, tile_rows, column_scales,
    )  # fmt: skip


def reject_slower_combine(config: Config) -> None:
    """Raise ValueError for `quantize_combine` between GPUs that map each other's memory, if rows of `combine_dtype` were
    measured to be as fast or faster."""
    if config.mode == "throughput":
        took = {"rank": "507 us instead of 504", "expert": "990 us instead of 697"}[config.layout]
        raise ValueError(
            f'AllToAll: quantize_combine with layout "{config.layout}" is no faster between GPUs that NVLink connects: 4096 tokens '
            f"took {took} as bfloat16 (four H100); quantising costs the few SMs of throughput mode more than the bytes it "
            'saves. Leave it out, or pass quantize_combine="always"'
        )


def as_words(tensor: torch.Tensor, words: int) -> torch.Tensor:
    """Rows as 4-byte words: [rows, words], without a copy."""
    tensor = tensor.view(torch.int32)
    return tensor if tensor.dim() == 2 else tensor.view(-1, words)


@dataclass(frozen=True)
class Tuning:
    """Launch geometry and message sizes of one AllToAll, equal on all ranks; None: the default of `defaults`.

    Args:
        blocks: blocks of every kernel; all of them must be able to run at once.
        threads: threads per block, a multiple of 32.
        dispatch_senders, combine_senders: throughput mode: number of blocks that send (layout "rank": all of them dispatch).
        combine_threads: throughput mode: threads per block of combine, which needs more registers per thread.
        chunk: throughput mode: rows per signal between mapped ranks.
        proxied_bytes: throughput mode: approximate bytes of a message to another node.
        once_per_node: a row crosses the network once per node, if nodes have several ranks; otherwise once per rank, which
            takes less memory in throughput mode.
        parts: latency mode: approximate number of parts of a row in combine.
    """

    blocks: int | None = None
    threads: int | None = None
    dispatch_senders: int | None = None
    combine_senders: int | None = None
    combine_threads: int | None = None
    chunk: int = 4
    proxied_bytes: int = 256 * 1024
    once_per_node: bool = True
    parts: int = 2

    def resolved(self, config: Config, device: torch.device, num_sms: int = 0) -> Tuning:
        """Replace every None, for ranks on such a device.

        Args:
            num_sms: SMs of a GPU that this host may lack, instead of `device`.

        Raises ValueError for invalid values; the GPU's limits are checked later.
        """
        if device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        mode = config.mode
        default: Any = defaults(config, num_sms > 0, num_sms)  # without a None
        explicit = {name: value for name, value in vars(self).items() if value is not None}
        for name, value in explicit.items():
            if name == "once_per_node":
                if not isinstance(value, bool):
                    raise ValueError(f"AllToAll: once_per_node is {value!r}; it must be True or False")
            elif not is_integer(value):
                raise ValueError(f"AllToAll: {name} is {value!r}; it must be a positive integer")
        tuning: Any = replace(default, **explicit)
        if self.blocks is not None:  # keep the proportion
            shares = {
                n: max(1, getattr(default, n) * tuning.blocks // default.blocks) for n in _SENDERS if n not in explicit
            }
            tuning = replace(tuning, **shares)
        if mode == "throughput" and tuning.blocks < 2:
            raise ValueError(
                f"AllToAll: blocks is {tuning.blocks}; throughput mode needs 2, one to send and one to receive"
            )
        for name in _SENDERS if mode == "throughput" else ():
            if not 1 <= getattr(tuning, name) < tuning.blocks:
                raise ValueError(
                    f"AllToAll: {name} is {getattr(tuning, name)}; it must be between 1 and {tuning.blocks - 1}"
                )
        check_threads("AllToAll", "combine_threads", tuning.combine_threads, config.ranks)
        if mode == "throughput":
            _check_shared(config, tuning.blocks)
        return tuning


def shares(tuning: Any, blocks: int) -> tuple[int, int]:
    """Number of `blocks` that send in dispatch and in combine, in proportion to a resolved Tuning."""

    def part(senders: int) -> int:
        return senders if blocks == tuning.blocks else min(blocks - 1, max(1, senders * blocks // tuning.blocks))

    return part(tuning.dispatch_senders), part(tuning.combine_senders)


def most_tokens(config: Config, blocks: int) -> int:
    """Tokens of a call of throughput mode whose choices fit into the shared memory of this many blocks."""
    ordered = config.tile_rows is not None
    sizes = config.num_experts, config.ranks, ordered
    cells = (BLOCK_SHARED - fixed_bytes(*sizes) - 8 * width_of(*sizes)) // bytes_of_choice(ordered)
    return max(0, cells // config.top_k - 1) * blocks


def _check_shared(config: Config, blocks: int) -> None:
    """Raise ValueError if a block's part of the choices does not fit into its shared memory."""
    if config.max_tokens > (most := most_tokens(config, blocks)):
        raise ValueError(
            f"AllToAll: max_tokens is {config.max_tokens}; with {blocks} blocks, top_k {config.top_k} and "
            f"{config.num_experts} experts it is {most} at most: give more blocks (Tuning), or dispatch in "
            "parts"
        )


_SENDERS = ("dispatch_senders", "combine_senders")


def defaults(config: Config, on_gpu: bool, num_sms: int) -> Tuning:
    """The choices that were measured best on 2 and 4 H200s; the simulator runs threads in turn, so it gets few."""
    if not on_gpu:
        return Tuning(4, 64, 2, 2, 64)
    if config.mode == "latency":
        return Tuning(num_sms, 256, 1, 1, 256)
    # Summing or converting rows before sending costs senders more than receivers.
    if config.layout == "expert" or config.quantize_combine:
        senders = 22
    else:  # with more ranks fewer rows stay here and more are sent
        senders = 13 if config.ranks <= 2 else 16
    # Four-byte elements need more registers per thread.
    return Tuning(24, 512, 14, senders, 384 if config.combine_dtype.itemsize >= 4 else 512)


# Fields of Tuning that may be tuned: symmetric memory does not depend on them.
TUNED = ("blocks", "threads", "dispatch_senders", "combine_senders", "combine_threads")


def key_of(config: Config) -> str:
    """Key of tuned values: shared by objects up to the next power of two of tokens."""
    c = config
    dtypes = " ".join(str(d).removeprefix("torch.") for d in (c.dtype, c.combine_dtype))
    return (
        f"moe {c.mode} {c.layout} {dtypes} quantize={c.quantize_combine} experts={c.num_experts} top_k={c.top_k} "
        f"hidden={c.hidden} tokens<={tuned.up_to(c.max_tokens)}"
    )


def chosen(config: Config, world: World) -> Tuning:
    """The tuned values of a configuration, else the default. Collective the first time in a world."""
    key = key_of(config)
    choice = tuned.of(world, "AllToAll").get(key)
    if choice is not None:
        try:
            if unknown := choice.keys() - {*TUNED}:
                raise ValueError(f"it names {', '.join(sorted(unknown))}")
            tuning = Tuning(**choice)
            tuning.resolved(config, world.device)
            return tuning
        except (TypeError, ValueError) as err:  # on all ranks alike
            tuned.ignore(world, key, err)
    return Tuning()
