"""Lowering rules: each `tsn.*` operator becomes a call of the device function of the same name.

The rules run in TVM's intrinsic lowering, the last step before code generation, so that no pass can look into, merge
or move the calls.

While TSN_TRACE is set, a kernel for GPUs writes its calls of primitives into the trace: each call gets its number in a
table as an additional argument, and its rule generates a call through TSN_TRACED of device/traced_calls.h. Kernels
without a trace contain none of this.
"""

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator

import tvm_ffi
from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from tilescale_net.compiler.ir import Node, changed_block, kernel_name, op_name, operator_of, our_calls, typed_name
from tilescale_net.compiler.operators import C_TYPES, CHOICES, DEFERRED, OPERATORS, Operator
from tilescale_net.compiler.simulator import sites
from tilescale_net.errors import KernelError
from tilescale_net.trace.traced_calls import WAITING, CallSite, KernelSites

# A rule runs inside TVM, which would turn errors of unknown classes into RuntimeError.
tvm_ffi.register_error("KernelError", KernelError)
_state = threading.local()


@contextlib.contextmanager
def enabled(traced: bool = False) -> Iterator[None]:
    """Enable the rules: only kernels that `tsn.jit` has prepared may be lowered; others lack the steps of
    passes/__init__.py. `traced`: the numbers of calls are for the trace of a GPU, see `number_for_trace`; else for the
    simulator."""
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
    """The call of the device function for `call` of `operator`."""
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
            name = _traced_function(operator, call, name)
        else:  # see simulator/sites.py
            name = f"/*@{int(call.args[operator.arity])}*/{name}"
    return tirx.call_extern(call.dtype, name, *arguments)


def _rule(operator: Operator) -> Callable[[tirx.Call], tirx.PrimExpr]:
    def lower(call: tirx.Call) -> tirx.PrimExpr:
        _require_enabled(typed_name(call))
        return device_call(operator, call)

    return lower


def register() -> None:
    """Register one rule per operator for target kind "cuda"; called once, when this module is imported. The
    placeholders have none: `passes.prepare` removes them. It also removes DEFERRED, whose rule only reports a kernel
    that was not prepared."""
    tvm.ir.register_intrin_lowering(DEFERRED, target="cuda", f=lambda call: _require_enabled("a primitive"), level=99)
    for operator in OPERATORS.values():
        tvm.ir.register_intrin_lowering(operator.op_name, target="cuda", f=_rule(operator), level=99)


register()


# -- calls in the trace of a GPU --------------------------------------------------------------------------------------

TRACED_KERNEL = "TSN_TRACED_KERNEL"  # marks the code of a kernel that writes to the trace
_TRACED = {operator.op_name: operator for operator in OPERATORS.values() if operator.operation}


def number_for_trace(func: tirx.PrimFunc, traced: tirx.PrimFunc) -> tuple[tirx.PrimFunc, KernelSites]:
    """Number the calls of a prepared kernel. `func`: prepared, see passes/__init__.py. `traced`: the kernel as traced,
    which still has the author's lines. Returns the function and the meanings of the numbers; calls that the passes have
    reordered have no line."""
    lines = sites.lines_of(traced, _TRACED)
    found: list[tuple[str, CallSite]] = []

    def add(call: tirx.Call) -> Node | None:
        operator = _TRACED.get(op_name(call))
        if operator is None:
            return None
        line = lines[len(found)][1] if len(found) < len(lines) else ""
        found.append((operator.op_name, _site(operator, call, line)))
        return sites.with_number(call, len(found) - 1) if _is_noted(operator, call) else None

    body = ir_transform(func.body, None, add, ["tirx.Call"])
    calls = [site for _, site in found]
    if not sites.same_calls([name for name, _ in found], lines):
        calls = [site.without_line() for site in calls]
    name = kernel_name(func)
    if (context := _context(func)) is not None:
        body = _with_trace(body, context, len(calls))
        calls.append(CallSite(name, "kernel", "", ""))
    # Equal for equal tables on all ranks and in all runs, so that the cache finds the kernel.
    identity = zlib.crc32(repr((name, calls)).encode()) % 0xFFFF + 1
    numbered = tirx.PrimFunc(func.params, body, func.ret_type, func.buffer_map, func.attrs)
    return numbered, KernelSites(identity, name, tuple(calls))


def _context(func: tirx.PrimFunc) -> tirx.PrimExpr | None:
    """The kernel's context, as in its calls of primitives; None without any."""
    for call in our_calls(func.body):
        operator = operator_of(call)
        if operator is not None and "context" in operator.arg_kinds:
            return call.args[len(operator.template) + operator.arg_kinds.index("context")]
    return None


def _with_trace(body: tirx.Stmt, context: tirx.PrimExpr, number: int) -> tirx.Stmt:
    """The body of a kernel with the set-up of its trace in front; the kernel itself is call `number`."""
    # In generated code this is the definition of a variable.
    traced = tirx.Evaluate(tirx.call_extern("int32", f"{TRACED_KERNEL}({number})", context))

    def add(block: tirx.SBlock) -> Node | None:
        if block.name_hint != "tilelang_root":
            return None
        return changed_block(block, tirx.SeqStmt([traced, block.body]), block.alloc_buffers)

    return ir_transform(body, None, add, ["tirx.SBlock"])


def _is_noted(operator: Operator, call: tirx.Call) -> bool:
    """Whether a call goes into the trace: not rows that warps and threads put and get, thousands in a kernel, and their
    fences."""
    return operator.operation not in ("put", "get", "fence") or operator.scope_of(call) == "block"


def _site(operator: Operator, call: tirx.Call, line: str) -> CallSite:
    name = sites.range_name(call) or typed_name(call)
    return CallSite(name, operator.operation, getattr(operator.read(call), "compare", ""), line.partition("\t")[0])


def _traced_function(operator: Operator, call: tirx.Call, name: str) -> str:
    """The call in generated code that replaces the device function `name`."""
    index = int(call.args[operator.arity])
    names = [argument.partition(":")[0] for argument in operator.args[1:]]  # behind the context
    of_fields = ["pe"], ["sig", "words"], ["i64", "signal_value"], ["bytes", "row_bytes"], ["rows"]
    places = [next((names.index(name) for name in field if name in names), -1) for field in of_fields]
    scope = CHOICES["Scope"][operator.traced_by or operator.scope_of(call)]
    waits = "true" if operator.operation in WAITING else "false"
    return f"TSN_TRACED({index}, tsn::Scope::{scope}, {waits}, {', '.join(map(str, places))}, {name})"


def trace_flags(kernel: KernelSites) -> list[str]:
    """Flags of the device compiler for a kernel whose calls are numbered."""
    return ["-include", "traced_calls.h", f"-DTSN_TRACE_KERNEL={kernel.identity}"]
