"""Translates tilelang's host function of a kernel to Python: argument checks, shape variables, launch geometry.

tilelang generates one host function per prim_func; it takes packed arguments, checks them, binds the shape variables and
ends in a call of each kernel with its arguments and its launch extents. A translation of that function, rather than a
guess from the signature, gives the simulator the same checks and geometry, dynamic shapes included.
"""

import base64
import marshal
import numbers
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tvm import tirx

from tilescale_net.compiler.kernel import BadArguments, describe, integer_limits
from tilescale_net.errors import SimulatorUnsupported

# DLPack type codes of torch's types; bits follow from the item size.
_CODES = {torch.bool: 6, torch.bfloat16: 4, torch.float8_e4m3fn: 10, torch.float8_e5m2: 12}
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7 on
    _CODES[torch.float8_e8m0fnu] = 14
_TENSOR, _NONE, _INT, _BOOL, _FLOAT = 70, 0, 1, 2, 3  # type indices of packed arguments


def _code(dtype: torch.dtype) -> int:
    if dtype in _CODES:
        return _CODES[dtype]
    if dtype.is_floating_point:
        return 2
    return 0 if dtype.is_signed else 1


@dataclass(frozen=True)
class Launch:
    """A call of one kernel: its arguments (numbers, or tensors for pointers) and its extents, in the host's order."""

    kernel: str
    values: tuple[Any, ...]


class _Pointer:
    """A data pointer, with the tensor that it came from for bounds."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _field(handle: Any, kind: int) -> Any:
    """`tvm_struct_get` of a tensor; numbers of fields as in TVM's `TVMStructFieldKind`."""
    if kind == 1:
        return _Pointer(handle) if handle.data_ptr() else None
    if kind == 2:
        return handle.shape
    if kind == 3:
        return handle.stride()
    if kind == 4:
        return handle.dim()
    if kind == 5:
        return _code(handle.dtype)
    if kind == 6:
        return handle.dtype.itemsize * 8
    if kind == 7:
        return 1
    if kind in (8, 9):
        return 0  # byte offset; device index
    if kind == 10:
        return 2  # the host function expects CUDA tensors
    raise SimulatorUnsupported(f"field {kind} of a tensor handle is unknown")


def _argument(args: Sequence[Any], i: int, kind: int) -> Any:
    value = args[i]
    if kind == 15:
        return value
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, numbers.Integral):
        return _INT
    if isinstance(value, numbers.Real):
        return _FLOAT
    return _TENSOR if isinstance(value, torch.Tensor) else -1


def _cast(dtype: str, value: Any) -> Any:
    if value is None or isinstance(value, (torch.Tensor, _Pointer)):
        return value
    if dtype.startswith(("float", "bfloat")):
        return float(value)
    if dtype == "bool":
        return bool(value)
    if dtype.startswith(("int", "uint")):
        bits = int(dtype.removeprefix("u").removeprefix("int"))
        value = int(value) & ((1 << bits) - 1)
        return value - (1 << bits) if dtype[0] == "i" and value >> (bits - 1) else value
    return value


def _number(dtype: str, args: Sequence[Any], i: int) -> Any:
    """An argument as a number of the parameter's type. Raises BadArguments for an integer outside of its range."""
    value, limits = args[i], integer_limits(dtype)
    if limits is not None and isinstance(value, numbers.Integral) and not limits[0] <= int(value) <= limits[1]:
        raise BadArguments(f"argument {i} is {value}; {dtype} is from {limits[0]} to {limits[1]}")
    return _cast(dtype, value)


def _truncated_div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a >= 0) == (b >= 0) else -q


_BINARY = {
    "Add": "({} + {})", "Sub": "({} - {})", "Mul": "({} * {})", "FloorDiv": "({} // {})", "FloorMod": "({} % {})",
    "Div": "_tdiv({0}, {1})", "Mod": "({0} - _tdiv({0}, {1}) * {1})", "Min": "min({}, {})", "Max": "max({}, {})",
    "EQ": "({} == {})", "NE": "({} != {})", "LT": "({} < {})", "LE": "({} <= {})", "GT": "({} > {})", "GE": "({} >= {})",
    "And": "({} and {})", "Or": "({} or {})",
}  # fmt: skip
_CALLS = {
    "tirx.isnullptr": "({} is None)", "tirx.if_then_else": "({1} if {0} else {2})",
    "tirx.handle_add_byte_offset": "{0}", "tirx.reinterpret": "None", "tirx.bitwise_and": "({} & {})",
    "tirx.bitwise_or": "({} | {})", "tirx.bitwise_xor": "({} ^ {})", "tirx.shift_left": "({} << {})",
    "tirx.shift_right": "({} >> {})", "tirx.likely": "{0}",
}  # fmt: skip


class _Translator:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self.names: list[tuple[Any, str]] = []

    def unknown(self, what: str) -> SimulatorUnsupported:
        return SimulatorUnsupported(
            f"kernel {self.name}: the host function holds {what}, which the simulator does not know"
        )

    def var(self, var: tirx.Var) -> str:
        # Variables of one function may share a name; identity distinguishes them.
        for known, text in self.names:
            if known.same_as(var):
                return text
        text = f"v{len(self.names)}_{''.join(c if c.isalnum() else '_' for c in var.name)}"
        self.names.append((var, text))
        return text

    def expr(self, e: Any) -> str:
        kind = type(e).__name__
        if kind in _BINARY:
            return _BINARY[kind].format(self.expr(e.a), self.expr(e.b))
        if kind in ("IntImm", "FloatImm"):
            return repr(bool(e.value) if str(e.dtype) == "bool" else e.value)
        if kind == "StringImm":
            return repr(str(e.value))
        if kind == "Var":
            return self.var(e)
        if kind == "Not":
            return f"(not {self.expr(e.a)})"
        if kind == "Select":
            return f"({self.expr(e.true_value)} if {self.expr(e.condition)} else {self.expr(e.false_value)})"
        if kind == "Cast":
            number = re.fullmatch(r"_argument\(args, (\d+), 15\)", self.expr(e.value))
            if number:
                return f"_number({str(e.dtype)!r}, args, {number[1]})"
            return f"_cast({str(e.dtype)!r}, {self.expr(e.value)})"
        if kind == "BufferLoad":
            return f"{self.var(e.buffer.data)}[{self.expr(e.indices[0])}]"
        if kind == "Call":
            return self.call(e)
        raise self.unknown(f"an expression of kind {kind}")

    def call(self, e: Any) -> str:
        op = str(e.op.name)
        if op == "tirx.tvm_struct_get":
            field = int(e.args[2].value)
            if field in (13, 15):
                return f"_argument(args, {int(e.args[1].value)}, {field})"
            return f"_field({self.expr(e.args[0])}, {field})"
        if op in _CALLS:
            return _CALLS[op].format(*(self.expr(a) for a in e.args))
        raise self.unknown(f"a call of {op}")

    def stmt(self, s: Any) -> None:
        kind = type(s).__name__
        if kind == "SeqStmt":
            for part in s.seq:
                self.stmt(part)
        elif kind in ("Bind", "LetStmt"):
            self.lines.append(f"{self.var(s.var)} = {self.expr(s.value)}")
            if kind == "LetStmt":
                self.stmt(s.body)
        elif kind == "AssertStmt":
            message = "".join(str(getattr(p, "value", p)) for p in s.message_parts)
            self.lines.append(f"if not {self.expr(s.condition)}: _refuse({message!r}, args)")
        elif kind == "AttrStmt":
            self.stmt(s.body)
        elif kind == "DeclBuffer":
            if hasattr(s, "body"):
                self.stmt(s.body)
        elif kind == "IfThenElse":
            self.block(f"if {self.expr(s.condition)}:", s.then_case)
            if s.else_case is not None:
                self.block("else:", s.else_case)
        elif kind == "Evaluate":
            self.evaluate(s.value)
        else:
            raise self.unknown(f"a statement of kind {kind}")

    def block(self, head: str, body: Any) -> None:
        outer, self.lines = self.lines, []
        self.stmt(body)
        inner, self.lines = self.lines, outer
        self.lines += [head, *("  " + line for line in inner or ["pass"])]

    def evaluate(self, value: Any) -> None:
        if type(value).__name__ in ("IntImm", "Var"):
            return
        op = str(value.op.name)
        if op == "tirx.ret":
            return
        if op not in ("tirx.tvm_call_packed", "tirx.call_packed", "tirx.tvm_call_packed_lowered"):
            raise self.unknown(f"a call of {op}")
        callee = str(value.args[0].value)
        if callee.startswith("__tvm_set_device"):
            return
        if callee.startswith("__tvm") or "tensormap" in callee:
            raise self.unknown(f"a call of {callee}")
        values = "".join(self.expr(a) + ", " for a in value.args[1:])
        self.lines.append(f"_launches.append(_Launch({callee!r}, ({values})))")


def translate(name: str, host_mod: Any) -> str:
    """Python source of a function `host(args)`, equivalent to the host function in `host_mod`; see `load`. `name`:
    the kernel's name, for errors. `host_mod`: `CompiledArtifact.host_mod` of tilelang.lower. Raises
    SimulatorUnsupported: the host function holds something unknown."""
    functions = [f for f in host_mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    if len(functions) != 1:
        raise SimulatorUnsupported(f"kernel {name}: {len(functions)} host functions; the simulator runs one")
    translator = _Translator(name)
    function = functions[0]
    parameters = [translator.var(p) for p in function.params]
    translator.stmt(function.body)
    head = ["def host(args):", f"  {', '.join(parameters[:4])} = None, args, len(args), None", "  _launches = []"]
    return "\n".join([*head, *("  " + line for line in translator.lines), "  return _launches"])


def compiled(name: str, source: str) -> str:
    """The source from `translate` as encoded bytecode: compiling it would take each rank 7 ms."""
    return base64.b64encode(marshal.dumps(compile(source, f"<host function of {name}>", "exec"))).decode()


def load(name: str, code: str) -> Callable[[tuple[Any, ...]], list[Launch]]:
    """The function from `compiled`. It takes the arguments as a tuple and returns the kernels to launch. It
    raises KernelError for arguments of the wrong type, shape, stride or number."""

    def refuse(message: str, args: Sequence[Any]) -> None:
        texts = ", ".join(describe(a) for a in args)
        raise BadArguments(f"kernel {name}: {message}; the arguments are: {texts}")

    scope: dict[str, Any] = {
        "_field": _field, "_argument": _argument, "_cast": _cast, "_number": _number, "_tdiv": _truncated_div, "_Launch": Launch,
        "_refuse": refuse,
    }  # fmt: skip
    exec(marshal.loads(base64.b64decode(code)), scope)
    return scope["host"]
