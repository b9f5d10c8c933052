"""Loops that may not run at all, and that tilelang would run once.

tilelang's Simplify computes the extent of a loop knowing that the body runs: an extent that can only be 0 or 1 becomes 1.
With four blocks `for i in T.serial((5 - bx) // 4)` ran in all four (tilelang 0.1.15), where two have nothing to do. Such
a loop gets a condition around it, which is simplified without that knowledge.
"""

import contextlib

from tvm import arith, ir, tirx
from tvm.tirx.stmt_functor import ir_transform

from tilescale_net.compiler.ir import loads_memory

_ONE_BY_ONE = (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED)


def guard(body: tirx.Stmt) -> tirx.Stmt:
    """`body` with conditions around the loops that run at most once, and perhaps not at all."""
    found = _Finder()
    found.look(body)
    if not found.loops:
        return body
    return ir_transform(body, None, lambda loop: _guarded(loop) if loop.loop_var in found.loops else None, ["tirx.For"])


def _guarded(loop: tirx.For) -> tirx.Stmt:
    if not loads_memory(loop.extent):
        return tirx.IfThenElse(loop.extent > 0, loop, None)
    held = tirx.Var("extent", loop.extent.dtype)
    step = getattr(loop, "step", None)
    again = tirx.For(loop.loop_var, loop.min, held, loop.kind, loop.body, None, loop.annotations, step)
    return tirx.SeqStmt([tirx.Bind(held, loop.extent), tirx.IfThenElse(held > 0, again, None)])


class _Finder:
    """Follows what is known of a kernel's variables as Simplify does.

    Attributes:
        loops: variables of the loops that run at most once, and perhaps not at all.
    """

    def __init__(self):
        self.loops: set[tirx.Var] = set()
        self._analyzer = arith.Analyzer()

    def look(self, node) -> None:
        """Look at a statement and what it holds."""
        if isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                self.look(part)
        elif isinstance(node, tirx.IfThenElse):
            with self._analyzer.constraint_scope(node.condition):
                self.look(node.then_case)
            if node.else_case is not None:
                with self._analyzer.constraint_scope(tirx.Not(node.condition)):
                    self.look(node.else_case)
        elif isinstance(node, tirx.SBlockRealize):
            self.look(node.block.body)
        elif isinstance(node, tirx.Bind):
            with contextlib.suppress(TypeError, ValueError):  # only bounds of numbers are needed
                if str(node.value.dtype).startswith(("int", "uint")) and not loads_memory(node.value):
                    self._analyzer.bind(node.var, node.value)
        elif isinstance(node, tirx.For):
            self._loop(node)
            self._analyzer.bind(node.loop_var, ir.Range.from_min_extent(node.min, node.extent))
            self.look(node.body)
        else:
            if isinstance(node, tirx.AttrStmt) and node.attr_key == "thread_extent":
                self._analyzer.bind(node.node.var, ir.Range(0, node.value))
            if isinstance(getattr(node, "body", None), tirx.Stmt):
                self.look(node.body)

    def _loop(self, node: tirx.For) -> None:
        if node.kind not in _ONE_BY_ONE or isinstance(node.extent, tirx.IntImm):
            return
        bound = self._analyzer.const_int_bound(node.extent)
        if bound.max_value == 1 and bound.min_value < 1:
            self.loops.add(node.loop_var)
