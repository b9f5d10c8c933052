"""Collectives as operators of torch: functional, with gradients, and known to torch.compile.

    from tilescale_net import ops

    everyone = ops.all_gather(x, group)
    layer = ops.moe_layer(num_experts, max_tokens, hidden, top_k, group=group)
    received = ops.moe_dispatch(layer, x, topk_idx, topk_weights)
    out = ops.moe_combine(layer, experts(received), received)

`group` is what `tilescale_net.world` takes: a ProcessGroup, a DeviceMesh of one dimension, the name of a group, or None.
Results are new tensors. Calls of one group are made by all of its ranks in the same order, on one stream each; gradients
are such calls too, so backward runs on all ranks or on none. A call of a size that was not used before is agreed on by the
hosts: make it once before a CUDA graph is captured.
"""

from tilescale_net.ops.collectives import all_gather, all_to_all, check, reduce_scatter
from tilescale_net.ops.moe import moe_combine, moe_dispatch, moe_layer

__all__ = ["all_gather", "all_to_all", "check", "moe_combine", "moe_dispatch", "moe_layer", "reduce_scatter"]
