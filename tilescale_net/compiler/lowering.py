"""Lowering rules: each `tsn.*` operator becomes a call of the device function of the same name.

The rules run in TVM's intrinsic lowering, the last step before code generation, so that no pass can look into, merge
or move the calls.
"""

import contextlib
import threading

import tvm_ffi
from tilelang import tvm
from tvm import tirx

from tilescale_net.compiler import traced_calls
from tilescale_net.compiler.ir import typed_name
from tilescale_net.compiler.operators import C_TYPES, CHOICES, DEFERRED, OPERATORS, Operator
from tilescale_net.errors import KernelError

# A rule runs inside TVM, which would turn errors of unknown classes into RuntimeError.
tvm_ffi.register_error("KernelError", KernelError)
_state = threading.local()


@contextlib.contextmanager
def enabled(traced: bool = False):
    """Let the rules run: only kernels that `tsn.jit` prepared may be lowered, see passes.py for what others lack.

    Args:
        traced: the numbers of calls are for the trace of a GPU, see traced_calls.py; otherwise for the simulator.
    """
    before = getattr(_state, "enabled", False), getattr(_state, "traced", False)
    _state.enabled, _state.traced = True, traced
    try:
        yield
    finally:
        _state.enabled, _state.traced = before


def _require_enabled(name: str) -> None:
    if not getattr(_state, "enabled", False):
        raise KernelError(
            f"a kernel that uses {name} was compiled by tilelang alone; decorate it with @tilescale_net.jit (or pass it "
            "to tilescale_net.compile), which supplies its context and keeps its memory accesses coherent"
        )


def _cast(c_type: str, pointer: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.call_extern("handle", f"reinterpret_cast<{c_type}>", pointer)


def null_pointer() -> tirx.PrimExpr:
    """The expression `static_cast<void*>(0)`, which C++ converts to any pointer."""
    return tirx.call_extern("handle", "static_cast<void*>", tirx.IntImm("int32", 0))


def device_call(operator: Operator, call: tirx.Call) -> tirx.PrimExpr:
    """The call of the device function that `call` of `operator` stands for."""
    choices = call.args[: len(operator.template)]
    values = call.args[len(operator.template) : operator.arity]
    template = [
        str(int(choice)) if kind == "int" else f"tsn::{kind}::{CHOICES[kind][choice.value]}"
        for kind, choice in zip(operator.template_kinds, choices)
        if kind != "text"
    ]
    name = f"tsn::{operator.name}" + (f"<{', '.join(template)}>" if template else "")
    arguments = [_cast(C_TYPES[kind], v) if kind in C_TYPES else v for kind, v in zip(operator.arg_kinds, values)]
    if len(call.args) > operator.arity:
        if _state.traced:
            name = traced_calls.device_function(operator, call, name)
        else:  # see simulator/sites.py
            name = f"/*@{int(call.args[operator.arity])}*/{name}"
    return tirx.call_extern(call.dtype, name, *arguments)


def _rule(operator: Operator):
    def lower(call: tirx.Call) -> tirx.PrimExpr:
        _require_enabled(typed_name(call))
        return device_call(operator, call)

    return lower


def register() -> None:
    """Register one rule per operator for target kind "cuda"; called once, when this module is imported.

    The placeholders have none: `passes.prepare` removes them. It removes DEFERRED too, whose rule serves only to say what
    is wrong where nothing has prepared the kernel.
    """
    tvm.ir.register_intrin_lowering(DEFERRED, target="cuda", f=lambda call: _require_enabled("a primitive"), level=99)
    for operator in OPERATORS.values():
        tvm.ir.register_intrin_lowering(operator.op_name, target="cuda", f=_rule(operator), level=99)


register()
