"""Accesses outside of tensors in the simulator: reported, except where a tile is meant to be cut off at the edge.

tilelang guards every access that it cannot prove to be inside: a store outside vanishes, a load gives 0. That is what
an author relies on in tiles (T.copy, T.Parallel, T.vectorized), where a partial tile at the edge is the usual case.
Anywhere else an index outside is a bug. So in the simulator tilelang's guard is off, tiles get theirs from here, and
what is left is reported by the checked pointers of device/host.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from tilescale_net.compiler.ir import op_name
from tilescale_net.compiler.operators import INSIDE

UNGUARDED = {"tl.disable_safe_memory_legalize": True}
_TILES = (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED)


def settle_guards(body: tirx.Stmt, report: bool) -> tirx.Stmt:
    """Replace the marked conditions of the primitives' own guards: by themselves, or by true where accesses report."""

    def settle(call):
        if op_name(call) != INSIDE:
            return None
        return tirx.const(True, "bool") if report else call.args[0]

    return ir_transform(body, None, settle, ["tirx.Call"])


def guard_tiles(body: tirx.Stmt) -> tirx.Stmt:
    """Guard accesses to global and shared memory in tiles as tilelang does: stores outside vanish, loads give 0."""
    depth = 0

    def enter(node):
        nonlocal depth
        depth += node.kind in _TILES if isinstance(node, tirx.For) else 0
        return None

    def leave(node):
        nonlocal depth
        if isinstance(node, tirx.For):
            depth -= node.kind in _TILES
            return None
        inside = _inside(node) if depth else None
        if inside is None:
            return None
        if isinstance(node, tirx.BufferLoad):
            return tirx.if_then_else(inside, node, tirx.const(0, node.dtype))
        return tirx.IfThenElse(inside, node, None)

    return ir_transform(body, enter, leave, ["tirx.For", "tirx.BufferLoad", "tirx.BufferStore"])


def _inside(access) -> tirx.PrimExpr | None:
    """The condition that the indices of an access are inside its tensor; None where none is needed."""
    if access.buffer.scope().startswith("local"):
        return None
    conditions = []
    for index, size in zip(access.indices, access.buffer.shape):
        known = isinstance(index, tirx.IntImm) and isinstance(size, tirx.IntImm) and 0 <= int(index) < int(size)
        if not known and not isinstance(index, tirx.Ramp):
            conditions += [index >= 0, index < size]
    return tirx.all(*conditions) if conditions else None
