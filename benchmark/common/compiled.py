"""Compilation of kernels: time by stage, and how to forget kernels so that they are searched again."""

import contextlib
import sys
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from benchmark.common.report import is_rank_zero


def forget() -> None:
    """Forget kernels: the next use searches the disk, and compiles missing ones."""
    import tilelang.cache

    from tilescale_net.compiler.jit import KernelFactory

    for kernels in tilelang.cache._dispatch_map.values():
        cast(Any, vars(kernels)["_memory_cache"]).clear()  # of tilelang, by the kernel's text
    for name, module in [*sys.modules.items()]:
        if name.startswith("tilescale_net.kernels"):
            for value in vars(module).values():
                if isinstance(value, KernelFactory):
                    value.forget()


def together(calls: Sequence[Callable[[], object]]) -> None:
    """Compile kernels at the same time, each by one rank of a host, and print the time. Collective.

    Args:
        calls: compile one each, the same on all ranks.
    """
    import tilescale_net as tsn
    from tilescale_net.compiler.jit import compile_together

    place, begin = tsn.world().topology, time.perf_counter()
    compile_together(calls, tsn.device(), place.local_rank, place.node_size)
    if is_rank_zero():
        print(f"{len(calls)} kernels were ready after {time.perf_counter() - begin:.1f} s", flush=True)


class Stages:
    """Compile time of each kernel of this package, in seconds, by name and stage; the longest of a name."""

    NAMES = ("trace", "prepare", "lower", "nvcc", "link")

    def __init__(self) -> None:
        self.of_kernel: dict[str, dict[str, float]] = {}
        self._thread = threading.local()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record kernels that are compiled within this context."""
        from tilescale_net.compiler import ir, jit, shipped

        written = jit.write_library

        def whole(library: Any, func: Any, *rest: Any) -> Any:
            made = written(library, func, *rest)
            spent = {stage: self._spent().pop(stage, 0.0) for stage in self.NAMES}
            spent["lower"] -= spent["nvcc"]
            name = ir.kernel_name(func)
            if sum(spent.values()) > sum(self.of_kernel.get(name, {}).values()):
                self.of_kernel[name] = spent
            return made

        with contextlib.ExitStack() as patches:
            for place, attribute, stage in (
                (jit.KernelFactory, "trace", "trace"),
                (jit, "prepare", "prepare"),
                (shipped, "lower", "lower"),
                (shipped, "compile_cuda", "nvcc"),
                (shipped, "link", "link"),
            ):
                timed = self._timed(getattr(place, attribute), stage)
                patches.enter_context(unittest.mock.patch.object(place, attribute, timed))
            patches.enter_context(unittest.mock.patch.object(jit, "write_library", whole))
            yield

    def _spent(self) -> dict[str, float]:
        found: dict[str, float] = vars(self._thread).setdefault("spent", {})
        return found

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if stage == "trace":  # the first of a kernel
                    self._spent().clear()
                self._spent()[stage] = self._spent().get(stage, 0.0) + time.perf_counter() - begin

        return call
