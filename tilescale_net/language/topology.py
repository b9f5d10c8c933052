"""The context parameter, and a PE's position in the job."""

import tilelang.language as T
from tvm import tirx

from tilescale_net.compiler.operators import OPERATORS
from tilescale_net.compiler.passes import CONTEXT_WORDS
from tilescale_net.language._operands import Number, pe_index
from tilescale_net.language._trace import primitive

__all__ = ["Context", "is_direct", "my_pe", "n_node_pes", "n_pes", "node_pe"]


def Context() -> tirx.Buffer:
    """Annotation of the extra parameter of a communicating kernel: `ctx: N.Context()`.

    Only the primitives use it. Calls of the compiled kernel omit it.

    Example: def main(ctx: N.Context(), x: T.Tensor((n,), "float32")): ...
    """
    return T.Tensor((tirx.Var(CONTEXT_WORDS, "int32"),), "int64")


@primitive
def my_pe() -> tirx.PrimExpr:
    """Index of this PE in team "world", int32.

    Example: me = N.my_pe()
    """
    return OPERATORS["my_pe"]()


@primitive
def n_pes() -> tirx.PrimExpr:
    """Size of team "world", int32.

    Example: right = (N.my_pe() + 1) % N.n_pes()
    """
    return OPERATORS["n_pes"]()


@primitive
def node_pe() -> tirx.PrimExpr:
    """Index of this PE in team "node", int32. A node's PEs are consecutive: my_pe() - node_pe() + i.

    Example: first = N.my_pe() - N.node_pe()
    """
    return OPERATORS["node_pe"]()


@primitive
def n_node_pes() -> tirx.PrimExpr:
    """Size of team "node", int32.

    Example: last = N.my_pe() - N.node_pe() + N.n_node_pes() - 1
    """
    return OPERATORS["n_node_pes"]()


@primitive
def is_direct(pe: Number) -> tirx.PrimExpr:
    """Whether the memory of `pe` is mapped (same node), bool; otherwise the path is the proxy.

    Args:
        pe: index in team "world", integer.

    Example: near = N.is_direct(pe)
    """
    return OPERATORS["is_direct"](pe_index(pe))
