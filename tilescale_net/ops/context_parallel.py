"""Operators for attention whose sequence or KV cache is sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

import tilescale_net as tsn
from tilescale_net.kernels.all_to_all_transposed import AllToAllTransposed, checked_lengths
from tilescale_net.kernels.attention_merge import AttentionMerge
from tilescale_net.kernels.collective import is_integer
from tilescale_net.ops import arguments, group_objects
from tilescale_net.ops.group_objects import GroupObjects, SideStream
from tilescale_net.runtime.launch_args import dense, without_default_device

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
    merge = objects.collective(AttentionMerge, all_heads=all_heads, base_2=base_2)
    own = heads if all_heads else heads // objects.world.size
    out, out_lse = objects.empty((batch, own, dim), x.dtype), objects.empty((batch, own), torch.float32)
    return merge(out, out_lse, dense(x), lse.contiguous())


@arguments.register_fake("merge_attention")
def _(x, lse, all_heads, base_2, group):
    own = x.shape[1] if all_heads else x.shape[1] // group_objects.world_of(group).size
    return x.new_empty((x.shape[0], own, x.shape[2])), lse.new_empty((x.shape[0], own))


@without_default_device
def merge_attention(
    x: torch.Tensor, lse: torch.Tensor, group: tsn.Group = None, *, all_heads: bool = False, base_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention to the KV cache of all ranks of the group, from each rank's attention to its part of it; for decoding, in
    one kernel. As vLLM's `cp_lse_ag_out_rs`, or with `all_heads` its `cp_lse_ag_out_ar`.

    Args:
        x: this rank's output, [batch, heads, dim], float32, float16 or bfloat16, of one shape on all ranks; a row of `dim` is a
            multiple of 16 bytes, at most 8 KiB. Rows without keys on this rank may hold anything.
        lse: logarithm of the sum of the exponentials of this rank's scores, float32 [batch, heads]; -inf, +inf or NaN without
            keys.
        group: see `tilescale_net.ops`.
        all_heads: every rank gets all heads; else rank p gets the p-th of equal parts.
        base_2: lse are logarithms to base 2, as in FlashInfer; else natural logarithms, as in FlashAttention.

    Returns:
        (out, lse) of the heads that this rank gets: [batch, heads / ranks or heads, dim] and float32 [batch, …]. Sums are made
        in float32 in the order of the ranks and rounded once; 0 and -inf if no rank has keys. It has no gradient.

    Raises:
        RuntimeError: an argument requires a gradient; call it under torch.no_grad().
        TypeError, ValueError: a wrong dtype, shape or device; nothing was sent.
        HeapError: the symmetric heap has no room for the buffers.
        RankMismatch: ranks pass different shapes or dtypes; raised at the first use of a shape.
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


# -- Ulysses: heads for sequence and back -----------------------------------------------------------------------------

SEQUENCE, HEADS = -3, -2  # axes


def _exchange(
    objects: GroupObjects, x: torch.Tensor, scatters: bool, lengths: Sequence[int] | None, gradient: bool
) -> torch.Tensor:
    name, n, rank = "scatter_heads" if scatters else "gather_heads", objects.world.size, objects.world.rank
    if x.dim() < 3:
        raise ValueError(f"{name}: x has shape {list(x.shape)}; it must be [..., sequence, heads, dim]")
    x = x.contiguous()
    *batch, sequence, heads, dim = x.shape
    lengths = None if lengths is None else checked_lengths(name, lengths, n)
    if lengths is None:
        objects.calls.note_operator(gradient, f"{name} of x of shape {{}} and {{}}", x.shape, x.dtype)
    else:
        objects.calls.note_operator(
            gradient,
            f"{name} with lengths {{}} of x of shape {{}} and {{}}",
            tuple(lengths),
            (*batch, "sequence", heads, dim),
            x.dtype,
        )
    # Largest size of a rank's part, in elements.
    most = (
        math.prod(batch) * heads * dim * (sequence if lengths is None else max(lengths) if scatters else sum(lengths))
    )
    shape = _exchanged_shape(x.shape, scatters, lengths, n, rank)
    room = math.prod(shape) if scatters or lengths is None else math.prod(batch) * max(lengths) * heads * n * dim
    memory, *sources = objects.symmetric(
        ((room,), x.dtype), *([((most,), x.dtype)] if objects.needs_symmetric_source else [])
    )
    if sources and x.device == memory.device:  # the collective rejects tensors on other devices
        x = sources[0][: x.numel()].view(x.shape).copy_(x)
    out = memory[: math.prod(shape)].view(shape)
    cut, join = (HEADS, SEQUENCE) if scatters else (SEQUENCE, HEADS)
    exchange = objects.collective(AllToAllTransposed)
    return exchange(out, x, cut, join, lengths=lengths, result=objects.empty(shape, x.dtype))


def _exchanged_shape(
    shape: Sequence[int], scatters: bool, lengths: Sequence[int] | None, n: int, rank: int
) -> tuple[int, ...]:
    *batch, sequence, heads, dim = shape
    if scatters:
        return *batch, sequence * n if lengths is None else sum(lengths), heads // n, dim
    return *batch, sequence // n if lengths is None else lengths[rank], heads * n, dim


def _fake_exchange(x: torch.Tensor, scatters: bool, lengths: Sequence[int] | None, group: str) -> torch.Tensor:
    world = group_objects.world_of(group)
    return x.new_empty(_exchanged_shape(x.shape, scatters, lengths, world.size, world.rank))


@arguments.operator("scatter_heads")
def _scatter_heads(x: torch.Tensor, lengths: Sequence[int] | None, group: str, gradient: bool = False) -> torch.Tensor:
    return _exchange(group_objects.in_order(group), x, True, lengths, gradient)


@arguments.operator("gather_heads")
def _gather_heads(x: torch.Tensor, lengths: Sequence[int] | None, group: str, gradient: bool = False) -> torch.Tensor:
    return _exchange(group_objects.in_order(group), x, False, lengths, gradient)


@arguments.register_fake("scatter_heads")
def _(x, lengths, group, gradient=False):
    return _fake_exchange(x, True, lengths, group)


@arguments.register_fake("gather_heads")
def _(x, lengths, group, gradient=False):
    return _fake_exchange(x, False, lengths, group)


def _exchange_setup(ctx, inputs, output):
    _, ctx.lengths, ctx.group, _ = inputs


def _scatter_gradient(ctx, grad):
    back = (_gather_heads if arguments.is_unseen(grad) else _ops.gather_heads)(grad, ctx.lengths, ctx.group, True)
    return back, None, None, None


def _gather_gradient(ctx, grad):
    back = (_scatter_heads if arguments.is_unseen(grad) else _ops.scatter_heads)(grad, ctx.lengths, ctx.group, True)
    return back, None, None, None


_scatter_differentiably = arguments.differentiable(_scatter_heads, _exchange_setup, _scatter_gradient)
_gather_differentiably = arguments.differentiable(_gather_heads, _exchange_setup, _gather_gradient)


@without_default_device
def scatter_heads(x: torch.Tensor, group: tsn.Group = None, *, lengths: Sequence[int] | None = None) -> torch.Tensor:
    """Exchange this rank's part of the sequence with all heads for the whole sequence with this rank's part of the heads, before
    attention in sequence parallelism (DeepSpeed-Ulysses, arXiv:2309.14509). No extra copy reorders data.

    Args:
        x: [..., sequence of this rank, heads, dim] of any dtype, of one shape on all ranks but for `lengths`; heads are a
            multiple of the ranks.
        group: see `tilescale_net.ops`.
        lengths: sequence length of each rank, 0 or more; the same list on all ranks. Default: equal lengths.

    Returns:
        [..., sequence of all ranks, heads / ranks, dim]: rank p has the p-th part of the heads. The gradient of `x` is the
        gather_heads of the result's.

    Raises:
        TypeError, ValueError: a wrong shape or device; nothing was sent.
        HeapError: the symmetric heap has no room for the result.
        RankMismatch: ranks pass different shapes, lengths or dtypes; raised at their first use.
    """
    if arguments.is_eager(x):
        differentiate = arguments.needs_gradient(x)
        return (_scatter_differentiably if differentiate else _scatter_heads)(
            x, lengths, group_objects.name_of(group), False
        )
    arguments.check("scatter_heads", x=x)
    return _ops.scatter_heads(x, lengths, group_objects.name_of(group))


@without_default_device
def gather_heads(x: torch.Tensor, group: tsn.Group = None, *, lengths: Sequence[int] | None = None) -> torch.Tensor:
    """The reverse of `scatter_heads`, after attention.

    Args:
        x: [..., sequence of all ranks, heads of this rank, dim] of any dtype, of one shape on all ranks; without `lengths` the
            sequence is a multiple of the ranks.
        group, lengths: as in `scatter_heads`.

    Returns:
        [..., sequence of this rank, heads * ranks, dim]. The gradient of `x` is the scatter_heads of the result's.

    Raises:
        TypeError, ValueError, HeapError, RankMismatch: as `scatter_heads`.
    """
    if arguments.is_eager(x):
        differentiate = arguments.needs_gradient(x)
        return (_gather_differentiably if differentiate else _gather_heads)(
            x, lengths, group_objects.name_of(group), False
        )
    arguments.check("gather_heads", x=x)
    return _ops.gather_heads(x, lengths, group_objects.name_of(group))


# -- attention by chunks of heads -------------------------------------------------------------------------------------


@arguments.outside_graphs
def attention_by_heads(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: tsn.Group = None, *,
    lengths: Sequence[int] | None = None, chunks: int = 2,
) -> torch.Tensor:  # fmt: skip
    """Attention to a sequence that is sharded over the ranks, in chunks of heads: while one chunk is computed, another stream
    receives the next ones and sends the results. Breaks a graph of torch.compile.

    Args:
        attend: attention to some heads: from q, k and v [..., sequence of all ranks, heads / (ranks * chunks), dim] to an output
            of q's sequence and heads and v's dim. It is called once for each chunk, on the current stream. Only autograd
            may keep its arguments. It must make no calls of this group.
        q, k, v: [..., sequence of this rank, heads, dim] of one floating dtype; heads of each are a multiple of ranks * chunks,
            and may be fewer in k and v. The same batch and sequence.
        group: see `tilescale_net.ops`.
        lengths: as for `scatter_heads`.
        chunks: number of chunks of each rank's heads; 1: no overlap.

    Returns:
        [..., sequence of this rank, heads of q, dim of v], as attention to the whole sequence. Gradients return the same way,
        chunk by chunk.

    Raises:
        TypeError, ValueError: wrong arguments, by name, or a wrong result of `attend`.
        HeapError, RankMismatch: see `scatter_heads`.
    """
    call = "attention_by_heads"
    arguments.check(call, q=q, k=k, v=v)
    objects = group_objects.in_order(group)
    n = objects.world.size
    if not is_integer(chunks):
        raise ValueError(f"{call}: chunks is {chunks!r}; it must be 1 or more")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() < 3 or x.shape[:HEADS] != q.shape[:HEADS] or x.dtype != q.dtype or x.shape[HEADS] % (n * chunks):
            raise ValueError(
                f"{call}: {name} has shape {list(x.shape)} and {x.dtype}, q {list(q.shape)} and {q.dtype}; they must be "
                f"[..., sequence, heads, dim] of one batch, sequence and dtype, and heads a multiple of {n} ranks * {chunks} chunks"
            )
    lengths = None if lengths is None else checked_lengths(call, lengths, n)
    beside = objects.side_stream
    if any(arguments.needs_gradient(x) for x in (q, k, v)):
        return _by_heads_with_gradient(attend, (q, k, v), objects, group, lengths, chunks, beside)
    return _by_heads(attend, (q, k, v), objects, lengths, chunks, beside)


def _by_heads(attend, tensors, objects: GroupObjects, lengths, chunks: int, beside: SideStream) -> torch.Tensor:
    """Without copies: attention reads an arrived chunk in place, and chunks of the output arrive in one tensor."""
    q, _, v = tensors
    n, (*batch, mine, heads, _) = objects.world.size, q.shape
    objects.calls.note_operator(
        False, "attention_by_heads in {} chunks with lengths {} of q of {}", chunks, lengths and tuple(lengths), q.dtype
    )
    total, most = (mine * n, mine) if lengths is None else (sum(lengths), max(lengths))
    shapes = [(*batch, total, x.shape[HEADS] // (n * chunks), x.shape[-1]) for x in tensors]
    attended = (*shapes[0][:-1], v.shape[-1])
    rooms = [(chunks, *shape) for shape in shapes] + [(math.prod(batch) * most * heads * v.shape[-1],)]
    if objects.needs_symmetric_source:
        rooms += [(math.prod(batch) * most * x.shape[HEADS] * x.shape[-1],) for x in tensors] + [(chunks, *attended)]
    *received, out = (memory := objects.symmetric(*((room, q.dtype) for room in rooms)))[:4]
    sources = memory[4:]  # source of data for PEs of other nodes
    exchange = objects.collective(AllToAllTransposed)
    out = out[: math.prod(batch) * mine * heads * v.shape[-1]].view(*batch, mine, heads, v.shape[-1])
    arrived = []
    with beside.following(*tensors):
        inputs = [
            sources[i][: x.numel()].view(x.shape).copy_(x) if sources else x.contiguous() for i, x in enumerate(tensors)
        ]
        for c in range(chunks):
            for x, room in zip(inputs, received):
                exchange(room[c], x, HEADS, SEQUENCE, lengths=lengths, chunk=(c, chunks))
            arrived.append(beside.mark())
    for c in range(chunks):
        beside.join(arrived[c])
        y = _attended(attend, [room[c] for room in received], attended)
        with beside.following(y):
            y = sources[3][c].copy_(y) if sources else y
            exchange(out, y, SEQUENCE, HEADS, lengths=lengths, chunk=(c, chunks))
    beside.join(beside.mark())
    return out.clone()


def _by_heads_with_gradient(
    attend, tensors, objects: GroupObjects, group, lengths, chunks: int, beside: SideStream
) -> torch.Tensor:
    """By operators, because autograd runs each backward on the stream of its forward."""
    n, v = objects.world.size, tensors[2]
    arrived, left = [], []
    with beside.following(*tensors):
        parts = [x.unflatten(HEADS, (n, chunks, x.shape[HEADS] // (n * chunks))) for x in tensors]
        for c in range(chunks):
            received = [scatter_heads(x[..., c, :, :].flatten(-3, -2), group, lengths=lengths) for x in parts]
            arrived.append((received, beside.mark()))
    for received, mark in arrived:
        beside.join(mark, *received)
        y = _attended(attend, received, (*received[0].shape[:-1], v.shape[-1]))
        with beside.following(y):
            back = gather_heads(y, group, lengths=lengths)
            left.append(back.unflatten(HEADS, (n, back.shape[HEADS] // n)))
    beside.join(beside.mark(), *left)
    return torch.stack(left, -3).flatten(-4, -2)


def _attended(attend, tensors: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    y = attend(*tensors)
    if not isinstance(y, torch.Tensor) or y.shape != torch.Size(shape) or y.dtype != tensors[0].dtype:
        kind = f"{list(y.shape)} and {y.dtype}" if isinstance(y, torch.Tensor) else type(y).__name__
        raise ValueError(
            f"attention_by_heads: attend returned {kind}; it must be a tensor of shape {list(shape)} and {tensors[0].dtype}"
        )
    return y.contiguous()
