"""A pass of `torch.compile` that replaces a GEMM and its neighbouring collective by a fused operator.

    torch._inductor.config.post_grad_custom_pre_pass = FuseCollectives()   # off unless a program does this

It replaces code with torch's functional collectives, in groups for which `tilescale_net.init` was called:

- `mm(all_gather_tensor(x, 0, group), w)`: `ops.all_gather_matmul`, if nothing else reads the gathered rows;
- `reduce_scatter_tensor(mm(x, w), "sum", 0, group)`: `ops.matmul_reduce_scatter`;
- `all_reduce(mm(x, w), "sum", group)`: `ops.matmul_all_reduce`;

each if nothing else reads the GEMM's result, which may be viewed with more dimensions of rows in between, if shapes are
known, and if `kernels.fused.choice` finds the fused way faster. Other calls stay unchanged, such as a GEMM with a bias.
All ranks compile the same graph, so all replace the same calls.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from tilescale_net.errors import TileScaleError
from tilescale_net.kernels.fused import choice
from tilescale_net.ops import fused, group_objects

_c10d, _ours = torch.ops._c10d_functional, torch.ops.tilescale_net


class Found(NamedTuple):
    """A GEMM and its collective in a graph.

    Attributes:
        kind: the operator that computes both. x, w, group: its arguments; `x` may have more dimensions than two.
        nodes: the replaced ones, the last to be computed first.
    """

    kind: str
    x: Any
    w: Any
    group: str
    nodes: list[Any]


class FuseCollectives(CustomGraphPass):
    """See the top of this file; a call changes a graph of ATen operators in place.

    Attributes:
        replaced: names of the operators inserted so far, in order.
    """

    def __init__(self) -> None:
        self.replaced: list[str] = []

    def uuid(self) -> bytes:
        """For Inductor's cache of graphs."""
        return get_hash_for_files((__file__, choice.__file__, str(choice.MEASURED)))

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Replace calls in place."""
        for node in list(graph.nodes):
            for pattern in (_gathered, _scattered, _reduced):
                match = pattern(node)
                if match is not None and _is_faster(match):
                    self._replace(graph, match)
                    break
        graph.eliminate_dead_code()

    def _replace(self, graph: torch.fx.Graph, match: Found) -> None:
        node, x = match.nodes[0], match.x
        value = node.meta["val"]
        flags = (False,) if match.kind == "matmul_all_reduce" else ()
        with graph.inserting_before(node):
            if x.meta["val"].dim() != 2:
                x = _viewed(graph, x, [-1, x.meta["val"].shape[-1]])
            ours = graph.call_function(getattr(_ours, match.kind).default, (x, match.w, *flags, None, match.group))
            ours.meta.update(node.meta)
            if value.dim() != 2:
                ours.meta["val"] = value.reshape(-1, value.shape[-1])
                ours = _viewed(graph, ours, list(value.shape))
        node.replace_all_uses_with(ours)
        for each in match.nodes:  # torch keeps unread waits, and so the collective and the GEMM
            graph.erase_node(each)
        self.replaced.append(match.kind)


def _viewed(graph: torch.fx.Graph, node: Any, shape: list[int]) -> Any:
    view = graph.call_function(torch.ops.aten.reshape.default, (node, shape))
    view.meta["val"] = node.meta["val"].reshape(shape)
    return view


def _call(node: Any, target: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target == target


def _alone(node: Any, target: Any) -> bool:
    """Whether a node is a call of `target` whose result one node reads."""
    return _call(node, target) and len(node.users) == 1


def _rows_of(node: Any) -> list[Any]:
    """A node, then the nodes that it is a view of; such views keep the last dimension, and one node reads each."""
    nodes = [node]
    while any(_alone(nodes[-1], view) for view in _VIEWS):
        inner = nodes[-1].args[0]
        if inner.meta["val"].shape[-1:] != nodes[-1].meta["val"].shape[-1:]:
            break
        nodes.append(inner)
    return nodes


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)


def _gathered(node: Any) -> Found | None:
    if not _call(node, torch.ops.aten.mm.default):
        return None
    *views, waited = _rows_of(node.args[0])
    if not _alone(waited, _c10d.wait_tensor.default):
        return None
    gathered = waited.args[0]
    if not _alone(gathered, _c10d.all_gather_into_tensor.default):
        return None
    x, _, group = gathered.args
    return Found("all_gather_matmul", x, node.args[1], group, [node, *views, waited, gathered])


def _behind(node: Any, collective: Any, kind: str) -> Found | None:
    """A wait for a collective of sums of a GEMM's result."""
    if not _call(node, _c10d.wait_tensor.default):
        return None
    called = node.args[0]
    if not _alone(called, collective) or called.args[1] != "sum":
        return None
    *views, product = _rows_of(called.args[0])
    if not _alone(product, torch.ops.aten.mm.default):
        return None
    x, w = product.args
    return Found(kind, x, w, called.args[-1], [node, called, *views, product])


def _scattered(node: Any) -> Found | None:
    return _behind(node, _c10d.reduce_scatter_tensor.default, "matmul_reduce_scatter")


def _reduced(node: Any) -> Found | None:
    return _behind(node, _c10d.all_reduce.default, "matmul_all_reduce")


def _is_faster(match: Found) -> bool:
    """Whether the fused way is expected to be faster than the graph's."""
    left, right = match.x.meta.get("val"), match.w.meta.get("val")
    if left is None or right is None or left.dtype != right.dtype or left.dtype == fused.SCALED:
        return False
    if not left.dim() or not all(isinstance(extent, int) for extent in (*left.shape, *right.shape)):
        return False
    if not (left.is_contiguous() and (right.is_contiguous() or right.t().is_contiguous())):  # which would be copied
        return False
    try:
        world = group_objects.world_of(match.group)
    except TileScaleError:  # a group of torch's alone
        return False
    (*rows, k), n = left.shape, right.shape[1]
    problem = choice.GemmProblem(match.kind, world.size, math.prod(rows), k, n, left.dtype)
    if choice.fits(problem):
        return False
    # Ranks cannot communicate while torch traces a graph; the operator itself checks everything.
    way, _ = choice.choose(problem, world, is_mapped=0 not in world.peer_base, of_this_machine=False)
    return way != "unfused"
