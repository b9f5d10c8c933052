"""Collectives as operators of torch: functional, with gradients, and known to torch.compile.

    from tilescale_net import ops

    everyone = ops.all_gather(x, group)
    layer = ops.moe_layer(num_experts, max_tokens, hidden, top_k, group=group)
    received = ops.moe_dispatch(layer, x, topk_idx, topk_weights)
    out = ops.moe_combine(layer, experts(received), received)
    h = ops.all_gather_matmul(x, w_up, group)                # x [rows, k], w_up [k, n of this rank]
    y = ops.matmul_reduce_scatter(act(h), w_down, group)     # w_down [k of this rank, n]

`group` is as for `tilescale_net.world`: a ProcessGroup, a DeviceMesh of one dimension, the name of a group, or None.
Results are new tensors. All ranks of a group make its calls in the same order; calls on different streams run one after
the other. Gradients are such calls too, so backward runs on all ranks or on none. torch.compile keeps that order, with
its default backend too, for any sizes of a rank. The hosts agree on the first call of a size: make it before a CUDA
graph is captured.

A fused GEMM compiles a kernel and has symmetric memory for each number of rows, widths and dtype. The 32 most recent
ones of a group keep their memory; older ones are freed when another is made, and made again when called: round varying
numbers of rows to a few sizes. One that a CUDA graph was captured with is not freed, because the graph has its
addresses; call a shape once just before its capture.
"""

from tilescale_net.ops.collectives import all_gather, all_reduce, all_to_all, check, recv, reduce_scatter, send
from tilescale_net.ops.context_parallel import attention_by_heads, gather_heads, merge_attention, scatter_heads
from tilescale_net.ops.expert_layer import SwiGLU, moe_experts
from tilescale_net.ops.experts import expert_matmul, moe_dispatch_matmul, moe_matmul_combine
from tilescale_net.ops.fused import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from tilescale_net.ops.moe import moe_combine, moe_dispatch, moe_layer
from tilescale_net.ops.norms import QuantizedNorm, all_reduce_norm, all_reduce_norm_quantized

__all__ = [
    "QuantizedNorm",
    "SwiGLU",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_norm",
    "all_reduce_norm_quantized",
    "all_to_all",
    "attention_by_heads",
    "check",
    "expert_matmul",
    "gather_heads",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "merge_attention",
    "moe_combine",
    "moe_dispatch",
    "moe_dispatch_matmul",
    "moe_experts",
    "moe_layer",
    "moe_matmul_combine",
    "recv",
    "reduce_scatter",
    "scatter_heads",
    "send",
]
