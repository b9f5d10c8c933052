"""Send and receive, made of `tilescale_net.kernels.send_recv`; a gradient takes the way of its message back."""

from __future__ import annotations

import torch

import tilescale_net as tsn
from tilescale_net.ops import arguments, group_objects
from tilescale_net.runtime.launch_args import unresolved


def _messages(group: str):
    return group_objects.of(group).send_recv


def _message(x: torch.Tensor) -> torch.Tensor:
    """`x` as its values lie in memory: a copy where it is not contiguous, or a conjugate or negative view."""
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


def _received(there: torch.Tensor, src: int, group: str) -> torch.Tensor:
    """`there`, which has the version counter of the caller's tensor: what was computed from it cannot be differentiated."""
    if there.is_contiguous() and unresolved(there) is None:
        _messages(group).recv(there, src)
        if not there.is_inference():
            torch.autograd.graph.increment_version(there)
        return there
    return there.copy_(_messages(group).recv(torch.empty_like(there, memory_format=torch.contiguous_format), src))


@torch.compiler.disable
def send(x: torch.Tensor, dst: int, group: tsn.Group = None) -> torch.Tensor | None:
    """Send `x` to rank `dst` of the group, which calls `recv`; as torch.distributed.send, but with gradients.

    Asynchronous on the current stream. Messages of up to 1 MiB leave without waiting for the receiver, if those before
    them were taken; of two ranks that exchange larger ones, one receives first. Breaks a graph of torch.compile. The first
    `send` or `recv` in a group makes its buffers, for which all ranks of the group must make one.

    Args:
        x: of any dtype and shape; copied first where it is not contiguous, or a conjugate or negative view.
        dst: a rank of the group other than this one.
        group: see `tilescale_net.ops`.

    Returns:
        Where `x` requires a gradient, a float32 zero that stands for what `dst` makes of it: its `backward()`, or that of
        a loss it was added to, receives the gradient of `x` from `dst`, which must have received with `requires_grad=True`
        and run its own backward. Else None. The gradient is a constant: its own derivatives (create_graph=True) are not sent.

    Raises:
        TypeError, ValueError: arguments that do not fit, by name; nothing was sent.
        HeapError: the symmetric heap has no room for the buffers.
    """
    arguments.check("send", x=x)
    name = group_objects.name_of(group)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Send.apply(x, dst, name)
    _messages(name).send(_message(x.detach()), dst)
    return None


@torch.compiler.disable
def recv(out: torch.Tensor, src: int, group: tsn.Group = None, *, requires_grad: bool = False) -> torch.Tensor:
    """Receive the next message of rank `src` of the group into `out`; as torch.distributed.recv. See `send`.

    Args:
        out: written in place, through a contiguous tensor where it is not contiguous; as many bytes as `src` sends.
        src: a rank of the group other than this one.
        group: see `tilescale_net.ops`.
        requires_grad: the gradient of the result is sent to `src`, whose `x` must require one; `out` is of a floating
            dtype then.

    Returns:
        `out`; with `requires_grad`, a tensor over the same memory that requires a gradient. `out` may not be written until
        what is computed from it needs it no more.

    Raises:
        TypeError, ValueError: arguments that do not fit, by name; nothing was received.
        RankMismatch: the message has another size; raised by this call or, on a GPU, by a later one or `check`.
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
