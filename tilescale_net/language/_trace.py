"""Common parts of traced primitives: checks of their place, values computed exactly once, scope misuse, and errors that
name the primitive and the author's line.

TVM expands `%`, `//`, `abs` and the guards of indices by repeating operands, and simplifies others away, as if calls had
no effect. So a value that must be computed once is bound to a variable as soon as it is traced, and expressions hold the
variable.

If a part of an expression is evaluated only under a condition (the right side of `and` and `or`, the arms of `a if c
else b`) or repeatedly (the condition of `while`), the place of the computation is known only after the whole statement:
the trace records the variable's value, and compiler/passes/effects.py finds the place.
"""

import functools
import inspect
import logging
import math
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import tilelang  # noqa: F401 (makes `tvm` importable)
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder
from tvm.tirx.script.builder.frame import IfFrame, WhileFrame
from tvm.tirx.stmt_functor import post_order_visit, substitute

from tilescale_net.compiler.ir import Node, loads_memory, opaque_call, splits
from tilescale_net.compiler.operators import TYPED, guard_condition
from tilescale_net.compiler.passes.effects import UNNAMED, deferred, has_effect
from tilescale_net.compiler.versions import (
    BoolOpFrame,
    Builder,
    KernelLaunchFrame,
    eager_builder,
    get_let_value,
    has_let_value,
    make_span,
    threads_of_launch,
)
from tilescale_net.errors import KernelError

P = ParamSpec("P")
R = TypeVar("R")
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_typed: list[str] = []  # names of the primitives being traced, the author's first


class PrimitiveError(Exception):
    """A primitive was called wrongly; `primitive` turns it into a KernelError with the author's line."""


def author_line() -> tuple[str, int]:
    """File and line of the nearest caller outside this package; a traced kernel's body runs as real Python frames."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _error(function: Callable[..., Any], error: Exception) -> KernelError:
    file, line = author_line()
    return KernelError(f"N.{function.__name__}: {error}\n  at {file}:{line}")


def primitive(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a primitive: it must be called inside a kernel body, and its errors name it and the line.

    Raises (from the decorated function):
        KernelError: any PrimitiveError, wrong arguments in Python's sense, or a call outside `with T.Kernel(...)`.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
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
            # Later passes name the call in errors by this.
            result = as_typed(result)
        except PrimitiveError as error:
            raise _error(function, error) from None
        finally:
            _typed.pop()
        return once(function.__name__, result) if _is_once(result) else result

    return call


def _by_name(signature: inspect.Signature, error: TypeError) -> TypeError:
    """An error of arguments, with the names of options that were passed by position."""
    options = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    if not options or "too many positional" not in str(error):
        return error
    places = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return TypeError(f"{error}; it takes {', '.join(places)} in this order, and {', '.join(options)} by name only")


def _is_once(call: tirx.Call) -> bool:
    """Whether a primitive's result must be computed once: a value that may change."""
    return str(call.dtype) not in ("", "void", "handle") and opaque_call(call) is not None


def as_typed(call: tirx.Call) -> tirx.Call:
    """The same call, annotated with the author's line and name for passes and reports."""
    return _marked(call, make_span(*author_line()), {TYPED: tirx.StringImm(_typed[0])})


def _marked(call: tirx.Call, span: Any, annotations: dict[str, Any]) -> tirx.Call:
    ours = [isinstance(a, tirx.Call) and a.op.name.startswith("tsn.") for a in call.args]
    args = [_marked(a, span, annotations) if own else a for own, a in zip(ours, call.args)]
    return tirx.Call(call.dtype, call.op, args, annotations=annotations, span=span)


def guarded(place: Any, call: tirx.Call) -> tirx.PrimExpr | None:
    """Make a single access to `place`, an Operand, vanish if its index is outside, as in tilelang's plain accesses.

    Loads then give 0. tilelang's own pass ignores calls of unknown operators. The simulator reports
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
    """Make `call` a statement of its own, here. Raises PrimitiveError in a condition, before which no statement
    fits."""
    if in_condition():
        raise PrimitiveError("stands in a condition; call it before, and bind its result to a name")
    builder.evaluate(as_typed(call))


def block_threads() -> int:
    """Threads per block of the kernel being traced; 128, tilelang's default, if T.Kernel got none."""
    return math.prod(threads_of_launch(KernelLaunchFrame.Current()) or (128,))


# -- values that are computed once ------------------------------------------------------------------------------------


def once(name: str, value: tirx.PrimExpr) -> tirx.Var:
    """A variable with `value`, computed here, or where the condition being traced needs it."""
    if in_condition():
        variable = tirx.Var(UNNAMED + name, value.dtype)
        builder.evaluate(deferred(variable, value))
        return variable
    variable = builder.bind(value)
    IRBuilder.name(UNNAMED + name, variable)
    return variable


def settled(name: str, value: Any, loads: bool = False) -> Any:
    """`value`, or a variable for it if it has a call with an effect (or a load, if `loads`)."""
    if isinstance(value, tirx.PrimExpr) and (has_effect(value) or (loads and loads_memory(value))):
        return once(name, value)
    return value


def in_condition() -> bool:
    """Whether the trace is inside an expression that is evaluated under a condition, or inside the condition of a loop."""
    if Builder.current().find_frame_idx(BoolOpFrame) is not None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is Builder.ctx_while.__code__:
            return True
        frame = frame.f_back
    return False


# -- scope misuse -----------------------------------------------------------------------------------------------------

WARP = 32


def require_converged(scope: str) -> None:
    """Raise PrimitiveError when an enclosing condition provably splits a block or a warp.

    Conditions on run-time values are taken on trust; the simulator finds the rest. T.Parallel is checked in passes/__init__.py,
    because a loop's kind is not known while its body is traced.
    """
    if scope == "thread":
        return
    for frame in Builder.current().frames:
        if isinstance(frame, (IfFrame, WhileFrame)) and _splits(frame.condition, scope):
            raise PrimitiveError(
                f"is made at {scope} scope under `{frame.condition}`, which holds for some threads of a {scope} and not "
                f"for others; all threads of the {scope} must make the call"
            )


def _inline(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """Replace names that the kernel bound to expressions by those expressions."""
    for _ in range(16):
        bound: dict[tirx.Var, tirx.PrimExpr] = {}

        def look(node: Node, bound: dict[tirx.Var, tirx.PrimExpr] = bound) -> None:
            if isinstance(node, tirx.Var) and has_let_value(node):
                value = get_let_value(node)
                if isinstance(value, tirx.PrimExpr):
                    bound[node] = value

        post_order_visit(expr, look)
        if not bound:
            return expr
        expr = substitute(expr, bound)
    return expr


def _splits(condition: Any, scope: str) -> bool:
    """Whether `condition`, a function of threadIdx.x alone, differs among the threads of some block or warp."""
    launch = KernelLaunchFrame.Current()
    threads, *others = threads_of_launch(launch) or (0, 0, 0)
    if not isinstance(condition, tirx.PrimExpr) or others != [1, 1]:
        return False
    return splits(_inline(condition), launch.get_thread_binding(0), threads, threads if scope == "block" else WARP)


# -- errors while a kernel is traced ----------------------------------------------------------------------------------


def _is_wanted(record: logging.LogRecord) -> bool:
    """Whether to print a record: not the rewritten source of a kernel whose author gets a line and a sentence."""
    return not (record.levelno >= logging.CRITICAL and isinstance(sys.exc_info()[1], KernelError))


def author_place() -> str:
    """The author's line as the last line of a message, if a kernel is being traced; else ''."""
    if Builder.current() is None:
        return ""
    file, line = author_line()
    return f"\n  at {file}:{line}"


def silence_dumps() -> None:
    """Keep tilelang from printing a kernel's source before an error of this package."""
    if _is_wanted not in eager_builder.logger.filters:
        eager_builder.logger.addFilter(_is_wanted)
