"""Prevents transformations of tilelang that break if another PE writes a kernel's memory.

- T.Pipelined issues copies of later iterations before waits of earlier ones (also past atomics: tile-ai/tilelang#2595):
  rejected with primitives inside.
- tilelang evaluates conditions and trip counts that read memory more than once, and moves them out of loops and past
  waits: they are evaluated once, in place, into a variable.
- T.copy may become a TMA copy, in the async proxy, which waits and signals do not order: switched off, and explicit TMA
  is rejected. If a wait has `proxy="async"`, all waits of the kernel order both proxies, reads may use TMA, and calls
  that cannot order TMA are rejected. T.copy writes by TMA only if the kernel does nothing but wait; explicit TMA writes
  are rejected without `T.tma_store_wait(0, read=False)` before the call that announces them.
- Warp specialisation gives a block further threads and splits it: primitives of blocks inside one part are rejected.
- T.Parallel runs its body on some threads at a time: primitives of warps and blocks are rejected there.
- Loads among an operator's operands get no bounds check: they are given one.
- T.sync_threads under a condition that splits a warp, which tilelang may drop (tile-ai/tilelang#2612): rejected.
- T.gemm, and a layout annotation, permute tiles of shared memory: no source of a put.
- Since tile-ai/tilelang#1451 Simplify evaluates the extent of a loop as if the body ran: an extent that can only be 0
  or 1 becomes 1. With four blocks `for i in T.serial((5 - bx) // 4)` ran in all four (tilelang 0.1.15), although two
  have no iteration. Such a loop gets a condition around it, which Simplify evaluates without that assumption.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from tilelang import tvm
from tvm import arith, ir, tirx
from tvm.tirx.stmt_functor import ir_transform, post_order_visit, substitute

from tilescale_net.compiler.ir import (
    OUR_OPS,
    Node,
    block_threads,
    bound_values,
    collect,
    kernel_name,
    loads_memory,
    location_suffix,
    op_name,
    opaque_call,
    operator_of,
    our_calls,
    splits,
    statement_suffix,
    typed_name,
)
from tilescale_net.compiler.operators import OPAQUE, OPERATORS
from tilescale_net.compiler.versions import lane_variables
from tilescale_net.errors import KernelError

_COPY = "tl.tileop.copy"
_TMA_OPS = {"tl.tileop.tma_copy", "tl.tileop.im2col", "tl.tma_load", "tl.tma_store"}
_BARRIER = "tirx.tvm_storage_sync"
_BLOCK_SCOPE = "|".join(row.name for row in OPERATORS.values() if row.scope == "block")
_TMA_ADD, _STORE_WAIT = "tl.tileop.atomicadd", "tl.tma_store_wait"
_TMA_ANNOTATIONS = ("is_gather4", "is_scatter4", "cluster_mask")
_PIPELINE_ANNOTATIONS = ("num_stages", "tl_pipeline_order", "tl_pipeline_stage", "software_pipeline_stage")


def check(func: tirx.PrimFunc) -> None:
    """Raise KernelError, with the author's line, for hazards without a remedy."""
    _check_barriers(func)
    if not our_calls(func.body):
        return
    if orders_async(func.body):
        _check_async(func)
    else:
        _check_tma(func)
    for loop in collect(func.body, lambda node: isinstance(node, tirx.For)):
        _check_loop(loop)
    _check_tiles(func)


def rewrite(body: tirx.Stmt, guards: bool = True) -> tirx.Stmt:
    """Remove the other hazards, see above; without `guards`, loads among operands stay unchanged."""
    if not our_calls(body):
        return body
    if guards:
        body = ir_transform(body, None, lambda c: _guard_loads(c) if op_name(c) in OUR_OPS else None, ["tirx.Call"])
    body = ir_transform(body, None, _without_look, ["tirx.Evaluate"])
    if opaque_call(body) is not None:  # else the kernel does not wait for peers' data
        settle = _settle_async(body) if orders_async(body) else _settle_generic
        body = ir_transform(body, None, settle, ["tirx.Call"])
    return ir_transform(body, None, _evaluate_once, ["tirx.IfThenElse", "tirx.For"])


def _check_barriers(func: tirx.PrimFunc) -> None:
    for branch in _warp_splitting(func):
        found = collect(branch, lambda node: isinstance(node, tirx.Evaluate) and op_name(node.value) == _BARRIER)
        if found:
            raise KernelError(
                f"kernel {kernel_name(func)}: T.sync_threads() stands under `{branch.condition}`, which is true for some threads "
                "of a warp and false for others; all threads of a warp must reach it: move it out of the condition"
                + statement_suffix(found[0])
            )


def barrier_refused(func: tirx.PrimFunc) -> KernelError:
    """The error of a kernel for which tilelang would need a barrier of some threads of a warp."""
    branch = next(_warp_splitting(func), None)
    where = f"`{branch.condition}`" if branch is not None else "a condition"
    return KernelError(
        f"kernel {kernel_name(func)}: threads exchange data through shared memory under {where}, which holds for some threads of "
        "a warp and not for others, and tilelang needs a barrier there; make the condition hold for whole warps"
        + (statement_suffix(branch) if branch is not None else "")
    )


def _warp_splitting(func: tirx.PrimFunc) -> Iterator[tirx.IfThenElse]:
    """The branches of a traced kernel that split a warp, as far as threadIdx.x tells."""
    branches = collect(func.body, lambda node: isinstance(node, tirx.IfThenElse))
    threads = block_threads(func)
    if not branches or threads is None:
        return
    bound = bound_values(func.body)
    lanes = lane_variables(func.body)
    named = {v: value for v, value in bound.items() if v not in lanes}
    for branch in branches:
        condition = branch.condition
        for _ in range(16):  # values of names may contain names
            condition = substitute(condition, named)
        if any(splits(condition, lane, threads, 32) for lane in lanes):
            yield branch


def _check_loop(node: tirx.For) -> None:
    if node.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
        for call in our_calls(node.body):
            operator = operator_of(call)
            scope = operator.scope_of(call) if operator is not None else "thread"
            if scope in ("block", "warp"):
                raise KernelError(
                    f"{typed_name(call)} is called at {scope} scope inside T.Parallel, whose iterations run on different "
                    "threads; use the thread-scope primitive there, or move the call out of the loop"
                    + location_suffix(call)
                )
    annotations = node.annotations or {}
    pipelined = [key for key in _PIPELINE_ANNOTATIONS if key in annotations]
    if pipelined and not (pipelined == ["num_stages"] and int(annotations["num_stages"]) == 0):
        call = opaque_call(node.body)
        if call is not None:
            raise KernelError(
                f"{typed_name(call)} is called inside T.Pipelined, which moves the copies of later iterations before it; "
                "wait before the loop, or use T.serial around a T.Pipelined without primitives" + location_suffix(call)
            )


def _check_tma(func: tirx.PrimFunc) -> None:
    call = opaque_call(func.body)
    found = [op_name(node) for node in collect(func.body, _asks_for_tma)]
    if found and call is not None:
        raise KernelError(
            f"kernel {kernel_name(func)} asks for TMA ({_typed(found[0])}) and uses {typed_name(call)}: waits and signals do not "
            "order TMA accesses, so it could read data before they arrive; use T.copy for data that peers "
            f"exchange, or move the TMA part to another kernel{location_suffix(call)}"
        )


def _typed(name: str) -> str:
    """One of tilelang's operators as authors call it."""
    return "T." + name.rpartition(".")[2].replace("atomicadd", "atomic_add")


def _asks_for_tma(node: Node) -> bool:
    """Whether a call is always TMA; other copies become TMA only if allowed."""
    name = op_name(node)
    if name == _COPY:
        preferred = str(node.annotations.get("prefer_instruction", "")).strip('"')
        return preferred == "tma" or any(key in node.annotations for key in _TMA_ANNOTATIONS)
    return name in _TMA_OPS or (name == _TMA_ADD and bool(int(node.annotations.get("use_tma", 0))))


def orders_async(body: Node) -> bool:
    """Whether a wait of the kernel orders the async proxy, to which TMA belongs."""
    return any(row.acquires == "async" for row in map(operator_of, our_calls(body)) if row is not None)


def _check_async(func: tirx.PrimFunc) -> None:
    for call in our_calls(func.body):
        row = operator_of(call)
        if row is not None and row.orders_loads_alone(call):
            raise KernelError(
                f'kernel {kernel_name(func)} has a wait with proxy="async", which allows reads by TMA, and {typed_name(call)}, '
                "which does not order TMA; wait for a signal instead, or omit proxy" + location_suffix(call)
            )
    _check_stores(func)


def _check_stores(func: tirx.PrimFunc) -> None:
    """Reject calls, in program order, that announce memory which TMA may not have written yet."""
    begun: list[str] = []

    def look(node: Node) -> None:
        name = op_name(node)
        if name == _STORE_WAIT and all(isinstance(a, tirx.IntImm) and not int(a) for a in node.args):
            begun.clear()  # after a wait that leaves some in flight, a signal may announce any of them
        elif _asks_for_tma(node) and (name == "tl.tma_store" or _is_global(node.args[1])):
            begun.append(name)
        elif begun and _announces(node):
            raise KernelError(
                f"kernel {kernel_name(func)} writes global memory with TMA ({begun[0]}), and {name} after it orders only "
                "ordinary writes: it could announce data that have not arrived; call T.tma_store_wait(0, read=False) between "
                "them, by the thread that began the write, or use T.copy" + location_suffix(node)
            )

    post_order_visit(func.body, look)


def _announces(node: Node) -> bool:
    """Whether a call may announce this kernel's writes to peers: all except waits."""
    row = operator_of(node)
    return row is not None and row.effect == OPAQUE and row.operation != "wait"


def check_specialized(name: str, source: str) -> None:
    """Raise KernelError where generated source calls a block-scope primitive in one part of a split block."""
    for match in re.finditer(r"^(\s*)if \(\(?\(int\)threadIdx\.x\)? < \d+\) \{$", source, re.MULTILINE):
        # The branch and its counterpart end at the same indentation.
        end = re.compile(rf"^{match[1]}\}}$", re.MULTILINE).search(source, match.end())
        part = source[match.start() : end.end() if end else len(source)]
        call = re.search(rf"tsn::(\w+)<[^;(]*tsn::Scope::block|tsn::({_BLOCK_SCOPE})\b", part)
        if call and "else" in part:
            raise KernelError(
                f"kernel {name}: tsn.{call[1] or call[2]} is called at block scope by one part of a warp-specialised block, "
                "whose other threads never reach it; use the thread- or warp-scope primitive there, or leave "
                "tl.disable_warp_specialized on"
            )


def _check_tiles(func: tirx.PrimFunc) -> None:
    """Reject puts from tiles with permuted elements."""
    disordered: dict[tirx.Var, str] = {}

    def look(node: Node) -> None:
        name = op_name(node)
        if name.startswith("tl.tileop.") and "gemm" in name:
            post_order_visit(tirx.Evaluate(node), lambda n: _note_tile(n, disordered))
        if isinstance(node, tirx.SBlock) and "layout_map" in node.annotations:
            disordered.update({data: "a layout of its own" for data in node.annotations["layout_map"]})

    post_order_visit(func.body, look)
    for call in our_calls(func.body):
        row = operator_of(call)
        if row is None or "tile" not in row.names:
            continue
        tile = row.read(call).tile.args[1]
        reason = next((why for data, why in disordered.items() if data.same_as(tile)), None)
        if reason is not None:
            raise KernelError(
                f"{typed_name(call)} sends the tile {tile.name}, which has {reason}: its elements are not in order; T.copy "
                f"it to another shared tensor first{location_suffix(call)}"
            )


def _note_tile(node: Node, found: dict[tirx.Var, str]) -> None:
    if isinstance(node, tirx.BufferLoad) and node.buffer.scope().startswith("shared"):
        found[node.buffer.data] = "the layout of an operand of T.gemm"
    if op_name(node) == "tirx.tvm_access_ptr":
        found[node.args[1]] = "the layout of an operand of T.gemm"


def _settle_generic(call: tirx.Call) -> tirx.Call | None:
    return _without_tma(call) if op_name(call) == _COPY else None


def _settle_async(body: Node) -> Callable[[tirx.Call], tirx.Call | None]:
    # TMA writes are complete at the end of the kernel, but not for an earlier put or signal.
    only_waits = not any(map(_announces, our_calls(body)))

    def settle(call: tirx.Call) -> tirx.Call | None:
        row = operator_of(call)
        if row is not None and row.async_form:
            form = tvm.ir.Op.get(OPERATORS[row.async_form].op_name)
            return tirx.Call(call.dtype, form, call.args, annotations=call.annotations, span=call.span)
        writes = op_name(call) == _COPY and _is_global(call.args[1])
        return _without_tma(call) if writes and not only_waits else None

    return settle


def _is_global(region: Node) -> bool:
    """Whether an operand of a copy lies in global memory."""
    loads = collect(tirx.Evaluate(region), lambda node: isinstance(node, tirx.BufferLoad))
    return any(load.buffer.scope() == "global" for load in loads)


def _without_tma(copy: tirx.Call) -> tirx.Call:
    annotations = {**dict(copy.annotations), "disable_tma": tirx.IntImm("bool", 1)}
    return tirx.Call(copy.dtype, copy.op, copy.args, annotations=annotations, span=copy.span)


def _without_look(statement: tirx.Evaluate) -> tirx.Evaluate | None:
    """A wait with an unused result need not return the latest value, see device/wait.h."""
    row = operator_of(statement.value)
    if row is None or "looks" not in row.names:
        return None
    return tirx.Evaluate(row.replace(statement.value, looks=tirx.IntImm("int32", 0)))


def _evaluate_once(node: Node) -> tirx.Stmt | None:
    if isinstance(node, tirx.IfThenElse):
        if not loads_memory(node.condition):
            return None
        condition = tirx.Var("condition", node.condition.dtype)
        branch = tirx.IfThenElse(condition, node.then_case, node.else_case)
        return tirx.SeqStmt([tirx.Bind(condition, node.condition), branch])
    if node.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED) or not loads_memory(node.extent):
        return None
    return tirx.SeqStmt([*_extent_bound(node)])


def _extent_bound(loop: tirx.For) -> tuple[tirx.Bind, tirx.For]:
    """A statement that evaluates a loop's extent once, and the loop with the result."""
    extent = tirx.Var("extent", loop.extent.dtype)
    step = getattr(loop, "step", None)
    again = tirx.For(loop.loop_var, loop.min, extent, loop.kind, loop.body, None, loop.annotations, step)
    return tirx.Bind(extent, loop.extent), again


def _guard_loads(call: tirx.Call) -> tirx.Call:
    def guard(load: tirx.BufferLoad) -> tirx.PrimExpr | None:
        if load.buffer.scope() != "global":
            return None
        inside = [
            condition
            for index, size in zip(load.indices, load.buffer.shape)
            if not (isinstance(index, tirx.IntImm) and isinstance(size, tirx.IntImm))
            for condition in (index >= 0, index < size)
        ]
        return tirx.if_then_else(tirx.all(*inside), load, tirx.const(0, load.dtype)) if inside else None

    def visit(expr: tirx.PrimExpr) -> Any:
        if not isinstance(expr, tirx.PrimExpr):
            return expr
        return ir_transform(tirx.Evaluate(expr), None, guard, ["tirx.BufferLoad"]).value

    return tirx.Call(
        call.dtype, call.op, [visit(arg) for arg in call.args], annotations=call.annotations, span=call.span
    )


# -- loops that may not run at all ------------------------------------------------------------------------------------

_ONE_BY_ONE = (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED)


def guard_empty_loops(body: tirx.Stmt) -> tirx.Stmt:
    """`body` with conditions around loops that run at most once."""
    found = _EmptyLoops()
    found.look(body)
    if not found.loops:
        return body
    return ir_transform(
        body, None, lambda loop: _guarded_loop(loop) if loop.loop_var in found.loops else None, ["tirx.For"]
    )


def _guarded_loop(loop: tirx.For) -> tirx.Stmt:
    if not loads_memory(loop.extent):
        return tirx.IfThenElse(loop.extent > 0, loop, None)
    bind, again = _extent_bound(loop)
    return tirx.SeqStmt([bind, tirx.IfThenElse(again.extent > 0, again, None)])


class _EmptyLoops:
    """Follows the known bounds of a kernel's variables as Simplify does. `loops`: variables of loops that run at most
    once."""

    def __init__(self) -> None:
        self.loops: set[tirx.Var] = set()
        self._analyzer = arith.Analyzer()

    def look(self, node: Node) -> None:
        """Visit a statement and its children."""
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
            with contextlib.suppress(TypeError, ValueError):  # only numeric bounds matter
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
