"""Source lines of the author's primitives and plain accesses, for errors of the simulator and its race detector.

Each call gets its number in a table of lines as an additional argument; the lowering rule turns it into a comment
before the call, which host_source.py finds. The generated code holds numbers only, so moving a kernel within its file
does not change the code. A call with its line's number precedes each statement that loads or stores memory visible to
other threads. A loop whose iterations tilelang distributes over threads, vectors or pipeline stages is one statement:
nothing may come between its parts.
"""

import os
from collections.abc import Container

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from tilescale_net.compiler.ir import OUR_OPS, Node, collect, op_name, operator_of, our_calls, sequence, typed_name
from tilescale_net.compiler.operators import DEFERRED, OPERATORS, PURE
from tilescale_net.compiler.versions import get_stmt_span

# -- calls of primitives ----------------------------------------------------------------------------------------------

# Operators that can fail or wait; pure operators cannot.
_NUMBERED = {operator.op_name: operator for operator in OPERATORS.values() if operator.effect != PURE}


def lines_of(func: tirx.PrimFunc, numbered: Container[str] = _NUMBERED) -> list[tuple[str, str]]:
    """TVM's name of each call of a traced kernel, in order, with its line ("file.py:12") and, behind a tab, the
    author's name of it (for the beginning of a range, the range's name); passes drop the lines later on. `numbered`:
    TVM's names of the counted operators."""
    found = []
    for call in our_calls(func.body):
        if op_name(call) in numbered:
            span = call.span
            known = span is not None and span.source_name is not None
            line = f"{os.path.basename(str(span.source_name.name))}:{span.line}" if known else ""
            found.append((op_name(call), f"{line}\t{range_name(call) or typed_name(call)}"))
    return found


def range_name(call: tirx.Call) -> str:
    """The name of a range that a call begins, or ''."""
    row = operator_of(call)
    return row.read(call).name if row is not None and "text" in row.template_kinds else ""


def number(func: tirx.PrimFunc, calls: list[tuple[str, str]], statements: list[str]) -> tuple[tirx.PrimFunc, list[str]]:
    """Number the calls of a prepared kernel. `calls`: `lines_of` the kernel as traced. `statements`: lines that have
    numbers already, see `mark`. Returns the function and, by number, the line with the name behind it; calls that the
    passes have reordered have none."""
    lines = list(dict.fromkeys([*statements, *(line for _, line in calls)]))
    seen: list[str] = []

    def add(call: tirx.Call) -> Node | None:
        if op_name(call) not in _NUMBERED:
            return None
        seen.append(op_name(call))
        if len(seen) > len(calls):
            return None
        return with_number(call, lines.index(calls[len(seen) - 1][1]))

    body = ir_transform(func.body, None, add, ["tirx.Call"])
    if not same_calls(seen, calls):
        return func, statements
    return tirx.PrimFunc(func.params, body, func.ret_type, func.buffer_map, func.attrs), lines


def with_number(call: tirx.Call, number: int) -> tirx.Call:
    """A call with its number as an additional argument."""
    return tirx.Call(call.dtype, call.op, [*call.args, tirx.IntImm("int32", number)], annotations=call.annotations)


def same_calls(seen: list[str], calls: list[tuple[str, str]]) -> bool:
    """Whether the passes have left the calls of a kernel in their order; they make some waits order TMA as well."""
    plain = {OPERATORS[row.async_form].op_name: row.op_name for row in OPERATORS.values() if row.async_form}
    return [plain.get(name, name) for name in seen] == [plain.get(name, name) for name, _ in calls]


# -- plain accesses ---------------------------------------------------------------------------------------------------

CALL = "tsn_sim_line"  # of device/host/kernel.h
_LEAVES = ("tirx.BufferStore", "tirx.Evaluate", "tirx.Bind")
_VISITED = [*_LEAVES, "tirx.For", "tirx.IfThenElse", "tirx.While", "tirx.SeqStmt"]
_INTRINSICS = ("tl.tileop.", "tl.__ldg", "tl.shfl", "tl.warp_reduce", "tirx.call_extern", "tirx.call_pure_extern")
_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
_WHOLE_LOOPS = (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED)


def _accesses(node: Node) -> bool:
    """Whether a statement or an expression can fail or race: it accesses memory visible to other threads, not only by
    primitives, divides integers, or calls a function that checks its arguments."""

    def may_fail(part: Node) -> bool:
        shared = isinstance(part, (tirx.BufferLoad, tirx.BufferStore)) and not part.buffer.scope().startswith("local")
        divides = (
            isinstance(part, _DIVISIONS) and "float" not in str(part.dtype) and not isinstance(part.b, tirx.IntImm)
        )
        return shared or divides or op_name(part).startswith(_INTRINSICS)

    return bool(collect(node if isinstance(node, tirx.Stmt) else tirx.Evaluate(node), may_fail))


class _Marks:
    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self._bound = False  # the previous statement belongs to the next one, and must stay next to it

    def _call(self, statement: tirx.Stmt) -> list[tirx.Stmt]:
        span = get_stmt_span(statement)
        if span is None or span.line <= 0:
            return []
        line = f"{os.path.basename(str(span.source_name.name))}:{span.line}"
        number = self.lines.setdefault(line, len(self.lines))
        return [tirx.Evaluate(tirx.call_extern("void", CALL, tirx.IntImm("int32", number)))]

    def _before(self, node: Node) -> tirx.Stmt | None:
        """The replacement of a statement; None to descend into it."""
        after_bound, self._bound = self._bound, False
        if isinstance(node, tirx.SeqStmt):
            self._bound = after_bound
            return None
        if isinstance(node, tirx.For) and node.kind not in _WHOLE_LOOPS and not node.annotations:
            return None
        if isinstance(node, tirx.IfThenElse):
            other = self.into(node.else_case) if node.else_case is not None else None
            made = tirx.IfThenElse(node.condition, self.into(node.then_case), other, get_stmt_span(node))
            marks = self._call(node) if _accesses(node.condition) and not after_bound else []
        elif isinstance(node, tirx.While):
            again = self._call(node) if _accesses(node.condition) else []
            made = tirx.While(node.condition, sequence([self.into(node.body), *again]), get_stmt_span(node))
            marks = again if not after_bound else []
        else:
            self._bound = isinstance(node, tirx.Evaluate) and op_name(node.value) == DEFERRED
            primitive = isinstance(node, tirx.Evaluate) and op_name(node.value) in OUR_OPS
            marks, made = self._call(node) if not after_bound and not primitive and _accesses(node) else [], node
        return sequence([*marks, made])

    def into(self, statement: tirx.Stmt) -> tirx.Stmt:
        return ir_transform(statement, self._before, _flat, _VISITED)


def _flat(node: Node) -> tirx.Stmt | None:
    if isinstance(node, tirx.SeqStmt) and any(isinstance(part, tirx.SeqStmt) for part in node.seq):
        return sequence(node.seq)
    return None


def mark(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc, list[str]]:
    """Mark the statements of a traced kernel. Returns the function and the line ("file.py:12") of each number."""
    marks = _Marks()
    body = marks.into(func.body)
    if not marks.lines:
        return func, []
    marked = tirx.PrimFunc(func.params, body, func.ret_type, func.buffer_map, func.attrs)
    if hasattr(func, "orig_func"):
        marked.orig_func = func.orig_func
    return marked, list(marks.lines)
