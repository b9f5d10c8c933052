"""vLLM's communicator of a group of tensor parallelism with this package's all-reduce, and the pass that fuses it with RMSNorm.

The plug-in names `Communicator` to vLLM's platform, which makes one for each group of ranks; only the groups named "tp" change.
A group whose ranks are on several nodes keeps vLLM's own all-reduce.
"""

from __future__ import annotations

import importlib
import logging
import operator
from pathlib import Path
from typing import Any

import torch
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from tilescale_net import ops
from tilescale_net.deep_ep.groups import join, leave
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.all_reduce_norm import AllReduceNorm
from tilescale_net.ops import group_objects
from tilescale_net.runtime import settings
from tilescale_net.runtime.world import World

log = logging.getLogger("vllm.tilescale_net")

# Room for the staging memory of both kernels and for the largest batch of most models; larger tensors are summed in pieces.
HEAP_BYTES = 256 << 20
# Sizes whose kernels are made at the first call: later ones may be captured into a CUDA graph.
WARM_UP = [1 << shift for shift in range(10, 24)]

_ours = torch.ops.tilescale_net


class Communicator(CudaCommunicator):  # type: ignore[misc]
    """vLLM's communicator; all-reduces of tensor parallelism are those of `tilescale_net.ops.all_reduce`. `given`,
    `named`: those of vLLM's class."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._world: World | None = None
        self._warm: set[torch.dtype] = set()
        parts = settings.VLLM.get()
        self._reduces = "all_reduce" in parts
        if self.unique_name.split(":")[0] != "tp" or self.world_size == 1 or named.get("tcp_store_group") is not None:
            return
        world = join(self.cpu_group, HEAP_BYTES)
        if 0 in world.peer_base:
            log.warning(
                "TSN_VLLM: ranks of group %s are on several nodes; it keeps vLLM's all-reduce", self.unique_name
            )
            leave(world)
            return
        self._world = world
        if "norm" in parts:
            install_pass(self.unique_name, group_objects.name_of(self.cpu_group))
        taken = ", ".join(part for part in parts if part != "deep_ep")
        log.info("group %s uses tilescale_net for %s, by TSN_VLLM", self.unique_name, taken)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the group's ranks, a new tensor."""
        world = self._world
        if world is None or not self._reduces or input_.dtype not in AllReduce.DTYPES or input_.device != world.device:
            return super().all_reduce(input_)
        if input_.dtype not in self._warm and not is_capturing(world):
            self._warm.add(input_.dtype)
            for nbytes in WARM_UP:
                ops.all_reduce(input_.new_zeros(nbytes // input_.element_size()), world)
        return ops.all_reduce(input_, world)

    def destroy(self) -> None:
        """Give everything back; collective."""
        super().destroy()
        if self._world is not None:
            leave(self._world)
            self._world = None


def is_capturing(world: World) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return world.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# -- fused with RMSNorm -----------------------------------------------------------------------------------------------


class FuseNorm(VllmInductorPass):  # type: ignore[misc]
    """`ops.all_reduce_norm` in place of vLLM's all-reduce with RMSNorm behind it, with a residual and without.

    Replaced where nothing else reads the sum (with a residual), the weight has the sum's dtype, and the kernel takes the rows.

    Args:
        config: vLLM's.
        named: the group's name in vLLM. group: its name in torch.distributed.

    Attributes:
        replaced: how many norms calls so far have replaced.
    """

    def __init__(self, config: Any, named: str, group: str) -> None:
        super().__init__(config)
        self.named, self.group, self.replaced = named, group, 0

    def uuid(self) -> str:
        """For vLLM's cache of compiled graphs, which hold the group's name."""
        return str(self.hash_dict({"source": Path(__file__).read_text(), "group": self.group, "named": self.named}))

    @VllmInductorPass.time_and_log
    def __call__(self, graph: torch.fx.Graph) -> None:
        """Replace what is replaced, in place."""
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target == torch.ops.vllm_ir.fused_add_rms_norm.default:
                self._with_residual(graph, node)
            elif node.target == torch.ops.vllm_ir.rms_norm.default:
                self._without(graph, node)
        graph.eliminate_dead_code()

    def _fits(self, x: Any, weight: Any, *whole: Any) -> bool:
        """Whether `x` is the group's all-reduce, of rows that the kernel takes; `whole` is the size of the norm's window."""
        if not isinstance(x, torch.fx.Node) or x.target != torch.ops.vllm.all_reduce.default:
            return False
        if (x.args[1] if len(x.args) > 1 else x.kwargs["group_name"]) != self.named:
            return False
        if not isinstance(weight, torch.fx.Node) or any(size is not None for size in whole):
            return False
        rows, scale = x.meta["val"], weight.meta["val"]
        hidden = rows.shape[-1]
        nbytes = hidden * rows.element_size() if isinstance(hidden, int) else -1
        return (
            rows.dtype in AllReduceNorm.DTYPES
            and scale.dtype == rows.dtype
            and scale.shape == (hidden,)
            and nbytes % 16 == 0
            and 0 < nbytes <= AllReduceNorm.LARGEST_ROW
        )

    def _with_residual(self, graph: torch.fx.Graph, node: torch.fx.Node) -> None:
        summed, residual, weight, eps, *whole = node.args
        if not self._fits(summed, weight, *whole) or len(summed.users) != 1:
            return
        if residual.meta["val"].dtype != summed.meta["val"].dtype:
            return
        values = node.meta["val"]
        with graph.inserting_before(node):
            call = graph.call_function(
                torch.ops.higher_order.auto_functionalized,
                (_ours.all_reduce_norm_.default,),
                dict(x=summed.args[0], weight=weight, residual=residual, eps=eps, group=self.group),
            )
            call.meta["val"] = values
        node.replace_all_uses_with(call)
        self.replaced += 1

    def _without(self, graph: torch.fx.Graph, node: torch.fx.Node) -> None:
        summed, weight, eps, *whole = node.args
        # The call stands where the sum stood, since others may read that before the norm.
        if not self._fits(summed, weight, *whole) or weight.op != "placeholder":
            return
        values = node.meta["val"], summed.meta["val"]
        with graph.inserting_before(summed):
            call = graph.call_function(
                _ours.all_reduce_norm.default, (summed.args[0], weight, None, None, eps, True, self.group)
            )
            call.meta["val"] = values
            parts = [graph.call_function(operator.getitem, (call, i)) for i in range(2)]
            for part, value in zip(parts, values):
                part.meta["val"] = value
        node.replace_all_uses_with(parts[0])
        summed.replace_all_uses_with(parts[1])
        self.replaced += 1


def install_pass(named: str, group: str) -> None:
    """Let vLLM's manager of passes run FuseNorm for a group before its passes that fuse norms."""
    manager = importlib.import_module("vllm.compilation.passes.pass_manager").PostGradPassManager
    configure = getattr(manager, "tilescale_net_configure", manager.configure)

    def configure_with_ours(self: Any, config: Any) -> None:
        configure(self, config)
        at = [i for i, each in enumerate(self.passes) if type(each).__name__ in BEFORE]
        self.passes.insert(at[-1] + 1 if at else 0, FuseNorm(config, named, group))

    manager.tilescale_net_configure, manager.configure = configure, configure_with_ours


# Passes that bring norms into the form that is looked for.
BEFORE = ("NoOpEliminationPass", "AddRMSNormFusionPass")
