"""Values that are computed exactly once, however often the expression that they stand in is evaluated.

TVM expands `%`, `//`, `abs` and the guards of indices by repeating operands, and simplifies others away, as if calls had
no effect. So a value that must be computed once is bound to a variable as soon as it is traced, and expressions hold the
variable.

Where a part of an expression is evaluated only under a condition (the right side of `and` and `or`, the arms of
`a if c else b`) or again and again (the condition of `while`), the place to compute it is known only when the whole
statement is there: the trace records what the variable stands for, and compiler/effects.py finds the place.
"""

import sys
from types import FrameType

from tilelang.language.eager.builder import BoolOpFrame, Builder
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

from tilescale_net.compiler.effects import UNNAMED, deferred, has_effect
from tilescale_net.compiler.ir import loads_memory


def once(name: str, value: tirx.PrimExpr) -> tirx.Var:
    """A variable that holds `value`, computed here, or where the condition that is being traced needs it."""
    if in_condition():
        variable = tirx.Var(UNNAMED + name, value.dtype)
        builder.evaluate(deferred(variable, value))
        return variable
    variable = builder.bind(value)
    IRBuilder.name(UNNAMED + name, variable)
    return variable


def settled(name: str, value, loads: bool = False):
    """`value`, or a variable for it where it calls something with an effect (or where it loads, if `loads`)."""
    if isinstance(value, tirx.PrimExpr) and (has_effect(value) or (loads and loads_memory(value))):
        return once(name, value)
    return value


def in_condition() -> bool:
    """Whether what is traced now is evaluated under a condition, or is the condition of a loop."""
    if Builder.current().find_frame_idx(BoolOpFrame) is not None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is Builder.ctx_while.__code__:
            return True
        frame = frame.f_back
    return False
