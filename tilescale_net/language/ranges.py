"""Ranges of a kernel in the timeline of TSN_TRACE."""

import contextlib
from types import TracebackType

from tvm import tirx
from tvm.tirx.script import builder

from tilescale_net.compiler.operators import OPERATORS
from tilescale_net.language._trace import PrimitiveError, as_typed, primitive

__all__ = ["range"]


class _Range(contextlib.AbstractContextManager[None]):
    def __init__(self, begin: tirx.Call, end: tirx.Call) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        builder.evaluate(self._begin)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            builder.evaluate(self._end)


@primitive
def range(name: str) -> contextlib.AbstractContextManager[None]:
    """Name a part of a kernel for the timeline: `with N.range("send"):`. Lane 0 of each warp that enters it records it.

    Without TSN_TRACE it is no code on a GPU; accesses to memory are not moved into or out of it. Leave the range at its
    end: a range that ends by `T.thread_return` is not recorded.

    Args:
        name: shown in the timeline; not empty.

    Example: with N.range("send"): N.put_block(y, x, pe)
    """
    if not isinstance(name, str) or not name or not name.isprintable():
        raise PrimitiveError(f"the name of a range is a text that can be shown, not {name!r}")
    begin, end = OPERATORS["range_begin"](name), OPERATORS["range_end"]()
    return _Range(as_typed(begin), as_typed(end))
