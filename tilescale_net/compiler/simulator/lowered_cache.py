"""Kernels lowered for the simulator, from tilelang or from an earlier run: lowering takes tilelang up to two seconds."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable

from tilelang import tvm
from tvm.tirx import PrimFunc

from tilescale_net.compiler import toolchain
from tilescale_net.compiler.simulator import cache, host_source, host_stub
from tilescale_net.runtime import job_store


@dataclasses.dataclass(frozen=True)
class Lowered:
    """What a simulated kernel is made of.

    It holds texts only: TVM takes longer to read its own form of a host module than all else that an earlier run leaves to do.

    Attributes:
        kernel_source: CUDA source.
        unit: the same as C++ for the host.
        host_function: code of checks and launch geometry, see host_stub.py.
        n_arguments: how many arguments the host function takes.
    """

    kernel_source: str
    unit: host_source.HostSource
    host_function: str
    n_arguments: int

    @classmethod
    def from_artifact(cls, name: str, artifact) -> Lowered:
        """From a `tilelang.engine.param.CompiledArtifact`. Raises SimulatorUnsupported, which names the kernel."""
        return cls(
            artifact.kernel_source,
            host_source.translate(name, artifact.kernel_source),
            host_stub.compiled(name, host_stub.translate(name, artifact.host_mod)),
            len(artifact.params),
        )

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"unit": self.unit.fields()})

    @classmethod
    def parse(cls, text: str) -> Lowered:
        """From `text()`. Raises ValueError, KeyError or TypeError for anything else."""
        fields = job_store.parse_json(text)
        if not isinstance(fields, dict):
            raise TypeError("it is no kernel")
        unit = host_source.HostSource.from_fields(fields.pop("unit"))
        return cls(unit=unit, **fields)


@functools.cache
def versions() -> tuple[str, ...]:
    """Versions of what lowers kernels, and of the interpreter's code."""
    packages = [importlib.metadata.version(package) for package in ("tilelang", "apache-tvm-ffi")]
    return (*packages, importlib.util.MAGIC_NUMBER.hex())


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
        *versions(),
    ]
    key = hashlib.sha256("\0".join(depends_on).encode()).hexdigest()[:24]
    return cache.get_or_write(
        name, key, ".lowered", lambda: Lowered.from_artifact(name, lower(func, target, pass_configs)), Lowered.parse
    )
