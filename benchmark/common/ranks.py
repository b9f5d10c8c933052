"""Rank and size as the launcher set them, readable before anything is initialised."""

from __future__ import annotations

import os


def _from_environment(names: tuple[str, ...], default: int) -> int:
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return default


def rank() -> int:
    """This process's rank: RANK (launch.sh, torchrun) or SLURM_PROCID (srun), else 0."""
    return _from_environment(("RANK", "SLURM_PROCID"), 0)


def world_size() -> int:
    """Number of ranks: WORLD_SIZE or SLURM_NTASKS, else 1."""
    return _from_environment(("WORLD_SIZE", "SLURM_NTASKS"), 1)


def is_rank_zero() -> bool:
    """Whether this process is the one that prints and writes files."""
    return rank() == 0
