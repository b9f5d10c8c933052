"""All-gather, reduce-scatter, all-reduce and all-to-all as operators on the classes of `tilescale_net.kernels`.

Outputs, and inputs for other nodes or sums, pass through symmetric memory of the group: a copy or two more than the
classes, which use the caller's symmetric tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import tilescale_net as tsn
from tilescale_net.ops import arguments, group_objects
from tilescale_net.ops.group_objects import GroupObjects
from tilescale_net.runtime.launch_args import unresolved, without_default_device

_ops = torch.ops.tilescale_net


def _gathered(x: torch.Tensor, ranks: int) -> tuple[int, ...]:
    """Shape of all_gather's result for `x`."""
    return (ranks * x.shape[0], *x.shape[1:]) if x.dim() else (ranks,)


def _size(name: str) -> int:
    return group_objects.world_of(name).size


# `gradient` of an operator: a backward calls it, and ranks compare its calls apart from a forward's.

# -- all-gather -----------------------------------------------------------------------------------------------------


@arguments.operator("all_gather")
def _all_gather(x: torch.Tensor, group: str, gradient: bool = False) -> torch.Tensor:
    return _gather(group_objects.in_order(group), x, gradient)


def _gather(objects: GroupObjects, x: torch.Tensor, gradient: bool) -> torch.Tensor:
    objects.calls.note_operator(gradient, "all_gather of x of shape {} and {}", x.shape, x.dtype)
    x, world = x.contiguous(), objects.world
    shape = _gathered(x, world.size)
    out = objects.empty(shape, x.dtype)
    if objects.all_gather.takes_any_memory(x.nbytes):
        return objects.all_gather(out, x)
    (through,) = objects.symmetric((shape, x.dtype))
    if objects.needs_symmetric_source and x.device == out.device:  # the collective rejects tensors on other devices
        x = through.view(world.size, *x.shape)[world.rank].copy_(x)
    return objects.all_gather(out, x, through=through)


@arguments.register_fake("all_gather")
def _(x, group, gradient=False):
    return x.new_empty(_gathered(x, _size(group)))


def _all_gather_setup(ctx, inputs, output):
    ctx.group, ctx.scalar = inputs[1], not inputs[0].dim()


def _all_gather_gradient(ctx, grad):
    mine = _scatter_of(grad, ctx.group, True)
    return (mine.view(()) if ctx.scalar else mine), None, None


_gather_differentiably = arguments.differentiable(_all_gather, _all_gather_setup, _all_gather_gradient)


@without_default_device
def all_gather(x: torch.Tensor, group: tsn.Group = None) -> torch.Tensor:
    """The `x` of all ranks of the group, one after the other; as torch.distributed.all_gather_into_tensor.

    Args:
        x: [rows, ...] or a scalar, of any dtype, the same on all ranks in shape and dtype.
        group: see `tilescale_net.ops`.

    Returns:
        [ranks * rows, ...], or [ranks] for a scalar. The gradient of `x` is the reduce_scatter of the result's.

    Raises:
        ValueError: `x` is not on the device of the group's kernels.
        HeapError: the symmetric heap has no room for the result.
        RankMismatch: ranks pass different shapes or dtypes; raised at the first use of a shape.
    """
    if arguments.is_eager(x):
        if arguments.needs_gradient(x):
            return _gather_differentiably(x, group_objects.name_of(group), False)
        return _gather(group_objects.in_order(group), x, False)
    arguments.check("all_gather", x=x)
    return _ops.all_gather(x, group_objects.name_of(group))


def _scatter_of(x: torch.Tensor, group: str, gradient: bool) -> torch.Tensor:
    return (_reduce_scatter if arguments.is_unseen(x) else _ops.reduce_scatter)(x, group, gradient)


def _gather_of(x: torch.Tensor, group: str, gradient: bool) -> torch.Tensor:
    return (_all_gather if arguments.is_unseen(x) else _ops.all_gather)(x, group, gradient)


# -- reduce-scatter -------------------------------------------------------------------------------------------------


@arguments.operator("reduce_scatter")
def _reduce_scatter(x: torch.Tensor, group: str, gradient: bool = False) -> torch.Tensor:
    return _scatter(group_objects.in_order(group), x, gradient)


def _scatter(objects: GroupObjects, x: torch.Tensor, gradient: bool) -> torch.Tensor:
    ranks, x = objects.world.size, x.contiguous()
    if not x.dim() or x.shape[0] % ranks:
        raise ValueError(f"reduce_scatter: x has shape {list(x.shape)}; its rows must be a multiple of {ranks} ranks")
    objects.calls.note_operator(gradient, "reduce_scatter of x of shape {} and {}", x.shape, x.dtype)
    # Few bytes travel without a copy of x.
    few = objects.reduce_scatter.takes_any_memory(x.nbytes // ranks)
    through = None if few else objects.source(x.shape, x.dtype, x.device)
    out = objects.empty((x.shape[0] // ranks, *x.shape[1:]), x.dtype)
    return objects.reduce_scatter(out, x, through=through)


@arguments.register_fake("reduce_scatter")
def _(x, group, gradient=False):
    return x.new_empty((x.shape[0] // _size(group), *x.shape[1:]))


def _group_setup(ctx, inputs, output):
    ctx.group = inputs[1]


def _reduce_scatter_gradient(ctx, grad):
    return _gather_of(grad, ctx.group, True), None, None


_scatter_differentiably = arguments.differentiable(_reduce_scatter, _group_setup, _reduce_scatter_gradient)


@without_default_device
def reduce_scatter(x: torch.Tensor, group: tsn.Group = None) -> torch.Tensor:
    """This rank's part of the sum of `x` over all ranks of the group; as torch.distributed.reduce_scatter_tensor.

    Args:
        x: [ranks * rows, ...] of a dtype of `kernels.reduce_scatter.ReduceScatter.DTYPES`, of one shape on all ranks.
        group: see `tilescale_net.ops`.

    Returns:
        [rows, ...]; sums are in float32, in the order of the ranks, and rounded once. The gradient of `x` is the
        all_gather of the result's.

    Raises:
        TypeError, ValueError: a wrong dtype, shape or device; nothing was sent.
        HeapError: the symmetric heap has no room (ranks on several nodes).
        RankMismatch: ranks pass different shapes or dtypes; raised at the first use of a shape.
    """
    if arguments.is_eager(x):
        if arguments.needs_gradient(x):
            return _scatter_differentiably(x, group_objects.name_of(group), False)
        return _scatter(group_objects.in_order(group), x, False)
    arguments.check("reduce_scatter", x=x)
    return _ops.reduce_scatter(x, group_objects.name_of(group))


# -- all-reduce -----------------------------------------------------------------------------------------------------


@arguments.operator("all_reduce")
def _all_reduce(
    x: torch.Tensor, replicated: bool, group: str, gradient: bool = False, quantize: str = ""
) -> torch.Tensor:
    return _reduce(group_objects.in_order(group), x, gradient, quantize)


def _reduce(objects: GroupObjects, x: torch.Tensor, gradient: bool, quantize: str = "") -> torch.Tensor:
    x = x.contiguous()
    if quantize:
        objects.calls.note_operator(gradient, "all_reduce of x of shape {} and {} as {}", x.shape, x.dtype, quantize)
        return objects.all_reduce_fp8(torch.empty_like(x), x)
    objects.calls.note_operator(gradient, "all_reduce of x of shape {} and {}", x.shape, x.dtype)
    # Tensors of several pieces are copied as a whole: with a kernel per piece, each waits for all ranks.
    if objects.all_reduce.is_copied_in_pieces(x.nbytes, x.dtype):
        source = objects.source(x.shape, x.dtype, x.device)
        if source is not None:
            return objects.all_reduce(torch.empty_like(x), source.copy_(x), overwrite_x=True)
    return objects.all_reduce(torch.empty_like(x), x)


@arguments.register_fake("all_reduce")
def _(x, replicated, group, gradient=False, quantize=""):
    return x.new_empty(x.shape)


def _all_reduce_setup(ctx, inputs, output):
    _, ctx.replicated, ctx.group, *_ = inputs


def _all_reduce_gradient(ctx, grad):
    if not ctx.replicated:
        grad = (_all_reduce if arguments.is_unseen(grad) else _ops.all_reduce)(grad, False, ctx.group, True)
    return grad, None, None, None, None


_reduce_differentiably = arguments.differentiable(_all_reduce, _all_reduce_setup, _all_reduce_gradient)


@without_default_device
def all_reduce(
    x: torch.Tensor, group: tsn.Group = None, *, replicated: bool = False, quantize: str | None = None
) -> torch.Tensor:
    """The sum of `x` over all ranks of the group; as torch.distributed.all_reduce.

    Args:
        x: of a dtype of `kernels.reduce_scatter.ReduceScatter.DTYPES`, of one shape on all ranks.
        group: see `tilescale_net.ops`.
        replicated: all ranks compute the same from the result: its gradient is the same on all of them, and is the gradient
            of `x`. Without it the ranks' losses are summed: the gradient of `x` is the all_reduce of the result's.
        quantize: "fp8": bfloat16, float16 or float32 travel as FP8 with a scale per 128 elements, in half the time for some
            MiB and more, with the error that `kernels.all_reduce_fp8` states; for ranks of one node. Gradients are not
            quantised.

    Returns:
        The sum, with equal bits on all ranks: made in float32 in the order of the ranks and rounded once, unless quantised.

    Raises:
        TypeError, ValueError: a wrong dtype, device or `quantize`, or `quantize` on several nodes; nothing was sent.
        RankMismatch: ranks pass different shapes or dtypes; raised at the first use of a shape.
    """
    if quantize not in (None, "fp8"):
        raise ValueError(f"all_reduce: quantize is {quantize!r}; it must be 'fp8' or None")
    if arguments.is_eager(x):
        if arguments.needs_gradient(x):
            return _reduce_differentiably(x, replicated, group_objects.name_of(group), False, quantize or "")
        return _reduce(group_objects.in_order(group), x, False, quantize or "")
    arguments.check("all_reduce", x=x)
    return _ops.all_reduce(x, replicated, group_objects.name_of(group), False, quantize or "")


# -- all-to-all -----------------------------------------------------------------------------------------------------


def _largest(world, output_splits: Sequence[int], input_splits: Sequence[int]) -> int:
    """The most rows that a rank sends or receives; RankMismatch on all ranks if two disagree.

    A rank compares the rows that others send to it, and reports one mismatch to all of them.
    """
    call, members, error = "tilescale_net.ops.all_to_all", world.control.members, ""
    sizes = len(output_splits), len(input_splits)
    fits = sizes == (world.size, world.size)
    came = world.control.exchange(call, [input_splits[b] if fits else -1 for b in members])
    if not fits:
        error = "rank {} gives {} output_splits and {} input_splits for {} ranks".format(world.rank, *sizes, world.size)
    for a, sends in zip(members, came):
        if not error and sends not in (-1, output_splits[a]):  # -1: that rank reports its error itself
            error = f"rank {a} sends {sends} rows to rank {world.rank}, which expects {output_splits[a]}"
    reports = world.control.gather(call, [max(sum(output_splits), sum(input_splits)), error])
    for _, wrong in reports:
        if wrong:
            raise tsn.RankMismatch(f"all_to_all: {wrong}; nothing was sent")
    return max(most for most, _ in reports)


@arguments.operator("all_to_all")
def _all_to_all(
    x: torch.Tensor, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None, max_rows: int, group: str,
    gradient: bool = False,
) -> torch.Tensor:  # fmt: skip
    objects, x = group_objects.in_order(group), x.contiguous()
    if (output_splits is None) != (input_splits is None):
        raise ValueError("all_to_all: output_splits and input_splits are given together or not at all")
    if not x.dim():
        raise ValueError("all_to_all: x is a scalar; it must have rows")
    rows = room = x.shape[0]
    if output_splits is None or input_splits is None:
        objects.calls.note_operator(gradient, "all_to_all of x of shape {} and {}", x.shape, x.dtype)
    else:
        for name, splits in (("output_splits", output_splits), ("input_splits", input_splits)):
            if min(splits, default=0) < 0:
                raise ValueError(f"all_to_all: {name} is {list(splits)}; a split cannot be negative")
        objects.calls.note_operator(
            gradient, "all_to_all with splits of x of rows of shape {} and {}", x.shape[1:], x.dtype
        )
    if output_splits is not None and input_splits is not None:
        rows = sum(output_splits)
        if max_rows < 0:
            room = _largest(objects.world, output_splits, input_splits)
        elif max(rows, room) > max_rows:
            raise ValueError(f"all_to_all: {max(rows, room)} rows are more than max_rows, {max_rows}")
        else:
            room = max_rows
    if output_splits is None and objects.all_to_all.takes_any_memory(x.nbytes // objects.world.size):
        return objects.all_to_all(objects.empty(x.shape, x.dtype), x)
    shape = (room, *x.shape[1:])
    target, *sources = objects.symmetric(
        (shape, x.dtype), *([(shape, x.dtype)] if objects.needs_symmetric_source else [])
    )
    if sources:
        x = sources[0][: x.shape[0]].copy_(x)
    if output_splits is None:
        return objects.all_to_all(objects.empty(x.shape, x.dtype), x, through=target)
    if rows < room:
        target = target[:rows]
    return objects.all_to_all(target, x, output_splits, input_splits).clone()


@arguments.register_fake("all_to_all")
def _(x, output_splits, input_splits, max_rows, group, gradient=False):
    return x.new_empty(x.shape if output_splits is None else (sum(output_splits), *x.shape[1:]))


def _all_to_all_setup(ctx, inputs, output):
    _, ctx.output_splits, ctx.input_splits, ctx.max_rows, ctx.group, _ = inputs


def _all_to_all_gradient(ctx, grad):
    operator = _all_to_all if arguments.is_unseen(grad) else _ops.all_to_all
    back = operator(grad, ctx.input_splits, ctx.output_splits, ctx.max_rows, ctx.group, True)
    return back, None, None, None, None, None


_exchange_differentiably = arguments.differentiable(_all_to_all, _all_to_all_setup, _all_to_all_gradient)


@without_default_device
def all_to_all(
    x: torch.Tensor, output_splits: Sequence[int] | None = None, input_splits: Sequence[int] | None = None,
    group: tsn.Group = None, *, max_rows: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rows of `x` go to all ranks of the group, in their order; as torch.distributed.all_to_all_single.

    Args:
        x: [rows, ...] of any dtype.
        output_splits, input_splits: rows from and to each rank. Pass both or neither; without them all ranks get the same
            number of rows, and `x` has one shape on all ranks.
        group: see `tilescale_net.ops`.
        max_rows: with splits: the most rows that any rank sends or receives, equal on all ranks. Without it the hosts
            exchange the splits in each call, which takes about a millisecond and cannot be captured in a CUDA graph.

    Returns:
        [received rows, ...]. The gradient of `x` is the all_to_all of the result's with the splits exchanged.

    Raises:
        TypeError, ValueError: a wrong argument; this rank has sent nothing.
        HeapError: the symmetric heap has no room for `max_rows`.
        RankMismatch: ranks pass different row shapes or dtypes, or splits that differ between two ranks; with `max_rows` on
            a GPU, `check` raises this, and no row moves between the two.
    """
    eager = output_splits is None and input_splits is None and arguments.is_eager(x)
    if not eager:
        arguments.check("all_to_all", x=x)
    if max_rows is not None and max_rows < 0:
        raise ValueError(f"all_to_all: max_rows is {max_rows}; it must be 0 or more, or None for no bound")
    inputs = x, output_splits, input_splits, -1 if max_rows is None else max_rows, group_objects.name_of(group)
    if not eager:
        return _ops.all_to_all(*inputs)
    return (_exchange_differentiably if arguments.needs_gradient(x) else _all_to_all)(*inputs, False)


def check(group: tsn.Group = None) -> None:
    """Wait for the calls of the group so far and raise their errors. Not collective.

    Raises:
        RankMismatch: see `all_to_all` and `recv`. TileScaleError: a kernel or a peer has failed.
    """
    objects = group_objects.of(group_objects.name_of(group))
    objects.world.synchronize()
    objects.check()


# ---------------------------------------------------------------------------------------------------------------------
# Send and receive on `tilescale_net.kernels.send_recv`; gradients travel in the opposite direction.


def _messages(group: str):
    return group_objects.of(group).send_recv


def _message(x: torch.Tensor) -> torch.Tensor:
    """`x` with its values in memory: a copy if it is not contiguous, or a conjugate or negative view."""
    return x.resolve_conj().resolve_neg().contiguous()


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, dst: int, group: str) -> torch.Tensor:
        _messages(group).send(_message(x), dst)
        ctx.gradient, ctx.dst, ctx.group = (x.shape, x.dtype, x.device), dst, group
        return torch.zeros((), dtype=torch.float32, device=x.device)

    @staticmethod
    def backward(ctx, _):
        shape, dtype, device = ctx.gradient
        return _messages(ctx.group).recv(torch.empty(shape, dtype=dtype, device=device), ctx.dst), None, None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _: torch.Tensor, out: torch.Tensor, src: int, group: str) -> torch.Tensor:
        ctx.src, ctx.group = src, group
        return _received(out.detach(), src, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        _messages(ctx.group).send(_message(grad), ctx.src)
        return None, None, None, None


def _received(out: torch.Tensor, src: int, group: str) -> torch.Tensor:
    """Receive into `out` and increment its version counter, so a backward that needs its earlier contents raises."""
    if out.is_contiguous() and unresolved(out) is None:
        _messages(group).recv(out, src)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)
        return out
    return out.copy_(_messages(group).recv(torch.empty_like(out, memory_format=torch.contiguous_format), src))


@arguments.outside_graphs
def send(x: torch.Tensor, dst: int, group: tsn.Group = None) -> torch.Tensor | None:
    """Send `x` to rank `dst` of the group, which calls `recv`; as torch.distributed.send, but with gradients.

    Asynchronous on the current stream. Messages of up to 1 MiB leave without waiting for the receiver, if it has received
    the earlier ones; of two ranks that exchange larger messages, one must receive first. Breaks a graph of torch.compile. The first
    `send` or `recv` in a group allocates its buffers, collectively: all ranks of the group must make one.

    Args:
        x: of any dtype and shape; copied first if it is not contiguous, or a conjugate or negative view.
        dst: a rank of the group other than this one.
        group: see `tilescale_net.ops`.

    Returns:
        If `x` requires a gradient, a float32 zero, the placeholder of the results of `dst`: its `backward()`, or that of a
        loss that includes it, receives the gradient of `x` from `dst`, which must have received with `requires_grad=True`
        and run its own backward. Else None. The gradient is a constant: its own derivatives (create_graph=True) are not sent.

    Raises:
        TypeError, ValueError: wrong arguments, by name; nothing was sent.
        HeapError: the symmetric heap has no room for the buffers.
    """
    arguments.check("send", x=x)
    name = group_objects.name_of(group)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Send.apply(x, dst, name)
    _messages(name).send(_message(x.detach()), dst)
    return None


@arguments.outside_graphs
def recv(out: torch.Tensor, src: int, group: tsn.Group = None, *, requires_grad: bool = False) -> torch.Tensor:
    """Receive the next message of rank `src` of the group into `out`; as torch.distributed.recv. See `send`.

    Args:
        out: written in place, through a contiguous tensor if it is not contiguous; of the size that `src` sends.
        src: a rank of the group other than this one.
        group: see `tilescale_net.ops`.
        requires_grad: send the gradient of the result to `src`, whose `x` must require one; needs a floating dtype.

    Returns:
        `out`; with `requires_grad`, a tensor over the same memory that requires a gradient. Do not write `out` while
        its results still need it.

    Raises:
        TypeError, ValueError: wrong arguments, by name; nothing was received.
        RankMismatch: the message has another size; raised by this call or, on a GPU, by a later call or `check`.
        HeapError: the symmetric heap has no room for the buffers.
    """
    arguments.check("recv", out=out)
    name = group_objects.name_of(group)
    if requires_grad and torch.is_grad_enabled():
        if not (out.is_floating_point() or out.is_complex()):
            raise TypeError(f"recv: out has dtype {out.dtype}, which has no gradients; leave requires_grad out")
        return _Recv.apply(torch.empty(0, device=out.device, requires_grad=True), out, src, name)
    _received(out.detach(), src, name)
    return out
