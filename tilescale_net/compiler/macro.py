"""`tsn.macro`: T.macro that costs an import nothing."""

import functools
from collections.abc import Callable

from tilelang.language.eager.ast import mutate
from tilelang.language.eager.builder import Macro, get_type_hints

from tilescale_net.errors import KernelError


class _Macro(Macro):
    def __init__(self, function: Callable):
        self.name = function.__name__
        self.orig_func = function
        self.annotations = get_type_hints(function)

    @functools.cached_property
    def ir_gen(self):
        return mutate(self.orig_func)


def macro(function: Callable) -> Macro:
    """A macro as `T.macro` makes it, whose function is translated when a kernel first uses it, not when it is defined.

    tilelang takes about 20 ms for a macro of 20 lines, which every process that imports its module would pay. Meant for
    macros of modules; what a nested one refers to may have changed by its first use.

    Raises:
        KernelError: `function` is not a Python function.
    """
    if not hasattr(function, "__annotations__") or not hasattr(function, "__code__"):
        raise KernelError(f"tilescale_net.macro decorates functions, not {function!r}")
    return _Macro(function)
