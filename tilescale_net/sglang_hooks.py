"""SGLang's tensor parallelism with this package's all-reduce, and its fusion with residual and RMSNorm, by SGLang's hooks.

Groups named as in `GROUPS` get a `ServerGroup` when SGLang makes them. `all_reduce` is hooked at its callers in
SGLang's models and inside the operator of its compiled graphs; the fusion replaces FlashInfer's, which still gets the
batches that this package does not take.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from tilescale_net.runtime import settings
from tilescale_net.server_group import ServerGroup

log = logging.getLogger("sglang.tilescale_net")

# SGLang's groups whose all-reduces end layers; the second one with data-parallel attention.
GROUPS = ("tp", "attention_tp")
_COORDINATOR = "sglang.srt.distributed.parallel_state.GroupCoordinator"
_FUSED = "sglang.srt.layers.flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm"
_APPLIES = "sglang.srt.layers.layer_boundary.residual.add_norm.flashinfer_ar_fusion_applies"


def register() -> None:
    """Register the hooks that TSN_SGLANG asks for; SGLang applies them when all plug-ins are loaded."""
    parts = settings.SGLANG.get()
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    kinds, add = hooks.HookType, hooks.HookRegistry.register
    add(_COORDINATOR + ".__init__", _made, kinds.AFTER)
    add(_COORDINATOR + ".destroy", _destroyed, kinds.BEFORE)
    if "all_reduce" in parts:
        add(_COORDINATOR + ".all_reduce", _all_reduce, kinds.AROUND)
        add(_COORDINATOR + "._all_reduce_out_place", _out_of_place, kinds.AROUND)
    if "norm" in parts:
        add(_FUSED, _fused, kinds.AROUND)
        add(_APPLIES, _applies, kinds.AROUND)


def _of(coordinator: Any) -> ServerGroup | None:
    return getattr(coordinator, "tilescale_net_group", None)


def _made(result: None, coordinator: Any, *given: Any, **named: Any) -> None:
    """Called for each new group. Groups by Mooncake, or with room for more ranks, may change later; worlds cannot."""
    name = coordinator.unique_name
    if name.split(":")[0] not in GROUPS or coordinator.world_size == 1 or _of(coordinator) is not None:
        return
    if named.get("max_world_size") is not None or "mooncake" in str(named.get("torch_distributed_backend")):
        return
    group = ServerGroup.make(name, coordinator.cpu_group, log, settings.SGLANG.name)
    if group is not None:
        coordinator.tilescale_net_group = group
        taken = ", ".join(part for part in settings.SGLANG.get() if part != "deep_ep")
        log.info("group %s uses tilescale_net for %s, by TSN_SGLANG", name, taken)


def _destroyed(coordinator: Any) -> None:
    group = _of(coordinator)
    if group is not None:
        coordinator.tilescale_net_group = None
        group.close()


def _all_reduce(theirs: Callable, coordinator: Any, input_: torch.Tensor) -> torch.Tensor:
    """Compiled graphs get SGLang's operator, which calls `_out_of_place`."""
    group = None if torch.compiler.is_compiling() else _of(coordinator)
    found = group.all_reduce(input_) if group is not None else None
    result: torch.Tensor = theirs(coordinator, input_) if found is None else found
    return result


def _out_of_place(theirs: Callable, coordinator: Any, input_: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    group = _of(coordinator)
    found = group.all_reduce(input_) if group is not None else None
    result: torch.Tensor = theirs(coordinator, input_, *given, **named) if found is None else found
    return result


def _norm_group(use_attn_tp_group: bool) -> ServerGroup | None:
    """The group of SGLang's fused call, found as SGLang does."""
    fusion = importlib.import_module(_FUSED.rpartition(".")[0])
    return _of(fusion.resolve_fusion_group(use_attn_tp_group=use_attn_tp_group)[2])


def _fused(
    theirs: Callable, input_tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, **named: Any
) -> Any:  # fmt: skip
    found = None
    if not torch.compiler.is_compiling():
        group = _norm_group(named.get("use_attn_tp_group", True))
        found = group.all_reduce_norm(input_tensor, residual, weight, eps) if group is not None else None
    if found is not None:
        return found
    return theirs(input_tensor=input_tensor, residual=residual, weight=weight, eps=eps, **named)


def _applies(theirs: Callable, batch_size: int) -> bool:
    """Whether layers leave their sum to the norm: for any batch, if both groups of their sums use this package."""
    if torch.compiler.is_compiling() or batch_size == 0 or None in (_norm_group(True), _norm_group(False)):
        return bool(theirs(batch_size))
    return True
