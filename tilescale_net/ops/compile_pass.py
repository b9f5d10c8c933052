"""A pass of `torch.compile` that puts fused operators in place of a GEMM with the collective before or behind it.

    torch._inductor.config.post_grad_custom_pre_pass = FuseCollectives()   # off unless a program does this

It replaces what users write with torch's functional collectives, in groups that `tilescale_net.init` was called for:

- `mm(all_gather_tensor(x, 0, group), w)`: `ops.all_gather_matmul`, where nothing else reads the gathered rows;
- `reduce_scatter_tensor(mm(x, w), "sum", 0, group)`: `ops.matmul_reduce_scatter`;
- `all_reduce(mm(x, w), "sum", group)`: `ops.matmul_all_reduce`;

each where nothing else reads the GEMM's result, shapes are known, and `kernels.fused.choice` finds the fused way faster for
them: anything else stays as it is. All ranks compile the same graph, so all replace the same calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from tilescale_net.errors import TileScaleError
from tilescale_net.kernels.fused import choice
from tilescale_net.ops import fused, group_objects

_c10d, _ours = torch.ops._c10d_functional, torch.ops.tilescale_net


class FuseCollectives(CustomGraphPass):
    """See the top of this file; a call changes a graph of ATen operators in place.

    Attributes:
        replaced: names of the operators that calls so far have put in, in order.
    """

    def __init__(self) -> None:
        self.replaced: list[str] = []

    def uuid(self) -> bytes:
        """For Inductor's cache of graphs."""
        return get_hash_for_files((__file__, choice.__file__, str(choice.MEASURED)))

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Replace what is replaced, in place."""
        for node in list(graph.nodes):
            for pattern in (_gathered, _scattered, _reduced):
                found = pattern(node)
                if found is not None and _is_faster(*found):
                    self._replace(graph, node, *found)
                    break
        graph.eliminate_dead_code()

    def _replace(self, graph: torch.fx.Graph, node: Any, kind: str, x: Any, w: Any, group: str) -> None:
        given = (False,) if kind == "matmul_all_reduce" else ()
        with graph.inserting_before(node):
            ours = graph.call_function(getattr(_ours, kind).default, (x, w, *given, None, group))
        ours.meta.update(node.meta)
        node.replace_all_uses_with(ours)
        self.replaced.append(kind)


def _call(node: Any, target: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target == target


def _mm_alone(node: Any) -> bool:
    """Whether a node is a GEMM whose result one node reads."""
    return _call(node, torch.ops.aten.mm.default) and len(node.users) == 1


Found = tuple[str, Any, Any, str]


def _gathered(node: Any) -> Found | None:
    if not _call(node, torch.ops.aten.mm.default):
        return None
    waited, w = node.args
    if not _call(waited, _c10d.wait_tensor.default) or len(waited.users) != 1:
        return None
    gathered = waited.args[0]
    if not _call(gathered, _c10d.all_gather_into_tensor.default) or len(gathered.users) != 1:
        return None
    return "all_gather_matmul", gathered.args[0], w, gathered.args[2]


def _behind(node: Any, collective: Any, kind: str) -> Found | None:
    """A wait for a collective of sums of a GEMM's result."""
    if not _call(node, _c10d.wait_tensor.default):
        return None
    called = node.args[0]
    if not _call(called, collective) or len(called.users) != 1 or called.args[1] != "sum":
        return None
    return (kind, *called.args[0].args, called.args[-1]) if _mm_alone(called.args[0]) else None


def _scattered(node: Any) -> Found | None:
    return _behind(node, _c10d.reduce_scatter_tensor.default, "matmul_reduce_scatter")


def _reduced(node: Any) -> Found | None:
    return _behind(node, _c10d.all_reduce.default, "matmul_all_reduce")


def _is_faster(kind: str, x: Any, w: Any, group: str) -> bool:
    """Whether the fused way is expected to be faster than what the graph does."""
    left, right = x.meta.get("val"), w.meta.get("val")
    if left is None or right is None or left.dtype != right.dtype or left.dtype == fused.SCALED:
        return False
    if not all(isinstance(extent, int) for extent in (*left.shape, *right.shape)):
        return False
    try:
        world = group_objects.world_of(group)
    except TileScaleError:  # a group of torch's alone
        return False
    (rows, k), n = left.shape, right.shape[1]
    problem = choice.GemmProblem(kind, world.size, rows, k, n, left.dtype)
    if choice.fits(problem):
        return False
    # Ranks cannot ask one another while torch traces a graph; the operator itself looks at all points.
    way, _ = choice.choose(problem, world, is_mapped=0 not in world.peer_base, of_this_machine=False)
    return way != "unfused"
