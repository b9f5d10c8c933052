"""Ranks that make one call with different arguments, each of them agreed on before: errors name ranks and arguments."""

import time

import torch

import tilescale_net as tsn
from tests import ranks
from tests.variants import variants
from tilescale_net import ops
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.all_to_all import AllToAll
from tilescale_net.kernels.all_to_all_transposed import AllToAllTransposed
from tilescale_net.kernels.broadcast import Broadcast
from tilescale_net.kernels.moe import AllToAll as Experts
from tilescale_net.kernels.reduce_scatter import ReduceScatter


def _ended(op, call) -> None:
    """Make a call of `op`. On a GPU its kernel runs on behind it, and `check` raises the kernel's error."""
    call()
    if tsn.device().type == "cuda":
        op.check()


def _message(op, call) -> str | None:
    """The text of the RankMismatch that a call raises."""
    try:
        _ended(op, call)
    except tsn.RankMismatch as error:
        return str(error)
    return None


# What is said of a rank that has begun a later call already.
GONE = "something else, and has gone on since"


def _says(text, mine, theirs) -> bool:
    """Whether the message holds this rank's arguments first, then the other's."""
    own, other = text.split("; rank ")[:2]
    return all(word in own for word in mine) and (GONE in other or all(word in other for word in theirs))


@ranks.on(3)
def test_all_gather():
    """Rank 0 is one buffer, later one shape, away from the others."""
    rank, n = tsn.rank(), tsn.size()
    op = AllGather(threads=32, blocks=2)
    x = tsn.zeros(500, torch.int32)
    outs = [tsn.zeros((n, 500), torch.int32) for _ in range(2)]
    small = tsn.zeros((n, 3), torch.int32)
    x.fill_(rank + 1)
    for out in (*outs, small):
        op(out, x[: out.shape[1]])
    for out in outs:
        out.zero_()
    tsn.barrier()
    messages = [_message(op, lambda: op(outs[rank > 0], x))]
    moved = [out[:, 0].tolist() for out in outs]
    messages.append(_message(op, lambda: op(small, x[:3]) if rank == 2 else op(outs[0], x)))
    op(outs[0], x)  # the object still works
    tsn.synchronize()
    assert outs[0][:, 0].tolist() == [1, 2, 3]
    assert all(messages) and all(f"rank {0 if rank else 1}" in m or "rank 2" in m for m in messages), messages
    places = [[f"out at heap offset {out.data_ptr() - tsn.world().heap.base}"] for out in outs]
    assert _says(messages[0], *(places[::-1] if rank else places)), messages
    # Ranks 1 and 2 agree, so that their parts have arrived; nothing went astray.
    assert moved == ([[0, 0, 0], [0, 2, 3]] if rank else [[1, 0, 0], [0, 0, 0]]), moved
    assert _says(messages[1], *([["[3]"], ["[500]"]] if rank == 2 else [["[500]"], ["[3]"]])), messages


@ranks.on(3)
def test_all_to_all():
    """Another buffer, another kind of call, another row shape."""
    rank, n = tsn.rank(), tsn.size()
    op = AllToAll(threads=32, blocks=2)
    x = tsn.zeros((n, 500), torch.int32)
    outs = [tsn.zeros((n, 500), torch.int32) for _ in range(2)]
    x.fill_(rank + 1)
    even = [1] * n

    def narrow(out):
        return out.view(-1)[: n * 100].view(n, 100)

    for out in outs:
        op(out, x)
        op(out, x, even, even)
        op(narrow(out), narrow(x), even, even)
        out.zero_()
    tsn.barrier()
    messages = [_message(op, lambda: op(outs[rank > 0], x))]
    moved = [out[:, 0].tolist() for out in outs]
    for out in outs:
        out.zero_()
    tsn.barrier()
    messages.append(_message(op, lambda: op(outs[0], x, even, even) if rank == 0 else op(outs[0], x)))
    moved.append(outs[0][:, 0].tolist())
    outs[0].zero_()
    tsn.barrier()
    out, source = (narrow(outs[0]), narrow(x)) if rank else (outs[0], x)
    messages.append(_message(op, lambda: op(out, source, even, even)))
    op(outs[0], x)
    tsn.synchronize()
    assert all(messages) and all(f"rank {0 if rank else 1}" in m or "rank 2" in m for m in messages), messages
    assert _says(messages[0], ["heap offset"], ["heap offset"])
    pairs = (["with splits"], ["heap offset"]), (["[500]"], ["[100]"])
    for message, pair in zip(messages[1:], pairs):
        assert _says(message, *(pair[::-1] if rank else pair)), messages
    own = [0, 2, 3] if rank else [1, 0, 0]
    assert moved == ([[0, 0, 0], own, own] if rank else [own, [0, 0, 0], own]), moved
    assert outs[0][:, 0].tolist() == [1, 2, 3]


def _reduce(rows):
    rank, n, device = tsn.rank(), tsn.size(), tsn.device()
    op = ReduceScatter(threads=32, blocks=1, slots=2, chunk_bytes=256)
    for size in (*rows, rows[rank]):
        out, x = torch.zeros(size, device=device), torch.zeros((n, size), device=device)
        said = _message(op, lambda: op(out, x))
    assert said is not None, "the call went through"
    op(out, x)  # raises it again


@variants(1, "rows", [(64, 63), (64, 1000)], ids=["as many chunks", "more chunks"])
def test_reduce_scatter(rows):
    """Where numbers of chunks differ the call cannot end; the error names the mismatch instead of the timeout."""
    # What a rank compiles for a GPU the other one waits for in its kernel.
    timeout = "20" if ranks.gpus() else "3"
    for outcome in ranks.launch(2, _reduce, rows, env={"TSN_TIMEOUT": timeout}):
        assert outcome.error is not None and outcome.error[0] == "RankMismatch", outcome
        mine, theirs = ([f"[{rows[r]}]"] for r in (outcome.rank, 1 - outcome.rank))
        assert _says(outcome.error[1], mine, theirs), outcome


@ranks.on()
def test_mapped_memory():
    """Rank 0 is one buffer away from the other: nothing is read, and both learn of it."""
    rank, messages = tsn.rank(), []
    reduce = AllReduce(threads=64, blocks=2, algorithm="two_shot")
    tensors = [tsn.zeros(4096, torch.float32) for _ in range(2)]
    for x in tensors:
        x.fill_(rank + 1)
        reduce(x)
    for x in tensors:
        x.fill_(7)
    tsn.barrier()
    messages.append(_message(reduce, lambda: reduce(tensors[rank])))
    untouched = [x.unique().tolist() for x in tensors]
    total = torch.zeros(4096, device=tsn.device())
    for x in tensors:
        reduce(total, x, overwrite_x=True)
    for x in (*tensors, total):
        x.fill_(7)
    tsn.barrier()
    messages.append(_message(reduce, lambda: reduce(total, tensors[rank], overwrite_x=True)))
    untouched += [x.unique().tolist() for x in (*tensors, total)]
    scatter = ReduceScatter(threads=64, blocks=2, algorithm="pull")
    inputs, out = [tsn.zeros((2, 4096), torch.float32) for _ in range(2)], tsn.zeros(4096)
    for x in inputs:
        scatter(out, x)
    out.fill_(7)
    tsn.barrier()
    messages.append(_message(scatter, lambda: scatter(out, inputs[rank])))
    untouched.append(out.unique().tolist())
    gather = AllGather(threads=64, blocks=2, stores_from=16)
    outs = [tsn.zeros((2, 1024)) for _ in range(2)]
    x = torch.full((1024,), rank + 1.0, device=tsn.device())
    for o in outs:
        gather(o, x)
    tsn.barrier()
    for o in outs:
        o.fill_(7)
    tsn.barrier()
    messages.append(_message(gather, lambda: gather(outs[rank], x)))
    untouched.append(outs[rank][1 - rank].unique().tolist())
    assert all(text and "at heap offset" in text for text in messages), messages
    assert untouched == [[7.0]] * 7


@ranks.fails("RankMismatch", "x of shape [4096] and torch.float32, which may be overwritten")
def test_overwritten_by_one():
    """Rank 0 lets its tensor be overwritten, rank 1 does not."""
    reduce, x = AllReduce(threads=64, blocks=2, algorithm="two_shot"), tsn.zeros(4096)
    total = torch.empty_like(x)
    for overwrite_x in (True, False):
        reduce(total, x, overwrite_x=overwrite_x)
    _ended(reduce, lambda: reduce(total, x, overwrite_x=tsn.rank() == 0))


@ranks.on()
def test_one_exchange():
    """Collectives whose ranks meet once: nothing is written where they differ, and the objects still work."""
    rank, geometry = tsn.rank(), dict(threads=64, blocks=2)
    x = [tsn.zeros(64, torch.bfloat16) for _ in range(2)]
    out = [tsn.zeros((8, 4), torch.bfloat16) for _ in range(2)]
    part = torch.ones((4, 8), dtype=torch.bfloat16, device=tsn.device())
    broadcast, cut = Broadcast(**geometry), AllToAllTransposed(**geometry)
    one_shot, packets = (AllReduce(**geometry, algorithm=name) for name in ("one_shot", "packets"))
    calls = (
        (broadcast, lambda other: broadcast(x[other])),
        (broadcast, lambda other: broadcast(x[0], root=other)),
        (cut, lambda other: cut(out[other], part, cut=1, join=0)),
        (one_shot, lambda other: one_shot(x[other][: 64 - other])),
        (packets, lambda other: packets(x[other][: 64 - other])),
    )
    for op, call in calls:
        for other in (0, 1):
            call(other)
        for tensor in (*x, *out):
            tensor.fill_(rank + 7)
        tsn.barrier()
        message = _message(op, lambda: call(rank))
        assert message and "was called with" in message
        assert all(bool((tensor == rank + 7).all()) for tensor in (*x, *out))
        tsn.barrier()
        call(0)


def _experts(case) -> dict:
    """Rank 1 combines, or makes an object of another size, while rank 0 dispatches."""
    op = Experts(4, 8, 64, 2, mode="latency")
    rows, weights = torch.ones((8, 64), dtype=torch.bfloat16, device=op.device), torch.ones((8, 2), device=op.device)
    choices = torch.tensor([[0, 3]] * 8, device=op.device)
    received = op.dispatch(rows, choices, weights)
    again = {
        "experts: halves": lambda: op.combine_recv(op.combine_send(received.x, received.handle)),
        "experts: sizes": lambda: Experts(4, 16, 64, 2, mode="latency"),
    }
    return {case: (op, lambda other: again[case]() if other else op.dispatch(rows, choices, weights))}


@variants(
    3,
    "case, words",
    [
        ("new shape", ("[500]", "[3]")),
        ("pull and push", ("offsets", "copied")),
        ("free", ("[500]", "free()")),
        ("another object", ("AllGather: x", "ReduceScatter: ")),
        ("barrier", ("AllGather: x", "tilescale_net.barrier()")),
        ("experts: halves", ("dispatch: 4 experts", "combine: 4 experts")),
        ("experts: sizes", ("dispatch: 4 experts, 8 tokens", "max_tokens=16")),
    ],
)
@ranks.fails("RankMismatch")
def test_ranks_that_wait_for_each_other(case, words):
    """Rank 1 waits in the call of a host, or in another kernel, and rank 0 in its kernel."""
    rank, n = tsn.rank(), tsn.size()
    gather, scatter = AllGather(threads=32, blocks=2), ReduceScatter(threads=64, blocks=2)
    outs = [tsn.zeros((n, count), torch.int32) for count in (500, 3)]
    parts = [torch.zeros(out.shape[1], dtype=torch.int32, device=tsn.device()) for out in outs]
    # More than goes in packets.
    x, out = tsn.zeros((2, 16384)), torch.zeros(16384, device=tsn.device())
    calls = {
        "new shape": (gather, lambda other: gather(outs[other], parts[other])),
        "pull and push": (scatter, lambda other: scatter(out, x.clone() if other else x)),
        "free": (gather, lambda other: gather.free() if other else gather(outs[0], parts[0])),
        "another object": (gather, lambda other: scatter(out, x) if other else gather(outs[0], parts[0])),
        "barrier": (gather, lambda other: tsn.barrier() if other else gather(outs[0], parts[0])),
    }
    if case.startswith("experts"):
        calls |= _experts(case)
    op, call = calls[case]
    call(0)
    if case in ("pull and push", "another object", "experts: halves"):
        call(1)
    tsn.barrier()
    begin = time.monotonic()  # kernels are compiled by now, which takes long on a GPU
    try:
        _ended(op, lambda: call(rank))
    finally:
        assert time.monotonic() - begin < 30, "this rank has waited for its timeout"


@ranks.on()
def test_places_of_small_tensors():
    """Views of a symmetric tensor that begin elsewhere on every rank, some of them new: sums are right all the same."""
    rank, reduce = tsn.rank(), AllReduce(threads=64, blocks=2)
    scatter = ReduceScatter(threads=64, blocks=2)
    pool, x, room = tsn.zeros(1024), tsn.zeros((2, 64)), torch.zeros(65, device=tsn.device())
    for first in (0, 64 * rank, 128, 64):
        part = pool[first : first + 64].fill_(rank + 1)
        assert reduce(part).eq(3).all()
        x.fill_(rank + 1)
        # Where `out` lies is each rank's own business.
        start = int(first == 64)
        assert scatter(room[start : start + 64], x).eq(3).all()


class _Hook(Exception):
    """Raised by a hook in backward."""


def _leaves_backward():
    """A hook ends the backward of rank 1, which goes on with a forward of the same shape."""
    x, said = torch.ones(8, device=tsn.device(), requires_grad=True), []

    def hook(grad):
        if tsn.rank() == 1 and not said:
            said.append("left")
            raise _Hook

    for _ in range(3):
        try:
            y = ops.all_reduce(x) * 1
            if len(said) == 0 and x.grad is not None:
                y.register_hook(hook)
            y.sum().backward()
            ops.check()
        except (_Hook, tsn.RankMismatch) as error:
            said.append(str(error))
            if tsn.rank() == 0:
                break
    return said


def test_a_forward_is_not_paired_with_a_backward():
    of_0, of_1 = ranks.run(2, _leaves_backward)
    assert "was called with backward: out of shape [8]" in of_0[-1] and "backward" in of_1[-1], (of_0, of_1)
