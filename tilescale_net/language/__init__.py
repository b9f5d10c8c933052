"""Primitives of a kernel: `import tilescale_net.language as N`, next to `import tilelang.language as T`.

    @tsn.jit
    def ring(n, threads=128):
        @T.prim_func
        def kernel(ctx: N.Context(), x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32"),
                   flag: T.Tensor((1,), "uint64")):
            with T.Kernel(1, threads=threads):
                N.put_signal_block(y, x, (N.my_pe() + 1) % N.n_pes(), flag[0], 1)
                N.wait_block(flag[0], "ge", 1)
        return kernel

Sizes are in elements. A local tensor names symmetric memory. docs/memory-model.md states the guarantees. Misuse raises
KernelError when the kernel is built, naming the primitive and the line.

A primitive in an expression is executed once, before the rest of its statement, from left to right; after `and`, `or`
and in an arm of `a if c else b` only if that part is evaluated, and in the condition of a `while` in every iteration.
"""

import difflib as _difflib

from tilescale_net.errors import KernelError as _KernelError
from tilescale_net.language import _trace, copies, memory, order, ranges, signals, streams, topology
from tilescale_net.language.copies import *
from tilescale_net.language.memory import *
from tilescale_net.language.order import *
from tilescale_net.language.ranges import *
from tilescale_net.language.signals import *
from tilescale_net.language.streams import *
from tilescale_net.language.topology import *

__all__: list[str] = []
__all__ += copies.__all__
__all__ += memory.__all__
__all__ += order.__all__
__all__ += ranges.__all__
__all__ += signals.__all__
__all__ += streams.__all__
__all__ += topology.__all__

_trace.silence_dumps()


class _NoPrimitive(_KernelError, AttributeError):
    """Error of an unknown primitive: an AttributeError as of any module, and a KernelError while a kernel is built."""


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> None:
    if name.startswith("_"):  # Python's own look-ups
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    near = [known for known in __all__ if known.startswith(f"{name}_")] or _difflib.get_close_matches(name, __all__)
    hint = f"; did you mean {' or '.join(f'N.{known}' for known in near)}?" if near else ""
    raise _NoPrimitive(f"there is no primitive N.{name}{hint}{_trace.author_place()}")
