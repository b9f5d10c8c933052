"""Where the author's plain accesses stand, for the check for races of the simulator.

Before each statement that loads or stores what other threads may see there comes a call with its line in the kernel's
table. A loop whose iterations tilelang hands to threads, vectors or stages of a pipeline is one statement: nothing may
come between its parts.
"""

import os

from tilelang.ir import get_stmt_span
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, post_order_visit

from tilescale_net.compiler.ir import OUR_OPS, op_name
from tilescale_net.compiler.operators import DEFERRED

CALL = "tsn_sim_line"  # of device/host/kernel.h
_LEAVES = ("tirx.BufferStore", "tirx.Evaluate", "tirx.Bind")
_VISITED = [*_LEAVES, "tirx.For", "tirx.IfThenElse", "tirx.While", "tirx.SeqStmt"]
_INTRINSICS = ("tl.tileop.", "tl.__ldg", "tl.shfl", "tl.warp_reduce", "tirx.call_extern", "tirx.call_pure_extern")
_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
_WHOLE_LOOPS = (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED)


def _accesses(node) -> bool:
    """Whether a statement or an expression does what can fail or race: it accesses memory that other threads see, but not by
    primitives alone, divides integers, or calls what checks its arguments.
    """
    found = []

    def look(part):
        shared = isinstance(part, (tirx.BufferLoad, tirx.BufferStore)) and not part.buffer.scope().startswith("local")
        divides = (
            isinstance(part, _DIVISIONS) and "float" not in str(part.dtype) and not isinstance(part.b, tirx.IntImm)
        )
        if shared or divides or op_name(part).startswith(_INTRINSICS):
            found.append(part)

    post_order_visit(node if isinstance(node, tirx.Stmt) else tirx.Evaluate(node), look)
    return bool(found)


class _Marks:
    def __init__(self):
        self.lines: dict[str, int] = {}
        self._bound = False  # the statement before is computed for the next one, and must stay next to it

    def _call(self, statement) -> list[tirx.Stmt]:
        span = get_stmt_span(statement)
        if span is None or span.line <= 0:
            return []
        line = f"{os.path.basename(str(span.source_name.name))}:{span.line}"
        number = self.lines.setdefault(line, len(self.lines))
        return [tirx.Evaluate(tirx.call_extern("void", CALL, tirx.IntImm("int32", number)))]

    def _before(self, node):
        """What takes the place of a statement; None to look into it."""
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
            made = tirx.While(node.condition, _sequence([self.into(node.body), *again]), get_stmt_span(node))
            marks = again if not after_bound else []
        else:
            self._bound = isinstance(node, tirx.Evaluate) and op_name(node.value) == DEFERRED
            primitive = isinstance(node, tirx.Evaluate) and op_name(node.value) in OUR_OPS
            marks, made = self._call(node) if not after_bound and not primitive and _accesses(node) else [], node
        return _sequence([*marks, made])

    def into(self, statement: tirx.Stmt) -> tirx.Stmt:
        return ir_transform(statement, self._before, _flat, _VISITED)


def _flat(node):
    if isinstance(node, tirx.SeqStmt) and any(isinstance(part, tirx.SeqStmt) for part in node.seq):
        return _sequence(node.seq)
    return None


def _sequence(statements) -> tirx.Stmt:
    parts = [p for s in statements for p in (s.seq if isinstance(s, tirx.SeqStmt) else [s])]
    return parts[0] if len(parts) == 1 else tirx.SeqStmt(parts)


def mark(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc, list[str]]:
    """Mark the statements of a traced kernel.

    Returns:
        The function, and the line ("file.py:12") that each number of a mark stands for.
    """
    marks = _Marks()
    body = marks.into(func.body)
    if not marks.lines:
        return func, []
    marked = tirx.PrimFunc(func.params, body, func.ret_type, func.buffer_map, func.attrs)
    if hasattr(func, "orig_func"):
        marked.orig_func = func.orig_func
    return marked, list(marks.lines)
