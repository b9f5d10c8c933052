"""What every primitive shares: where it may be called, and errors that name it and the author's line."""

import functools
import inspect
import os
import sys

from tilelang.ir import make_span
from tilelang.language.eager.builder import Builder
from tilelang.language.kernel import KernelLaunchFrame
from tvm import tirx
from tvm.tirx.script import builder

from tilescale_net.compiler.ir import opaque_call
from tilescale_net.compiler.operators import TYPED, guard_condition
from tilescale_net.errors import KernelError
from tilescale_net.language._results import in_condition, once

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_typed: list[str] = []  # names of the primitives that are being traced, the author's first


class PrimitiveError(Exception):
    """A primitive was called wrongly; `primitive` turns it into a KernelError with the author's line."""


def author_line() -> tuple[str, int]:
    """File and line of the nearest caller outside this package; a traced kernel's body runs as real Python frames."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _error(function, error: Exception) -> KernelError:
    file, line = author_line()
    return KernelError(f"N.{function.__name__}: {error}\n  at {file}:{line}")


def primitive(function):
    """Decorate a primitive: it must be called inside a kernel body, and what it raises names it and the line.

    Raises (from the decorated function):
        KernelError: any PrimitiveError, wrong arguments in Python's sense, or a call outside `with T.Kernel(...)`.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _error(function, _by_name(signature, error)) from None
        _typed.append(f"N.{function.__name__}")
        try:
            if Builder.current() is None or KernelLaunchFrame.Current() is None:
                raise PrimitiveError(
                    "is only meaningful inside a kernel, that is, under `with T.Kernel(...)` of a T.prim_func"
                )
            result = function(*args, **kwargs)
            if not isinstance(result, tirx.Call):
                return result
            # Passes that find something wrong later on name the call by this.
            result = as_typed(result)
        except PrimitiveError as error:
            raise _error(function, error) from None
        finally:
            _typed.pop()
        return once(function.__name__, result) if _is_once(result) else result

    return call


def _by_name(signature: inspect.Signature, error: TypeError) -> TypeError:
    """An error of arguments, with the names of options that were given without."""
    options = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    if not options or "too many positional" not in str(error):
        return error
    places = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return TypeError(f"{error}; it takes {', '.join(places)} in this order, and {', '.join(options)} by name only")


def _is_once(call: tirx.Call) -> bool:
    """Whether a primitive's result is to be computed once: a value, and not one that is the same every time."""
    return str(call.dtype) not in ("", "void", "handle") and opaque_call(call) is not None


def as_typed(call: tirx.Call) -> tirx.Call:
    """The same call, which passes and reports find at the author's line and by the name that the author typed."""
    return _marked(call, make_span(*author_line()), {TYPED: tirx.StringImm(_typed[0])})


def _marked(call: tirx.Call, span, annotations: dict) -> tirx.Call:
    ours = [isinstance(a, tirx.Call) and a.op.name.startswith("tsn.") for a in call.args]
    args = [_marked(a, span, annotations) if own else a for own, a in zip(ours, call.args)]
    return tirx.Call(call.dtype, call.op, args, annotations=annotations, span=span)


def guarded(place, call: tirx.Call) -> tirx.PrimExpr | None:
    """Make a single access to `place`, an Operand, vanish where its index is outside, as tilelang does for plain accesses.

    Loads then give 0. tilelang's own pass leaves calls of operators that it does not know alone. The simulator reports
    such an index instead, see compiler/simulator/bounds.py.
    """
    if place.inside is None:
        return call
    inside = guard_condition(place.buffer.name, place.inside, place.axes)
    if str(call.dtype):  # TVM prints the void type as nothing
        return tirx.if_then_else(inside, call, tirx.const(0, call.dtype))
    with builder.If(inside), builder.Then():
        evaluate(call)
    return None


def evaluate(call: tirx.Call) -> None:
    """Make `call` a statement of its own, here. Raises PrimitiveError in a condition, which nothing can come before."""
    if in_condition():
        raise PrimitiveError("stands in a condition; call it before, and bind its result to a name")
    builder.evaluate(as_typed(call))


def block_threads() -> int:
    """Threads per block of the kernel being traced; 128, tilelang's default, where T.Kernel was given none."""
    launch = KernelLaunchFrame.Current()
    return 128 if launch.thread_extents is None else launch.get_num_threads()
