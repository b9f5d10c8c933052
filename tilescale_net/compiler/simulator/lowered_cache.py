"""Kernels lowered for the simulator, from tilelang or from an earlier run: lowering takes tilelang up to two seconds."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tilelang import tvm
from tvm.tirx import PrimFunc

from tilescale_net.compiler import toolchain
from tilescale_net.compiler.simulator import cache


@dataclass(frozen=True)
class Lowered:
    """What a simulated kernel is made of.

    Attributes:
        kernel_source: CUDA source.
        host_mod: tilelang's host module (an IRModule), which holds checks and launch geometry.
        n_arguments: how many arguments the host function takes.
    """

    kernel_source: str
    host_mod: tvm.IRModule
    n_arguments: int

    @classmethod
    def from_artifact(cls, artifact) -> Lowered:
        """From a `tilelang.engine.param.CompiledArtifact`."""
        return cls(artifact.kernel_source, artifact.host_mod, len(artifact.params))

    def text(self) -> str:
        host = tvm.ir.save_json(self.host_mod)
        return json.dumps({"source": self.kernel_source, "host": host, "arguments": self.n_arguments})

    @classmethod
    def parse(cls, text: str) -> Lowered:
        """From `text()`. Raises ValueError or KeyError for anything else."""
        fields = json.loads(text)
        return cls(fields["source"], tvm.ir.load_json(fields["host"]), fields["arguments"])


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(importlib.metadata.version(package) for package in ("tilelang", "apache-tvm-ffi"))


def get_or_build(name: str, func: PrimFunc, target: dict, pass_configs: dict, lower: Callable) -> Lowered:
    """`lower(func, target, pass_configs)`, or what it was when the same was lowered before by the same versions.

    Args:
        name: the kernel's name, for file names.
        lower: returns a `tilelang.engine.param.CompiledArtifact`.
    """
    depends_on = [
        tvm.ir.save_json(func),
        json.dumps([target, pass_configs], sort_keys=True, default=str),
        toolchain.sources_hash(),
        *_versions(),
    ]
    key = hashlib.sha256("\0".join(depends_on).encode()).hexdigest()[:24]
    made: list[Lowered] = []

    def make(work: Path) -> Path:
        made.append(Lowered.from_artifact(lower(func, target, pass_configs)))
        out = work / "kernel.lowered"
        out.write_text(made[0].text())
        return out

    while True:
        path = cache.get_or_build(name, key, ".lowered", make)
        if made:
            return made[0]
        try:
            return Lowered.parse(cache.unseal(path.read_bytes()).decode())
        except (OSError, ValueError, KeyError, TypeError):  # another program has removed or damaged it
            path.unlink(missing_ok=True)
