"""Reports accesses outside of tensors in the simulator, except in tiles that the edge of a tensor cuts off.

tilelang guards every access to global memory that it cannot prove to be inside: a store outside vanishes, a load gives
0. Authors rely on that in tiles (T.copy, T.Parallel, T.vectorized), where a partial tile at the edge is normal.
Anywhere else an index outside is a bug. So in the simulator tilelang's guard is off, tiles are guarded here, and other
accesses are reported: by the checked pointers of device/host if the access leaves its tensor, and by index checks from
here if it may leave only a row, or is in shared memory.
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
# Operators on a place in memory: their first argument has the form of a load, but does not load.
_PLACES = ("tl.access_ptr", "tirx.address_of", *REGIONS)
# Functions of device/host/checked.h that report an index outside, and differing sizes.
_REPORT, _REPORT_SIZES = "tsn_report_index", "tsn_agreed"


def settle_guards(body: tirx.Stmt, report: bool) -> tirx.Stmt:
    """Replace the marked conditions of the primitives' own guards: by the conditions, or by reports of indices outside.
    If accesses are reported, the checked pointer finds an access outside of its tensor; tensors of more than one axis
    need a check of each index. Sizes on which the ends of a copy disagree are reported there too."""

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
    """Variables of the author's loops over tiles, which later passes may turn into ordinary loops."""
    return {loop.loop_var for loop in collect(body, lambda n: isinstance(n, tirx.For) and n.kind in _TILES)}


def check_accesses(body: tirx.Stmt, tiles: set[tirx.Var]) -> tirx.Stmt:
    """Guard accesses to global memory in `tiles` as tilelang does, and report indices outside of their axis elsewhere."""
    body = ir_transform(body, *_guards(tiles), ["tirx.For", "tirx.BufferLoad", "tirx.BufferStore"])
    body = ir_transform(body, None, _guard_atomic, ["tirx.Evaluate", "tirx.Call"])
    return ir_transform(body, None, _bare_place, ["tirx.Call"])


def _guards(tiles: set[tirx.Var]) -> tuple[Callable[[Node], None], Callable[[Node], Node | None]]:
    """Functions for entering and leaving a node, which add conditions to loads and stores."""
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
    """The condition of an access; None without one."""
    buffer = access.buffer
    scope = buffer.scope()
    if scope.startswith("local") or scope == "shared.barrier":  # a barrier is named like an element, but not loaded
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
    """A true condition whose evaluation ends the launch with a report if an index is outside of its axis."""
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
    """An atomic operation under the conditions of its operands."""
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
    """An operand without the condition that it got as a load."""
    if not _guarded_place(call):
        return None
    return tirx.Call(
        call.dtype, call.op, [call.args[0].args[1], *call.args[1:]], annotations=call.annotations, span=call.span
    )
