"""Small helpers on TVM's IR that the passes share, and names of kernels."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import post_order_visit, substitute

from tilescale_net.compiler.operators import CONTEXT, OPERATORS, PURE, RING, TYPED, Operator
from tilescale_net.compiler.versions import get_stmt_span, launch_threads_of
from tilescale_net.errors import KernelError

# A node of a kernel's tree.
Node: TypeAlias = tirx.Stmt | tirx.PrimExpr

PLACEHOLDERS = {CONTEXT, RING}
_BY_OP_NAME = {operator.op_name: operator for operator in OPERATORS.values()}
OUR_OPS = set(_BY_OP_NAME) | PLACEHOLDERS
OPAQUE_OPS = {operator.op_name for operator in OPERATORS.values() if operator.effect != PURE}


def op_name(node: Node) -> str:
    """Name of the operator that `node` calls, or ''."""
    return getattr(node.op, "name", "") if isinstance(node, tirx.Call) else ""


def typed_name(call: tirx.Call) -> str:
    """The primitive of a call as its author typed it, such as N.put_block; TVM's name for generated calls."""
    typed = call.annotations.get(TYPED)
    return str(typed.value) if typed is not None else op_name(call)


def operator_of(node: Node) -> Operator | None:
    """The row of the operator that `node` calls; None for other nodes, and for placeholders."""
    return _BY_OP_NAME.get(op_name(node))


def collect(body: Node, wanted: Callable[[Node], Any]) -> list[Any]:
    """The nodes of a tree for which `wanted` is true, inner ones first."""
    found: list[Any] = []
    post_order_visit(body, lambda node: found.append(node) if wanted(node) else None)
    return found


def sequence(statements: Iterable[tirx.Stmt]) -> tirx.Stmt:
    """One flat sequence of several statements."""
    flat = [part for s in statements for part in (s.seq if isinstance(s, tirx.SeqStmt) else [s])]
    return flat[0] if len(flat) == 1 else tirx.SeqStmt(flat)


def our_calls(body: Node) -> list[tirx.Call]:
    """Calls of this package's operators and placeholders in `body`."""
    return collect(body, lambda node: op_name(node) in OUR_OPS)


def opaque_call(body: Node) -> tirx.Call | None:
    """The first call in `body` that other memory accesses may not pass, or None."""
    return next((call for call in our_calls(body) if op_name(call) in OPAQUE_OPS), None)


def loads_memory(expr: tirx.PrimExpr) -> bool:
    """Whether `expr` reads memory that other threads or PEs may write."""
    return bool(collect(expr, lambda n: isinstance(n, tirx.BufferLoad) and not n.buffer.scope().startswith("local")))


def block_threads(func: tirx.PrimFunc) -> int | None:
    """Threads per block if all launches of a traced kernel agree and have one dimension; else None."""
    launches = launch_threads_of(func.body)
    if len(set(launches)) != 1 or launches[0] is None or any(extent != 1 for extent in launches[0][1:]):
        return None
    return launches[0][0]


def bound_values(body: Node) -> dict[tirx.Var, tirx.PrimExpr]:
    """The values of the names that a body binds."""
    return {node.var: node.value for node in collect(body, lambda node: isinstance(node, tirx.Bind))}


def splits(condition: tirx.PrimExpr, lane: tirx.Var, threads: int, group: int) -> bool:
    """Whether a condition, if it depends on threadIdx.x (`lane`) alone, differs among the threads of a group of a block."""
    others, uses_lane = False, False

    def look(node: Node) -> None:
        nonlocal uses_lane, others
        if isinstance(node, tirx.Var):
            uses_lane, others = uses_lane or node.same_as(lane), others or not node.same_as(lane)
        elif isinstance(node, (tirx.Call, tirx.BufferLoad)):
            others = True

    post_order_visit(condition, look)
    if not uses_lane or others:
        return False
    analyzer = tvm.arith.Analyzer()
    holds = [bool(analyzer.simplify(substitute(condition, {lane: tirx.IntImm("int32", t)}))) for t in range(threads)]
    return any(len(set(holds[first : first + group])) > 1 for first in range(0, threads, group))


def changed_block(block: tirx.SBlock, body: tirx.Stmt, allocated: Sequence[tirx.Buffer]) -> tirx.SBlock:
    """A block with another body and other allocated buffers."""
    return tirx.SBlock(
        block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init, [*allocated],
        block.match_buffers, block.annotations,
    )  # fmt: skip


def location_suffix(call: tirx.Call) -> str:
    """The author's line of a call as the last line of a message, or ''."""
    span = call.span
    return f"\n  at {span.source_name.name}:{span.line}" if span is not None and span.source_name is not None else ""


def statement_suffix(statement: tirx.Stmt) -> str:
    """The author's line of a statement as the last line of a message, or ''."""
    span = get_stmt_span(statement)
    return f"\n  at {span.source_name.name}:{span.line}" if span is not None and span.line > 0 else ""


def kernel_name(func: tirx.PrimFunc) -> str:
    return str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else "<unnamed>"


# -- names of kernels -------------------------------------------------------------------------------------------------

_SUFFIX = "_kernel"  # tilelang's suffix of device functions


def plain_name(name: str) -> str:
    """A kernel's name as one identifier: `moe::dispatch` is moe_dispatch. Raises KernelError: the parts are no
    identifiers."""
    parts = name.split("::")
    if not all(part.isidentifier() for part in parts):
        raise KernelError(f"kernel name {name!r} is not an identifier, nor several with '::' between them")
    return "_".join(parts)


def linked_name(name: str) -> str:
    """The symbol of a kernel on a GPU, without tilelang's suffix. For a name in a namespace it is the mangled name of a
    function with a parameter of type `_kernel`: the suffix ends it, and profilers, and programs that search kernels by
    `::`, see moe::dispatch(_kernel)."""
    parts = name.split("::")
    return name if len(parts) == 1 else f"_ZN{''.join(f'{len(part.encode())}{part}' for part in parts)}E{len(_SUFFIX)}"
