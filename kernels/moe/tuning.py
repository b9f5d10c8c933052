"""What may be chosen freely: launch geometry and message sizes. Results do not depend on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tilescale_net.kernels.collective import check_threads
from tilescale_net.kernels.moe.config import Config
from tilescale_net.kernels.moe.routing import BLOCK_SHARED, bytes_of_choice, fixed_bytes, width_of


@dataclass(frozen=True)
class Tuning:
    """Choices for one AllToAll; None: the default of `defaults`. Equal on all ranks.

    Attributes:
        blocks: of every kernel; all of them must run at once.
        threads: of a block, a multiple of 32.
        dispatch_senders, combine_senders: throughput mode: how many of the blocks send (layout "rank": all of them
            dispatch).
        combine_threads: throughput mode: of a block of combine, which wants more registers per thread.
        chunk: throughput mode: rows per signal between mapped ranks.
        proxied_bytes: throughput mode: of a message to another node, about.
        once_per_node: a row crosses the network once per node, where nodes have several ranks; else once per rank, which
            takes less memory in throughput mode.
        parts: latency mode: into how many parts to cut a row of combine, about.
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

    def resolved(self, config: Config, device: torch.device) -> Tuning:
        """With every None replaced, for ranks on such a device.

        Raises ValueError for what makes no sense; what the GPU cannot run is checked later.
        """
        on_gpu = device.type == "cuda"
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 0
        mode, default = config.mode, defaults(config, on_gpu, multiprocessors)
        given = {name: value for name, value in vars(self).items() if value is not None}
        for name, value in given.items():
            if name == "once_per_node":
                if not isinstance(value, bool):
                    raise ValueError(f"AllToAll: once_per_node is {value!r}; it must be True or False")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"AllToAll: {name} is {value!r}; it must be a whole number of 1 or more")
        made = replace(default, **given)
        if self.blocks is not None:  # keep the proportion
            shares = {
                n: max(1, getattr(default, n) * made.blocks // default.blocks) for n in _SENDERS if n not in given
            }
            made = replace(made, **shares)
        if mode == "throughput" and made.blocks < 2:
            raise ValueError(
                f"AllToAll: blocks is {made.blocks}; throughput mode needs 2, one to send and one to receive"
            )
        for name in _SENDERS if mode == "throughput" else ():
            if not 1 <= getattr(made, name) < made.blocks:
                raise ValueError(
                    f"AllToAll: {name} is {getattr(made, name)}; it must be between 1 and {made.blocks - 1}"
                )
        check_threads("AllToAll", "combine_threads", made.combine_threads, config.ranks)
        if mode == "throughput":
            _check_shared(config, made.blocks)
        return made


def shares(tuning: Tuning, blocks: int) -> tuple[int, int]:
    """How many of `blocks` send in dispatch and in combine, in the proportion of the tuning."""

    def part(senders: int) -> int:
        return senders if blocks == tuning.blocks else min(blocks - 1, max(1, senders * blocks // tuning.blocks))

    return part(tuning.dispatch_senders), part(tuning.combine_senders)


def most_tokens(config: Config, blocks: int) -> int:
    """Tokens of a call of throughput mode whose choices fit into the shared memory of so many blocks."""
    ordered = config.tile_rows is not None
    sizes = config.num_experts, config.ranks, ordered
    cells = (BLOCK_SHARED - fixed_bytes(*sizes) - 8 * width_of(*sizes)) // bytes_of_choice(ordered)
    return max(0, cells // config.top_k - 1) * blocks


def _check_shared(config: Config, blocks: int) -> None:
    """Raise ValueError where the part of the choices that a block sorts does not fit into its shared memory."""
    if config.max_tokens > (most := most_tokens(config, blocks)):
        raise ValueError(
            f"AllToAll: max_tokens is {config.max_tokens}; with {blocks} blocks, top_k {config.top_k} and "
            f"{config.num_experts} experts it is {most} at most: give more blocks (Tuning), or dispatch in "
            "parts"
        )


_SENDERS = ("dispatch_senders", "combine_senders")


def defaults(config: Config, on_gpu: bool, multiprocessors: int) -> Tuning:
    """The choices that were measured best on 2 and 4 H200s; the simulator runs threads in turn, so it gets few."""
    if not on_gpu:
        return Tuning(4, 64, 2, 2, 64)
    if config.mode == "latency":
        return Tuning(multiprocessors, 256, 1, 1, 256)
    # Rows that are summed or converted before they travel cost the senders more than those who receive them.
    if config.layout == "expert" or config.quantize_combine:
        senders = 22
    else:  # the more ranks, the smaller the part of the rows that stays here, and the more is sent
        senders = 13 if config.ranks <= 2 else 16
    # Four-byte elements leave registers for fewer warps.
    return Tuning(24, 512, 14, senders, 384 if config.combine_dtype.itemsize >= 4 else 512)
