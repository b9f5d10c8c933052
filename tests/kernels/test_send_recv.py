"""Messages between two ranks: any size and dtype, several in flight, in place, on one node and on two; and rejected calls."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import assert_same, random_tensor, unsettle
from tests.variants import variants
from tilescale_net import ops
from tilescale_net.kernels import send_recv
from tilescale_net.kernels.send_recv import SendRecv

GEOMETRY = dict(chunk=128, threads=32, blocks=2)


def _messages(seed, apart=1, cases=6) -> None:
    """Between each two ranks whose numbers differ in the bit `apart`."""
    rank, other = tsn.rank(), tsn.rank() ^ apart
    low, high = sorted((rank, other))
    pace, turns = random.Random(f"{seed} {rank}"), random.Random(seed)
    op, symmetric = SendRecv(**GEOMETRY), tsn.empty(4096, torch.uint8)
    for case in range(cases):
        dtype = turns.choice((torch.bfloat16, torch.float32, torch.uint8))
        sender, messages = turns.choice((low, high)), turns.choice([1, 3])
        shapes = [turns.choice([(0,), (1,), (5, 7), (turns.randrange(1, 900),)]) for _ in range(messages)]
        if case == 0:
            shapes[0] = (0,)  # no block has a part
        for i, shape in enumerate(shapes):
            data = random_tensor(shape, dtype, seed, case, i)
            unsettle(pace, 0.05)
            if rank == sender:
                x = data.to(tsn.device())
                if i % 2 == 0:
                    x = symmetric[: data.nbytes].view(dtype).view(shape).copy_(data)
                op.send(x, other)
                x.zero_()  # the call is over with x
            else:
                out = torch.full_like(data, 3).to(tsn.device())
                assert op.recv(out, other) is out
                assert_same(out, data, f"seed {seed}, case {case}, message {i}")
    # A size that the receiver does not expect, then a message that is right.
    if rank == low:
        op.send(torch.arange(900, dtype=torch.int32).to(tsn.device()), high)
        op.send(torch.ones(3, device=tsn.device()), high)
    else:
        text = f"rank {low} sent 3600 bytes to rank {high}, which expected 40;"
        with pytest.raises(tsn.RankMismatch, match=text):
            op.recv(torch.zeros(10, device=tsn.device()), low)
            op.check()
        assert op.recv(torch.zeros(3, device=tsn.device()), low).tolist() == [1, 1, 1]
    tsn.barrier()
    op.free()


def _numbers_begin_anew() -> None:
    """After millions of messages between two ranks, numbers of chunks no longer fit into their word."""
    op, start = SendRecv(**GEOMETRY), 2 * send_recv.NUMBERS - 3
    for words in (op._sent, op._received, op._memory["taken"]):
        words.copy_(torch.full(words.shape, start, dtype=torch.int64))
    for number in range(start - op._SLOTS, start):  # announced by the last chunk of each slot
        word = (number + 1) % send_recv.NUMBERS << send_recv.SIZE_BITS
        op._memory["arrived"][:, :, number % op._SLOTS].copy_(torch.full((2, 2), word, dtype=torch.int64))
    tsn.barrier()
    for i in range(8):
        data = random_tensor((100 + i,), torch.float32, i)
        if tsn.rank() == 0:
            op.send(data.to(tsn.device()), 1)
        else:
            assert_same(op.recv(torch.zeros_like(data).to(tsn.device()), 0), data, f"message {i}")
    tsn.barrier()
    op.free()


def _operators_and_refusals() -> None:
    rank, device = tsn.rank(), tsn.device()
    table = torch.arange(12.0, device=device).view(3, 4)
    numbers = torch.complex(table, table)
    if rank == 0:
        ops.send(table.t(), 1)
        ops.send(numbers.conj(), 1)
        ops.send(numbers, 1)
    else:
        whole = torch.zeros((4, 6), device=device)
        assert ops.recv(whole[:, :3], 0).data_ptr() == whole.data_ptr()
        assert torch.equal(ops.recv(torch.zeros_like(numbers), 0), numbers.conj())
        assert torch.equal(ops.recv(torch.zeros_like(numbers).conj(), 0), numbers)
        assert torch.equal(whole[:, :3], table.t()) and not whole[:, 3:].any()
    with pytest.raises(ValueError, match=f"pe is {rank}; it must be a rank between 0 and 1 other than this one"):
        ops.send(table, rank)
    with pytest.raises(ValueError, match="pe is 2; it must be"):
        ops.recv(table, 2)
    with pytest.raises(ValueError, match="chunk is 100; it must be a positive multiple of 16 bytes"):
        SendRecv(chunk=100)


def _gradients() -> None:
    """Two stages of a pipeline, two micro-batches: the gradient of the second stage's loss reaches the first stage's weights."""
    rank, device = tsn.rank(), tsn.device()
    first, second = (torch.full((4, 4), value, device=device, requires_grad=True) for value in (2.0, 3.0))
    parts = [torch.arange(12.0, device=device).view(3, 4), torch.ones((5, 4), device=device)]
    if rank == 0:
        sum(ops.send(x @ first, 1) for x in parts).backward()
    else:
        received = [ops.recv(torch.empty_like(x), 0, requires_grad=True) for x in parts]
        # Messages and gradients of two ranks go in one order: the last sent first, as backward runs there.
        for y in reversed(received):
            (y @ second).sum().backward()
    whole = torch.cat(parts)
    if rank == 0:
        wanted = whole.t() @ torch.full((8, 4), 12.0, device=device)
    else:
        wanted = (whole @ torch.full((4, 4), 2.0, device=device)).t() @ torch.ones((8, 4), device=device)
    assert torch.equal((first if rank == 0 else second).grad, wanted)
    assert (second if rank == 0 else first).grad is None
    torch.set_default_dtype(torch.bfloat16)
    if rank == 0:
        zero = ops.send(first, 1)
        assert zero.dtype == torch.float32
        zero.backward()
    else:
        ops.recv(torch.empty_like(second), 0, requires_grad=True).sum().backward()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        if rank == 0:
            assert ops.send(first, 1) is None
        else:
            assert not ops.recv(torch.empty_like(second), 0, requires_grad=True).requires_grad
    factor, out = torch.ones(4, device=device, requires_grad=True), torch.ones(4, device=device)
    used = (factor * out).sum()
    for target in (out, out.view(2, 2).t()):
        before = out._version
        if rank == 0:
            ops.send(first.detach().view(-1)[:4].clone(), 1)
        else:
            ops.recv(target, 0)
            assert out._version == before + 1
    if rank == 1:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            used.backward()
    with torch.inference_mode():
        ops.send(torch.ones(3, device=device), 1) if rank == 0 else ops.recv(torch.zeros(3, device=device), 0)
    with pytest.raises(TypeError, match="out has dtype torch.int32, which has no gradients"):
        ops.recv(torch.empty(4, dtype=torch.int32, device=device), 1 - rank, requires_grad=True)


@variants(1, "nodes", [1, 2])
@ranks.on()
def test_messages(nodes, seed):
    _messages(seed)
    _numbers_begin_anew()
    _operators_and_refusals()
    _gradients()
