"""Send and receive, made of `tilescale_net.kernels.send_recv`."""

from __future__ import annotations

import torch

import tilescale_net as tsn
from tilescale_net.ops import group_objects


@torch.compiler.disable
def send(x: torch.Tensor, dst: int, group: tsn.Group = None) -> None:
    """Send `x` to rank `dst` of the group, which calls `recv`; as torch.distributed.send, without autograd.

    Asynchronous on the current stream. Messages of up to 1 MiB leave without waiting for the receiver, if those before
    them were taken; of two ranks that exchange larger ones, one receives first. Breaks a graph of torch.compile. The first
    `send` or `recv` in a group makes its buffers, for which all ranks of the group must make one.

    Args:
        x: of any dtype and shape; copied first where it is not contiguous.
        dst: a rank of the group other than this one.
        group: see `tilescale_net.ops`.

    Raises:
        TypeError, ValueError: arguments that do not fit, by name; nothing was sent.
        HeapError: the symmetric heap has no room for the buffers.
    """
    group_objects.of(group_objects.name_of(group)).send_recv.send(x.detach().contiguous(), dst)


@torch.compiler.disable
def recv(out: torch.Tensor, src: int, group: tsn.Group = None) -> torch.Tensor:
    """Receive the next message of rank `src` of the group into `out`; as torch.distributed.recv. See `send`.

    Args:
        out: written in place, through a contiguous tensor where it is not contiguous; as many bytes as `src` sends.
        src: a rank of the group other than this one.
        group: see `tilescale_net.ops`.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: arguments that do not fit, by name; nothing was received.
        RankMismatch: the message has another size; raised by this call or, on a GPU, by a later one or `check`.
        HeapError: the symmetric heap has no room for the buffers.
    """
    objects, there = group_objects.of(group_objects.name_of(group)), out.detach()
    if there.is_contiguous():
        objects.send_recv.recv(there, src)
    else:
        there.copy_(objects.send_recv.recv(torch.empty_like(there, memory_format=torch.contiguous_format), src))
    return out
