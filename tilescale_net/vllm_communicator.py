"""vLLM's communicator of a group of tensor parallelism with this package's all-reduce, and the pass that fuses it with RMSNorm.

The plug-in names `Communicator` to vLLM's platform, which makes one for each group of ranks; only the groups named "tp" change.
A group whose ranks are on several nodes, or without peer access to one another's GPUs, keeps vLLM's own all-reduce.
"""

from __future__ import annotations

import importlib
import logging
import operator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilescale_net.errors import TileScaleError

try:
    from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
except ImportError as error:
    raise TileScaleError(
        f"TSN_VLLM: this vLLM lacks interfaces that all_reduce and norm need ({error}); they are for vLLM 0.33: "
        "set TSN_VLLM=deep_ep, which needs none of it"
    ) from error

from tilescale_net.kernels.all_reduce_norm import FP8_DTYPE, PER_BLOCK, PER_TENSOR, PER_TOKEN
from tilescale_net.kernels.moe.row_ops import GROUP
from tilescale_net.runtime import settings
from tilescale_net.server_group import ServerGroup, takes_rows

log = logging.getLogger("vllm.tilescale_net")

_ours = torch.ops.tilescale_net


class Communicator(CudaCommunicator):  # type: ignore[misc]
    """vLLM's communicator; all-reduces of tensor parallelism are those of `tilescale_net.ops.all_reduce`.

    Args:
        given, named: of vLLM's class.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._ours: ServerGroup | None = None
        parts = settings.VLLM.get()
        self._reduces = "all_reduce" in parts
        if self.unique_name.split(":")[0] != "tp" or self.world_size == 1 or named.get("tcp_store_group") is not None:
            return
        self._ours = ServerGroup.make(self.unique_name, self.cpu_group, log, settings.VLLM.name)
        if self._ours is None:
            return
        if "norm" in parts:
            install_pass(self.unique_name, self._ours.torch_name)
        taken = ", ".join(part for part in parts if part != "deep_ep")
        log.info("group %s uses tilescale_net for %s, by TSN_VLLM", self.unique_name, taken)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the group's ranks, a new tensor."""
        found = self._ours.all_reduce(input_) if self._ours is not None and self._reduces else None
        return super().all_reduce(input_) if found is None else found

    def destroy(self) -> None:
        """Free everything; collective."""
        super().destroy()
        if self._ours is not None:
            GROUPS.pop(self.unique_name, None)
            self._ours.close()
            self._ours = None


# -- fused with RMSNorm -----------------------------------------------------------------------------------------------


class Quantization(NamedTuple):
    """One of vLLM's operators that quantise rows to FP8, in a graph; see `ops.all_reduce_norm_quantized`.

    Attributes:
        node: the call. by, layout, scale: arguments of ours. results: the rows and the scales that it makes, as indices.
    """

    node: torch.fx.Node
    by: str
    layout: str
    scale: torch.fx.Node | None
    results: tuple[int, ...]


class FuseNorm(VllmInductorPass):  # type: ignore[misc]
    """`ops.all_reduce_norm` instead of vLLM's all-reduce and following RMSNorm, with a residual and without; or
    `ops.all_reduce_norm_quantized`, if one of vLLM's operators quantises the normalised rows to FP8.

    Replaced if nothing else reads the sum (with a residual), the weight has the sum's dtype, or is such a weight in
    float32 plus a number (Gemma's), and the kernel takes the rows.

    Args:
        config: vLLM's.
        named: the group's name in vLLM. group: its name in torch.distributed.

    Attributes:
        replaced: number of norms replaced so far. quantized: those of them with quantisation.
    """

    def __init__(self, config: Any, named: str, group: str) -> None:
        super().__init__(config)
        self.named, self.group, self.replaced, self.quantized = named, group, 0, 0

    def uuid(self) -> str:
        """For vLLM's cache of compiled graphs, which hold the group's name."""
        return str(self.hash_dict({"source": Path(__file__).read_text(), "group": self.group, "named": self.named}))

    @VllmInductorPass.time_and_log
    def __call__(self, graph: torch.fx.Graph) -> None:
        """Replace calls in place."""
        norms = (torch.ops.vllm_ir.fused_add_rms_norm.default, torch.ops.vllm_ir.rms_norm.default)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in norms:
                self._replace(graph, node, has_residual=node.target == norms[0])
        graph.eliminate_dead_code()

    def _replace(self, graph: torch.fx.Graph, node: torch.fx.Node, has_residual: bool) -> None:
        summed, *residuals, weight, eps = node.args[: 4 if has_residual else 3]
        window = node.args[4 if has_residual else 3 :]  # number of elements whose squares are added up
        weight, weight_bias = _without_bias(weight)
        if not self._fits(summed, weight) or any(size is not None for size in window):
            return
        if has_residual:
            residual, at = residuals[0], node
            if len(summed.users) != 1 or residual.meta["val"].dtype != summed.meta["val"].dtype:
                return
            normed, total = ([user for user in node.users if user.args[1] == i] for i in range(2))
        else:  # at the sum's place, because others may read it before the norm
            residual, at, normed, total = None, summed, [node], [summed]
            if not _is_given(weight):
                return
        inputs = (summed.args[0], weight, residual, None)
        found = [each for each in map(_quantization, _users(normed)) if each is not None]
        if len(found) == 1:
            by = found[0]
            keeps = any(user is not by.node for user in _users(normed))
            options = (by.scale, by.by, by.layout, keeps, eps, weight_bias, self.group, True)
            target, args = _ours.all_reduce_norm_quantized.default, (*inputs, *[None] * 3, *options)
            rows, *scales = ([user for user in by.node.users if user.args[1] == i] for i in by.results)
            results = [rows, total, *scales, *([normed] if keeps else [])]
            values = [by.node.meta["val"][i] for i in by.results]
            values = [values[0], _value(summed), *values[1:], *([_value(summed)] if keeps else [])]
        else:
            target = _ours.all_reduce_norm.default
            args = (*inputs, eps, True, self.group, weight_bias, *[None] * 3, True)
            results, values = [normed, total], [_value(summed)] * 2
        with graph.inserting_before(at):
            call = graph.call_function(target, args)
            call.meta["val"] = values
            for i, (before, value) in enumerate(zip(results, values)):
                part = graph.call_function(operator.getitem, (call, i))
                part.meta["val"] = value
                for each in before:
                    each.replace_all_uses_with(part)
        self.replaced += 1
        self.quantized += len(found) == 1

    def _fits(self, x: Any, weight: Any) -> bool:
        """Whether `x` is the group's all-reduce, of rows that the kernel takes."""
        if not isinstance(x, torch.fx.Node) or x.target != torch.ops.vllm.all_reduce.default:
            return False
        if (x.args[1] if len(x.args) > 1 else x.kwargs["group_name"]) != self.named:
            return False
        if not isinstance(weight, torch.fx.Node):
            return False
        rows, scale = _value(x), _value(weight)
        return takes_rows(rows) and scale.dtype == rows.dtype and scale.shape == rows.shape[-1:]


def _value(node: torch.fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _users(nodes: list[torch.fx.Node]) -> list[torch.fx.Node]:
    return [user for node in nodes for user in node.users]


def _is_given(node: Any) -> bool:
    """Whether a node precedes all computations of the graph."""
    return isinstance(node, torch.fx.Node) and node.op in ("placeholder", "get_attr")


def _without_bias(weight: Any) -> tuple[Any, float]:
    """The parts of a weight in float32 plus a number, as in Gemma's norm: the original weight and the number."""
    if isinstance(weight, torch.fx.Node) and weight.target == torch.ops.aten.add.Tensor and len(weight.args) == 2:
        wide, bias = weight.args
        if isinstance(bias, (int, float)) and isinstance(wide, torch.fx.Node) and _value(wide).dtype == torch.float32:
            is_cast = wide.target == torch.ops.prims.convert_element_type.default
            return (wide.args[0] if is_cast else wide), float(bias)
    return weight, 0.0


def _quantization(node: torch.fx.Node) -> Quantization | None:
    """A call of vLLM's that quantises as the kernel does: finite scales of the whole tensor, a row, or 128 elements."""
    if node.target != torch.ops.higher_order.auto_functionalized or node.args[0] not in _quantizers():
        return None
    given, name = node.kwargs, node.args[0]._schema.name
    if len(_value(given["input"]).shape) != 2:
        return None
    if name == "_C::static_scaled_fp8_quant":
        scale, shape = given["scale"], given.get("group_shape")
        if not _is_given(scale) or _value(scale).numel() != 1 or (shape is not None and list(shape) != [-1, -1]):
            return None
        found = Quantization(node, PER_TENSOR, "row", scale, (1,))
    elif name == "_C::dynamic_per_token_scaled_fp8_quant":
        if given.get("scale_ub") is not None:
            return None
        found = Quantization(node, PER_TOKEN, "row", None, (1, 2))
    else:
        if given["group_size"] != GROUP or given["scale_ue8m0"]:
            return None
        layout = "row"
        if given["dummy_is_scale_transposed"]:
            layout = "tma" if given["dummy_is_tma_aligned"] else "column"
        found = Quantization(node, PER_BLOCK, layout, None, (1, 2))
    return found if node.meta["val"][1].dtype == FP8_DTYPE else None


def _quantizers() -> list[Any]:
    """vLLM's operators, as far as this build has them."""
    names = ("static_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant", "per_token_group_fp8_quant")
    return [getattr(torch.ops._C, name).default for name in names if hasattr(torch.ops._C, name)]


# Names of groups with fused norms: vLLM's and torch's. A process with several engines has several.
GROUPS: dict[str, str] = {}


def install_pass(named: str, group: str) -> None:
    """Let vLLM's manager of passes run FuseNorm for a group before its passes that fuse norms."""
    GROUPS[named] = group
    manager = importlib.import_module("vllm.compilation.passes.pass_manager").PostGradPassManager
    configure = manager.configure
    if getattr(configure, "by_tilescale_net", False):
        return

    def configure_with_ours(self: Any, config: Any) -> None:
        configure(self, config)
        at = [i for i, each in enumerate(self.passes) if type(each).__name__ in BEFORE]
        first = at[-1] + 1 if at else 0
        self.passes[first:first] = [FuseNorm(config, *names) for names in GROUPS.items()]

    configure_with_ours.by_tilescale_net = True  # type: ignore[attr-defined]
    manager.configure = configure_with_ours


# Passes that bring norms into the expected form.
BEFORE = ("NoOpEliminationPass", "AddRMSNormFusionPass")
