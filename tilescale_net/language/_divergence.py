"""Scope misuse that can be seen while tracing: a block- or warp-scope call made by a part of its scope."""

from tilelang.language.eager.builder import Builder
from tilelang.language.frame import get_let_value, has_let_value
from tilelang.language.kernel import KernelLaunchFrame
from tvm import tirx
from tvm.tirx.script.builder.frame import IfFrame, WhileFrame
from tvm.tirx.stmt_functor import post_order_visit, substitute

from tilescale_net.compiler.ir import splits
from tilescale_net.language._primitive import PrimitiveError

WARP = 32


def require_converged(scope: str) -> None:
    """Raise PrimitiveError when an enclosing condition provably splits a block or a warp.

    Conditions on run-time values are taken on trust; the simulator finds the rest. T.Parallel is checked in passes.py,
    because a loop's kind is not known while its body is traced.
    """
    if scope == "thread":
        return
    for frame in Builder.current().frames:
        if isinstance(frame, (IfFrame, WhileFrame)) and _splits(frame.condition, scope):
            raise PrimitiveError(
                f"is made at {scope} scope under `{frame.condition}`, which holds for some threads of a {scope} and not "
                f"for others; all threads of the {scope} must make the call"
            )


def _inline(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """Replace names that the kernel bound to expressions by those expressions."""
    for _ in range(16):
        bound: dict[tirx.Var, tirx.PrimExpr] = {}

        def look(node, bound=bound):
            if isinstance(node, tirx.Var) and has_let_value(node):
                value = get_let_value(node)
                if isinstance(value, tirx.PrimExpr):
                    bound[node] = value

        post_order_visit(expr, look)
        if not bound:
            return expr
        expr = substitute(expr, bound)
    return expr


def _splits(condition, scope: str) -> bool:
    """Whether `condition`, a function of threadIdx.x alone, differs among the threads of some block or warp."""
    launch = KernelLaunchFrame.Current()
    if not isinstance(condition, tirx.PrimExpr) or launch.thread_extents is None:
        return False
    threads, height, depth = launch.get_thread_extents()
    if (height, depth) != (1, 1):
        return False
    return splits(_inline(condition), launch.thread_vars[0], threads, threads if scope == "block" else WARP)
