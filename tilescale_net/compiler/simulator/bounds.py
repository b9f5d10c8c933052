"""Accesses outside of tensors in the simulator: reported, except where a tile is meant to be cut off at the edge.

tilelang guards every access to global memory that it cannot prove to be inside: a store outside vanishes, a load gives
0. That is what an author relies on in tiles (T.copy, T.Parallel, T.vectorized), where a partial tile at the edge is the
usual case. Anywhere else an index outside is a bug. So in the simulator tilelang's guard is off, tiles get theirs from
here, and the rest is reported: by the checked pointers of device/host where the access leaves its tensor, and by
checks of each index from here where it may leave a row only, or lies in shared memory.
"""

from collections.abc import Callable, Iterable
from typing import Any

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from tilescale_net.compiler.ir import Node, collect, op_name
from tilescale_net.compiler.operators import AGREED, INSIDE
from tilescale_net.compiler.versions import REGIONS

UNGUARDED = {"tl.disable_safe_memory_legalize": True}
_TILES = (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED)
_CHOICE = "tirx.if_then_else"
# Operators that take a place in memory: their first argument is written as a load, but does not load.
_PLACES = ("tl.access_ptr", "tirx.address_of", *REGIONS)
# What reports an index that is outside, and sizes that differ; of device/host/checked.h.
_REPORT, _REPORT_SIZES = "tsn_report_index", "tsn_agreed"


def settle_guards(body: tirx.Stmt, report: bool) -> tirx.Stmt:
    """Replace the marked conditions of the primitives' own guards: by themselves, or by reports of indices outside.
    Where accesses report, the checked pointer determines whether an access is inside its tensor; tensors of more than
    one axis need a check of each index. Sizes on which the ends of a copy do not agree are reported there too."""

    def settle(call: tirx.Call) -> tirx.PrimExpr | None:
        if op_name(call) == AGREED:
            value, smallest, *check = call.args
            return tirx.call_extern("int64", _REPORT_SIZES, value, *check) if report else smallest
        if op_name(call) != INSIDE:
            return None
        if not report:
            return call.args[1]
        pairs = call.args[2:]
        if len(pairs) <= 2:
            return tirx.const(True, "bool")
        return _reported(str(call.args[0].value), zip(pairs[::2], pairs[1::2]))

    return ir_transform(body, None, settle, ["tirx.Call"])


def tile_loops(body: tirx.Stmt) -> set[tirx.Var]:
    """Variables of the loops over tiles that an author wrote; later passes may make ordinary loops of them."""
    return {loop.loop_var for loop in collect(body, lambda n: isinstance(n, tirx.For) and n.kind in _TILES)}


def check_accesses(body: tirx.Stmt, tiles: set[tirx.Var]) -> tirx.Stmt:
    """Guard accesses to global memory in `tiles` as tilelang does, and report indices outside of their axis elsewhere."""
    body = ir_transform(body, *_guards(tiles), ["tirx.For", "tirx.BufferLoad", "tirx.BufferStore"])
    body = ir_transform(body, None, _guard_atomic, ["tirx.Evaluate", "tirx.Call"])
    return ir_transform(body, None, _bare_place, ["tirx.Call"])


def _guards(tiles: set[tirx.Var]) -> tuple[Callable[[Node], None], Callable[[Node], Node | None]]:
    """Functions that enter and leave a node: loads and stores get their conditions."""
    depth = 0

    def enter(node: Node) -> None:
        nonlocal depth
        depth += isinstance(node, tirx.For) and node.loop_var in tiles
        return None

    def leave(node: Node) -> Node | None:
        nonlocal depth
        if isinstance(node, tirx.For):
            depth -= node.loop_var in tiles
            return None
        inside = _inside(node, depth > 0)
        if inside is None:
            return None
        if isinstance(node, tirx.BufferLoad):
            return tirx.if_then_else(inside, node, tirx.const(0, node.dtype))
        return tirx.IfThenElse(inside, node, None)

    return enter, leave


def _inside(access: Any, in_tile: bool) -> tirx.PrimExpr | None:
    """The condition under which an access is made; None where none is needed."""
    buffer = access.buffer
    scope = buffer.scope()
    if scope.startswith("local") or scope == "shared.barrier":  # a barrier is not loaded, but named like an element
        return None
    pairs = [(i, size) for i, size in zip(access.indices, buffer.shape) if not isinstance(i, tirx.Ramp)]
    pairs = [pair for pair in pairs if not _is_known(*pair)]
    if not pairs:
        return None
    if scope == "global" and in_tile:
        return tirx.all(*[condition for index, size in pairs for condition in (index >= 0, index < size)])
    if scope == "global" and len(buffer.shape) == 1:
        return None  # the pointer is checked
    return _reported(buffer.name, zip(access.indices, buffer.shape))


def _is_known(index: Any, size: Any) -> bool:
    return isinstance(index, tirx.IntImm) and isinstance(size, tirx.IntImm) and 0 <= int(index) < int(size)


def _reported(name: str, pairs: Iterable[tuple[Any, Any]]) -> tirx.PrimExpr:
    """A condition that is true; where an index is outside of its axis, its evaluation ends the launch with a report."""
    checks = []
    for axis, (index, size) in enumerate(pairs):
        if isinstance(index, tirx.Ramp) or _is_known(index, size):
            continue
        known = [tirx.StringImm(name), tirx.IntImm("int32", axis), tirx.Cast("int64", index), tirx.Cast("int64", size)]
        report = tirx.call_pure_extern("bool", _REPORT, *known)
        checks.append(tirx.Or(tirx.And(index >= 0, index < size), report))
    return tirx.all(*checks) if checks else tirx.const(True, "bool")


def _guarded_place(argument: Any) -> bool:
    return op_name(argument) in _PLACES and op_name(argument.args[0]) == _CHOICE


def _guard_atomic(node: Node) -> Node | None:
    """An atomic operation under the conditions that its places have got."""
    call = node.value if isinstance(node, tirx.Evaluate) else node
    if not op_name(call).startswith("tl.atomic_"):
        return None
    has_value = str(call.dtype) not in ("", "void", "handle")
    conditions = [a.args[0].args[0] for a in call.args if isinstance(a, tirx.Call) and _guarded_place(a)]
    if not conditions or has_value == isinstance(node, tirx.Evaluate):
        return None
    inside = tirx.all(*conditions)
    if not has_value:
        return tirx.IfThenElse(inside, node, None)
    return tirx.if_then_else(inside, call, tirx.const(0, call.dtype))


def _bare_place(call: tirx.Call) -> tirx.Call | None:
    """A place without the condition that it has got like a load."""
    if not _guarded_place(call):
        return None
    return tirx.Call(
        call.dtype, call.op, [call.args[0].args[1], *call.args[1:]], annotations=call.annotations, span=call.span
    )
