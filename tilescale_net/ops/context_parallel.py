"""What attention needs whose sequence or KV cache is spread over ranks, as operators."""

from __future__ import annotations

import torch

import tilescale_net as tsn
from tilescale_net.kernels.attention_merge import AttentionMerge
from tilescale_net.ops import arguments, group_objects
from tilescale_net.ops.group_objects import GroupObjects

_ops = torch.ops.tilescale_net


# -- decode: partial outputs and their lse ----------------------------------------------------------------------------


@arguments.operator("merge_attention")
def _merge_attention(
    x: torch.Tensor, lse: torch.Tensor, all_heads: bool, base_2: bool, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _merge(group_objects.in_order(group), x, lse, all_heads, base_2)


def _merge(
    objects: GroupObjects, x: torch.Tensor, lse: torch.Tensor, all_heads: bool, base_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    objects.calls.note_operator(False, "merge_attention of x of shape {} and {}", x.shape, x.dtype)
    if x.dim() != 3:
        raise ValueError(f"merge_attention: x has shape {list(x.shape)}; it must be [batch, heads, dim]")
    batch, heads, dim = x.shape
    merge = objects.made(
        ("merge_attention", all_heads, base_2),
        lambda: AttentionMerge(all_heads=all_heads, base_2=base_2, group=objects.world, **objects.geometry).tracked_by(
            objects.calls
        ),
    )
    own = heads if all_heads else heads // objects.world.size
    out, out_lse = objects.empty((batch, own, dim), x.dtype), objects.empty((batch, own), torch.float32)
    return merge(out, out_lse, x.contiguous(), lse.contiguous())


@arguments.register_fake("merge_attention")
def _(x, lse, all_heads, base_2, group):
    own = x.shape[1] if all_heads else x.shape[1] // group_objects.world_of(group).size
    return x.new_empty((x.shape[0], own, x.shape[2])), lse.new_empty((x.shape[0], own))


def merge_attention(
    x: torch.Tensor, lse: torch.Tensor, group: tsn.Group = None, *, all_heads: bool = False, base_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention to the KV cache of all ranks of the group, from each rank's attention to its part of it; for decoding, in
    one kernel. As vLLM's `cp_lse_ag_out_rs`, or with `all_heads` its `cp_lse_ag_out_ar`.

    Args:
        x: this rank's output, [batch, heads, dim], float32, float16 or bfloat16, of one shape on all ranks; a row of `dim` is a
            multiple of 16 bytes, at most 8 KiB. Where this rank has no keys, rows may hold anything.
        lse: logarithm of the sum of the exponentials of this rank's scores, float32 [batch, heads]; -inf, +inf or NaN where it
            has no keys.
        group: see `tilescale_net.ops`.
        all_heads: every rank gets all heads; else rank p gets the p-th part of them, which must be equal parts.
        base_2: lse are logarithms to base 2, as those of FlashInfer; else natural ones, as those of FlashAttention.

    Returns:
        (out, lse) of the heads that this rank gets: [batch, heads / ranks or heads, dim] and float32 [batch, …]. Sums are made
        in float32 in the order of the ranks and rounded once; 0 and -inf where no rank has keys. It has no gradient.

    Raises:
        RuntimeError: an argument requires a gradient; call it under torch.no_grad().
        TypeError, ValueError: a dtype, shape or device that does not fit; nothing was sent.
        HeapError: the symmetric heap has no room for the buffers.
        RankMismatch: ranks that pass different shapes or dtypes; seen when a shape is used for the first time.
    """
    eager = arguments.is_eager(x) and arguments.is_eager(lse)
    if not eager:
        arguments.check("merge_attention", x=x, lse=lse)
    if arguments.needs_gradient(x) or arguments.needs_gradient(lse):
        raise RuntimeError(
            "merge_attention: an argument requires a gradient, and this operator of decoding has none; call it under "
            "torch.no_grad() or with detached tensors"
        )
    if eager:
        return _merge(group_objects.in_order(group), x, lse, all_heads, base_2)
    return _ops.merge_attention(x, lse, all_heads, base_2, group_objects.name_of(group))
