"""Names of host calls in profiles: ranges of torch.profiler while it runs, and NVTX ranges where TSN_NVTX asks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from tilescale_net.runtime import settings

F = TypeVar("F", bound=Callable)
_nvtx: bool | None = None  # what TSN_NVTX said when the first named call was made


def named(name: str) -> Callable[[F], F]:
    """A decorator: calls of the function are ranges `name`. Without a profiler it costs a tenth of a microsecond."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args, **kwargs):
            if not (_profiled() or _wants_nvtx()):
                return function(*args, **kwargs)
            if _profiled():
                with torch.profiler.record_function(name):
                    return function(*args, **kwargs)
            torch.cuda.nvtx.range_push(name)
            try:
                return function(*args, **kwargs)
            finally:
                torch.cuda.nvtx.range_pop()

        return call

    return decorate


_profiled = torch.autograd._profiler_enabled


def _wants_nvtx() -> bool:
    global _nvtx
    if _nvtx is None:
        _nvtx = settings.NVTX.get() and torch.cuda.is_available()
    return _nvtx
