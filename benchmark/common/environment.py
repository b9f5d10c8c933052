"""What a figure depends on besides the code: ranks, hardware and versions, without anything that names the host."""

import datetime
import os
import re
import subprocess
import sys
from importlib import metadata

from tilescale_net.cli import machine


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


ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Abbreviated commit of the checkout, with `-dirty` when files differ from it; None outside a checkout."""
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            names = re.findall(r"^model name\s*:\s*(.+)$", f.read(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else "unknown model"


def _gpus() -> str:
    """Names of the visible GPUs with their counts; from torch, which every benchmark that uses GPUs has imported."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))


def environment() -> dict[str, str]:
    """Name and value of everything that belongs in a report's header, in the order it is shown.

    Versions come from the installed packages' metadata, so nothing is imported for their sake. Callers add what only
    they know, such as the fabric provider and libfabric's version.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "cores": f"{len(os.sched_getaffinity(0))} x {_processor()}",
        "GPUs": _gpus(),
        "ranks": str(world_size()),
        "driver": machine.driver(),
        "CUDA": cuda,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": _version("torch"),
        "tilelang": _version("tilelang"),
        "tilescale_net": _commit() or _version("tilescale_net"),
    }
    return {name: value for name, value in found.items() if value}
