"""The table of `tsn.*` operators: the traced call of each primitive, and its device function.

An operator's arguments are compile-time choices first (strings and integers that turn into template arguments of the
device function), then run-time values in the order of the device function's parameters. A primitive's row holds all
facts for TVM, the lowering rules, the passes, the trace and the simulator.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tvm_ffi
from tilelang import tvm
from tvm import tirx

# Enumerations of device/types.h: choice in Python -> enumerator in C++.
CHOICES: dict[str, dict[str, str]] = {
    "Scope": {name: name for name in ("thread", "warp", "block")},
    "Engine": {"auto": "automatic", "ldst": "ldst", "bulk": "bulk"},
    "SignalOp": {name: name for name in ("set", "add")},
    "Compare": {name: name for name in ("eq", "ne", "ge", "gt", "le", "lt")},
    "AtomicOp": {name: f"{name}_" if name in ("and", "or", "xor") else name for name in (
        "add", "and", "or", "xor", "min", "max", "exch")},
    "Order": {"weak": "weak", "relaxed": "relaxed", "acquire": "acquire", "release": "release",
              "volatile": "volatile_"},
    "BarrierScope": {name: name for name in ("block", "grid")},
    "MemScope": {name: name for name in ("cta", "gpu", "sys")},
}  # fmt: skip

# Types of run-time parameters: kind -> dtype of the traced expression (None: the dtype of the buffer or value itself).
# "memory" is accessed: the number of bytes in the argument "bytes", or one element without it; "words" are signals of 8
# bytes. "rows" are strided, and the device function checks them itself; a "place" is named, but not accessed. A "tile"
# is shared memory, a "ring" the shared memory of bulk copies; "registers" are an array of the thread's own. Kinds in
# C_TYPES are pointers whose C++ type differs from the buffer's; the generated call casts them.
KINDS: dict[str, str | None] = {
    "context": "handle", "memory": "handle", "rows": "handle", "place": "handle", "tile": "handle",
    "registers": "handle", "words": "handle", "ring": "handle", "bytes": "int64", "pe": "int32", "u64": "uint64",
    "i64": "int64", "value": None,
}  # fmt: skip
C_TYPES = {"context": "const tsn::Context*", "words": "uint64_t*"}

# Call effects of TVM: a pure call may be merged and moved; an opaque one keeps its place among memory accesses.
PURE, OPAQUE = 1, 3


@dataclass(frozen=True)
class Operator:
    """One row of the table.

    Attributes:
        name: TVM name after `tsn.`; also the device function in namespace `tsn`.
        template: compile-time arguments, each a key of CHOICES, "int" or "text" (for the trace, not for the device
            function), or "name:key" if the names differ.
        args: run-time arguments, each a key of KINDS or "name:key"; `context` comes first where present.
        result: dtype of the call, "void", or "value" for the dtype of the value argument (given when the call is made).
        effect: PURE or OPAQUE.
        operation: its name in the trace, one of `runtime.context.OPERATIONS` or of a range; "" leaves its calls out.
        scope: the threads that make a call together, unless an argument of kind Scope states it.
        traced_by: "warp" if each calling warp writes its own event; default: the threads of `scope`.
        acquires: the caller's later accesses that see peers' earlier writes: "generic" loads and stores, "async" also
            TMA, or none (""). Of an operator with an argument of kind Order only calls with "acquire" do.
        async_form: name of the operator that does the same for TMA too.
    """

    name: str
    template: tuple[str, ...] = ()
    args: tuple[str, ...] = ("context",)
    result: str = "void"
    effect: int = OPAQUE
    operation: str = ""
    scope: str = "thread"
    traced_by: str = ""
    acquires: str = ""
    async_form: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"operator name {self.name!r} is not an identifier")
        if self.scope not in CHOICES["Scope"]:
            raise ValueError(f"tsn.{self.name}: scope {self.scope!r} is not one of {[*CHOICES['Scope']]}")
        for kind in self.template_kinds:
            if kind not in ("int", "text") and kind not in CHOICES:
                raise ValueError(
                    f"tsn.{self.name}: template argument {kind!r} is neither 'int', 'text' nor one of {[*CHOICES]}"
                )
        for kind in self.arg_kinds:
            if kind not in KINDS:
                raise ValueError(f"tsn.{self.name}: argument {kind!r} is not one of {[*KINDS]}")
        if "context" in self.args[1:]:
            raise ValueError(f"tsn.{self.name}: the context must be the first argument")
        if self.result not in ("void", "value", "bool", "int32", "uint64", "handle"):
            raise ValueError(f"tsn.{self.name}: result {self.result!r} is not supported")
        if self.effect not in (PURE, OPAQUE):
            raise ValueError(f"tsn.{self.name}: effect must be PURE or OPAQUE")
        if self.acquires not in ("", "generic", "async"):
            raise ValueError(f"tsn.{self.name}: acquires {self.acquires!r} is not '', 'generic' or 'async'")
        if self.effect == PURE and self.result == "void":
            raise ValueError(f"tsn.{self.name}: a pure operator without a result would be removed")

    @property
    def op_name(self) -> str:
        return f"tsn.{self.name}"

    @property
    def arity(self) -> int:
        return len(self.template) + len(self.args)

    @property
    def template_kinds(self) -> tuple[str, ...]:
        return tuple(argument.rpartition(":")[2] for argument in self.template)

    @property
    def arg_kinds(self) -> tuple[str, ...]:
        return tuple(argument.rpartition(":")[2] for argument in self.args)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all arguments in order, compile-time ones first."""
        return tuple(argument.partition(":")[0].lower() for argument in (*self.template, *self.args))

    def read(self, call: tirx.Call) -> SimpleNamespace:
        """The arguments of a call by name: choices as str or int, the rest as expressions."""
        n = len(self.template)
        choices = [int(c) if isinstance(c, tirx.IntImm) else str(c.value) for c in call.args[:n]]
        return SimpleNamespace(**dict(zip(self.names, (*choices, *call.args[n : self.arity]))))

    def replace(self, call: tirx.Call, **arguments: tirx.PrimExpr) -> tirx.Call:
        """The same call with other expressions for the named arguments."""
        operands = list(call.args)
        for name, value in arguments.items():
            operands[self.names.index(name)] = value
        return tirx.Call(call.dtype, call.op, operands, annotations=call.annotations, span=call.span)

    def scope_of(self, call: tirx.Call) -> str:
        """The threads that make the call together: "thread", "warp" or "block"."""
        return getattr(self.read(call), "scope", self.scope)

    def orders_loads_alone(self, call: tirx.Call) -> bool:
        """Whether a call orders peers' writes before loads, but not before TMA, and has no form for TMA."""
        return (
            self.acquires == "generic"
            and not self.async_form
            and getattr(self.read(call), "order", "acquire") == "acquire"
        )

    @property
    def accessed(self) -> list[tuple[int, int | None]]:
        """Positions, among the device function's arguments, of the addresses that a call accesses and of their sizes in
        bytes; a size of None: one signal, or one element."""
        size = self.arg_kinds.index("bytes") if "bytes" in self.arg_kinds else None
        return [
            (position, size if kind == "memory" else None)
            for position, kind in enumerate(self.arg_kinds)
            if kind in ("memory", "words")
        ]

    def __call__(self, *arguments: Any, dtype: str | None = None) -> tirx.PrimExpr:
        """Trace a call. `arguments` are template choices (str or int), then expressions without the context. Raises
        TypeError: wrong arity, an unknown choice or an expression of another type; a defect of this package, because
        the primitives check users' arguments."""
        choices, values = arguments[: len(self.template)], list(arguments[len(self.template) :])
        if self.args and self.args[0] == "context":
            values.insert(0, context_placeholder())
        if len(choices) + len(values) != self.arity:
            raise TypeError(f"{self.op_name} takes {self.arity} arguments, not {len(choices) + len(values)}")
        call_args: list[tirx.PrimExpr] = []
        for kind, choice in zip(self.template_kinds, choices):
            if kind == "int":
                call_args.append(tirx.IntImm("int32", choice))
            elif kind == "text" or choice in CHOICES[kind]:
                call_args.append(tirx.StringImm(choice))
            else:
                raise TypeError(f"{self.op_name}: {choice!r} is not a {kind}")
        for kind, value in zip(self.arg_kinds, values):
            wanted = KINDS[kind]
            if wanted is not None and str(value.dtype) != wanted:
                raise TypeError(f"{self.op_name}: argument '{kind}' has type {value.dtype} instead of {wanted}")
            call_args.append(value)
        if (self.result == "value") != (dtype is not None):
            raise TypeError(f"{self.op_name}: dtype= is given exactly when the result has the value's type")
        return tirx.Call(dtype or self.result, tvm.ir.Op.get(self.op_name), call_args)


_COPY = ("Scope", "Engine", "unroll:int", "stages:int", "stage_bytes:int")
_ENDS = ("context", "dst:memory", "src:memory", "bytes", "pe")
_TILE = ("context", "dst:memory", "tile", "bytes", "pe")
_ROWS = (
    "context", "dst:rows", "src:rows", "rows:i64", "row_bytes:bytes", "dst_pitch:bytes", "src_pitch:bytes", "pe",
)  # fmt: skip
_SIGNAL = ("sig:words", "signal_value:u64")
_WAIT = (("Scope", "Compare", "looks:int"), ("context", "words", "i64"), "uint64", OPAQUE, "wait")

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator("my_pe", result="int32", effect=PURE),
        Operator("n_pes", result="int32", effect=PURE),
        Operator("node_pe", result="int32", effect=PURE),
        Operator("n_node_pes", result="int32", effect=PURE),
        Operator("is_direct", args=("context", "pe"), result="bool", effect=PURE),
        Operator("put", _COPY, (*_ENDS, "ring"), operation="put"),
        Operator("put_shared", ("Scope",), _TILE, operation="put"),
        Operator("put_rows", ("Scope", "unroll:int"), _ROWS, operation="put"),
        Operator("get", _COPY, (*_ENDS, "ring"), operation="get", acquires="generic"),
        Operator("get_rows", ("Scope", "unroll:int"), _ROWS, operation="get", acquires="generic"),
        Operator("put_signal", (*_COPY, "SignalOp"), (*_ENDS, *_SIGNAL, "ring"), operation="put_signal"),
        Operator("put_signal_shared", ("Scope", "SignalOp"), (*_TILE, *_SIGNAL), operation="put_signal"),
        Operator("put_signal_rows", ("Scope", "unroll:int", "SignalOp"), (*_ROWS, *_SIGNAL), operation="put_signal"),
        Operator("put_vector", (), ("context", "dst:memory", "src:registers", "bytes", "pe")),
        Operator(
            "put_vectors", ("pes:int", "rows:int"), ("context", "dst:memory", "src:registers", "bytes", "first:pe")
        ),
        Operator("take_vectors", ("rows:int",), ("context", "dst:registers", "src:rows", "pitch:bytes")),
        Operator("put_value", (), ("context", "memory", "value", "pe"), operation="put_value"),
        Operator("signal", ("Scope", "SignalOp", "fence:int"), ("context", *_SIGNAL, "pe"), operation="signal"),
        Operator("wait", *_WAIT, acquires="generic", async_form="wait_async"),
        Operator("wait_async", *_WAIT, acquires="async"),
        # A polling loop would fill the trace with tests.
        Operator("test", ("Compare",), ("context", "words", "i64"), "bool", acquires="generic"),
        Operator("atomic", ("AtomicOp",), ("context", "memory", "value", "pe"), "value", operation="atomic"),
        Operator("atomic_cas", (), ("context", "memory", "compare:value", "value", "pe"), "value", operation="atomic"),
        Operator("fence", ("Scope",), ("context", "pe"), operation="fence"),
        Operator("quiet", ("Scope",), ("context", "pe"), operation="quiet"),
        Operator("flush_async", (), ("context", "pe"), "uint64", operation="flush"),
        Operator("flush_wait", (), ("context", "u64"), operation="flush"),
        Operator("barrier_all", ("blocks:BarrierScope",), operation="barrier", scope="block", acquires="generic"),
        Operator("barrier_node", ("blocks:BarrierScope",), operation="barrier", scope="block", acquires="generic"),
        Operator("barrier_grid", operation="barrier_grid", scope="block", acquires="generic"),
        Operator("remote", (), ("context", "place", "pe"), "handle"),
        Operator("ld", ("Order", "MemScope"), ("memory",), "value", acquires="generic"),
        Operator("st", ("Order", "MemScope"), ("memory", "value")),
        Operator("benign_race", args=("context", "place", "bytes")),
        Operator("range_begin", ("name:text",), operation="range_begin", traced_by="warp"),
        Operator("range_end", operation="range_end", traced_by="warp"),
    )
}

# Shared memory of a block on sm_90, minus the device functions' part.
SHARED_BYTES = 224 * 1024

# The annotation of a traced call with the name that its author typed, such as N.put_block.
TYPED = "tsn.typed"
# Placeholders in a traced kernel, which `passes` replaces: the context pointer and the ring buffer.
CONTEXT, RING = "tsn.context", "tsn.ring"
# A statement of a traced kernel with a variable's value, until effects.py finds the place to compute it.
DEFERRED = "tsn.deferred"
# Marks the condition of a primitive's own guard, that its index is inside the tensor. bounds.py replaces it.
INSIDE = "tsn.inside"
# Marks a size on which the two ends of a copy, or its count and an end, must agree. bounds.py replaces it.
AGREED = "tsn.agreed"


def context_placeholder() -> tirx.PrimExpr:
    """Placeholder of the kernel's context pointer while the kernel is traced."""
    return tirx.call_intrin("handle", tvm.ir.Op.get(CONTEXT))


def guard_condition(name: str, inside: tirx.PrimExpr, indices: list[Any]) -> tirx.PrimExpr:
    """The condition of a primitive's own guard, marked as such. `name`: the tensor's. `inside`: the condition.
    `indices`: (index, extent) of each axis."""
    flat = [tirx.convert(value) for pair in indices for value in pair]
    return tirx.call_intrin("bool", tvm.ir.Op.get(INSIDE), tirx.StringImm(name), inside, *flat)


def agreed_value(
    value: tirx.PrimExpr,
    smallest: tirx.PrimExpr,
    holds: tirx.PrimExpr,
    text: str,
    left: tirx.PrimExpr,
    right: tirx.PrimExpr,
) -> tirx.PrimExpr:
    """A size of a copy that holds under a condition, marked as such; all numbers are int64.

    Args:
        value: the size if the condition holds; otherwise the simulator reports an error. smallest: the size if the
        condition holds, else one that leaves no region; for GPUs.
        holds: the condition.
        text: the error, with {} for `left` and for `right`.
    """
    return tirx.call_intrin("int64", tvm.ir.Op.get(AGREED), value, smallest, holds, tirx.StringImm(text), left, right)


def ring_placeholder(nbytes: int) -> tirx.PrimExpr:
    """Placeholder of at least `nbytes` of shared staging memory of bulk copies; 0 bytes is a null pointer."""
    return tirx.call_intrin("handle", tvm.ir.Op.get(RING), tirx.IntImm("int32", nbytes))


def _register(name: str, description: str, arguments: tuple[str, ...], effect: int) -> None:
    tvm_ffi.get_global_func("ir.RegisterOp")(name, description)
    tvm.ir.register_op_attr(name, "TCallEffectKind", tirx.IntImm("int32", effect))
    tvm.ir.register_op_attr(name, "TScriptPrinterName", name.replace(".", "_"))
    op = tvm.ir.Op.get(name)
    op.set_num_inputs(len(arguments))
    for kind in arguments:
        op.add_argument(kind, "PrimExpr", "compile-time choice" if kind not in KINDS else "run-time value")


def register() -> None:
    """Register every operator with TVM; called once, when this module is imported."""
    if CONTEXT in tvm.ir.Op.list_op_names():
        return  # TVM's registry outlives a reload of this module
    for operator in OPERATORS.values():
        kinds = operator.template_kinds + operator.arg_kinds
        _register(operator.op_name, f"tsn::{operator.name}", kinds, operator.effect)
    _register(CONTEXT, "the kernel's context", (), PURE)
    _register(RING, "shared memory for bulk copies", ("bytes",), PURE)
    _register(INSIDE, "that an index is inside", ("value",), PURE)
    _register(AGREED, "a size that two places agree on", ("value",), PURE)
    _register(DEFERRED, "a variable's value", ("value", "value"), OPAQUE)


register()
