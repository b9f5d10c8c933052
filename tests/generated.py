"""CUDA source, PTX and machine code of kernels for sm_90, as tests look at them.

nvcc spends most of its time on headers, so that kernels with blocks of one size are compiled together. tilelang simplifies a
kernel nine times, which takes it five times as long as all else; once leaves the code as it is, but for some expressions and
conditions. Most tests are content with that; tests that look at what ships, and the nightly run, are not.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests import sass
from tilescale_net.compiler import inspect, jit
from tilescale_net.compiler.ir import kernel_name
from tilescale_net.compiler.jit import KernelFactory, known_threads
from tilescale_net.compiler.passes import prepare
from tilescale_net.compiler.simulator.lowering import SimplifyOnce


@dataclass(frozen=True)
class Code:
    """One kernel's code.

    Attributes:
        source: of the kernel alone.
        ptx: of the kernel, then of the functions that are not inlined, which all kernels share.
        cubin: of all kernels that were compiled with it.
        entry: the kernel's name there.
    """

    source: str
    ptx: str
    cubin: bytes
    entry: str

    @functools.cached_property
    def instructions(self) -> list[str]:
        """Names of the machine's instructions with their suffixes, in order."""
        return sass.names(self.cubin, self.entry)

    @functools.cached_property
    def schedule(self) -> list[sass.Instruction]:
        return sass.schedule(self.cubin, self.entry)


@dataclass(frozen=True)
class Traced:
    source: str
    entry: str
    threads: int | None
    flags: tuple[str, ...]

    @classmethod
    def of(cls, factory: KernelFactory, arguments: dict, target: dict, ships: bool = True) -> Traced:
        func = factory.trace(**arguments)
        configs = jit.required_pass_configs(func, factory.pass_configs)
        instruments = () if ships else [SimplifyOnce()]
        source = jit.lower(prepare(func).func, target, configs, instruments).kernel_source
        threads = known_threads(func, factory.pass_configs)
        return cls(source, f"{kernel_name(func)}_kernel", threads, factory.compile_flags)


def factory_of(name: str) -> KernelFactory:
    """A kernel by its module and its name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def kernels_of(package) -> set[str]:
    """Names, as `factory_of` takes them, of the kernels that the modules of a package define, without its packages'."""
    modules = [m.name for m in pkgutil.iter_modules(package.__path__, package.__name__ + ".") if not m.ispkg]
    found = {
        (m, name, value)
        for m in modules
        for name, value in vars(importlib.import_module(m)).items()
        if isinstance(value, KernelFactory)
    }
    return {f"{module}.{name}" for module, name, value in found if value.__module__ == module}


class Generated:
    """Code of kernels, compiled when a test needs one: it, and all of `cases` with the same blocks and flags.

    Args:
        cases: factories with the arguments that most tests ask for.
        target: of the compiler.
        ships: the code that `tsn.jit` makes; without it, kernels are simplified once.
    """

    def __init__(self, cases: Iterable[tuple[KernelFactory, dict]], target: dict = inspect.SM_90, ships: bool = True):
        self._cases, self._target, self._ships = list(cases), target, ships
        self._code: dict[tuple, Code] = {}

    def code(self, factory: KernelFactory, **arguments) -> Code:
        key = _key(factory, arguments)
        if key not in self._code:
            asked = self._traced.get(key) or Traced.of(factory, arguments, self._target, self._ships)
            alike = {k: t for k, t in self._traced.items() if (t.threads, t.flags) == (asked.threads, asked.flags)}
            self._compile(alike if key in alike else {key: asked})
        return self._code[key]

    @functools.cached_property
    def _traced(self) -> dict[tuple, Traced]:
        return {_key(f, arguments): Traced.of(f, arguments, self._target, self._ships) for f, arguments in self._cases}

    def _compile(self, kernels: dict[tuple, Traced]) -> None:
        entries = {key: f"{kernel.entry}_{i}" for i, (key, kernel) in enumerate(kernels.items())}
        sources = [
            _alone(re.sub(rf"\b{k.entry}\b", entries[key], k.source), i) for i, (key, k) in enumerate(kernels.items())
        ]
        one = next(iter(kernels.values()))
        with tempfile.TemporaryDirectory() as folder:
            extra = (*one.flags, "--keep", f"--keep-dir={folder}")
            cubin = inspect.compile_source("\n".join(sources), "cubin", self._target, extra, one.threads)
            ptx = (Path(folder) / "kernel.ptx").read_text()
        _, *parts = re.split(r"(?m)^(?=(?:\.visible |\.weak )*\.(?:entry|func) )", ptx)
        functions = "".join(part for part in parts if ".entry" not in part)
        bodies = {re.search(r"\.entry (\w+)", part)[1]: part for part in parts if ".entry" in part}
        for (key, kernel), source in zip(kernels.items(), sources):
            self._code[key] = Code(source, bodies[entries[key]] + functions, cubin, entries[key])


def _alone(source: str, number: int) -> str:
    """A kernel's source with names of its own for dynamic shared memory, which others may declare with another type."""
    for name in re.findall(r"extern __shared__ [^;]*?(\w+)\[\];", source):
        source = re.sub(rf"\b{name}\b", f"{name}_{number}", source)
    return source


def _key(factory: KernelFactory, arguments: dict) -> tuple:
    return (factory, *sorted(arguments.items()))
