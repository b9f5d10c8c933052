"""Calls of shipped kernels with tiny shapes, as `python -m tilescale_net check` takes them.

Every object is called twice, with other data, so that the second call meets leftovers of the first.
"""

import functools

import torch

import tilescale_net as tsn

BLOCK = dict(threads=64, blocks=1)
N = 8  # elements of a message


def _twice(make, new_out, expected, new_x=None):
    """A function that sets up a rank: `make()` is called with (out, x) for two calls, `expected(call)` is the output."""

    def set_up():
        op = make()
        xs = [new_x() if new_x else tsn.empty((N,)) for _ in range(2)]
        for call, x in enumerate(xs):
            x.copy_((torch.arange(x.numel()) + 100.0 * tsn.rank() + 1000.0 * call).reshape(x.shape))
        outs = [new_out() for _ in range(2)]

        def launch():
            for out, x in zip(outs, xs):
                op(out, x)

        return launch, lambda: all(torch.equal(out, expected(call)) for call, out in enumerate(outs))

    return set_up


def _values(rank, call, count=N):
    return torch.arange(count) + 100.0 * rank + 1000.0 * call


def _all(call, count=N):
    return torch.stack([_values(rank, call, count) for rank in range(tsn.size())])


def all_gather():
    from tilescale_net.kernels.all_gather import AllGather

    return _twice(lambda: AllGather(algorithm="puts", **BLOCK), lambda: tsn.empty((tsn.size(), N)), _all)()


def all_to_all():
    from tilescale_net.kernels.all_to_all import AllToAll

    def part(call):
        return _all(call, tsn.size() * N).reshape(tsn.size(), tsn.size(), N)[:, tsn.rank()]

    new = lambda: tsn.empty((tsn.size(), N))  # noqa: E731
    return _twice(lambda: AllToAll(algorithm="puts", **BLOCK), new, part, new)()


def _all_reduce(algorithm):
    def set_up():
        from tilescale_net.kernels.all_reduce import AllReduce

        make = lambda: AllReduce(algorithm=algorithm, staging_bytes=4096, **BLOCK)  # noqa: E731
        return _twice(make, lambda: torch.zeros(N), lambda call: _all(call).sum(0))()

    return set_up


def all_reduce_overwritten():
    from tilescale_net.kernels.all_reduce import AllReduce

    make = lambda: functools.partial(AllReduce(algorithm="two_shot", staging_bytes=4096, **BLOCK), overwrite_x=True)  # noqa: E731
    return _twice(make, lambda: torch.zeros(N), lambda call: _all(call).sum(0))()


all_reduce_one_shot, all_reduce_two_shot_push, all_reduce_packets, all_reduce_two_shot = map(
    _all_reduce, ("one_shot", "two_shot_push", "packets", "two_shot")
)


def all_reduce_fp8():
    from tilescale_net.kernels.all_reduce import AllReduce
    from tilescale_net.kernels.all_reduce_fp8 import rounded_to_fp8

    def total(call):
        once = torch.stack([rounded_to_fp8(row) for row in _all(call)]).sum(0)
        return rounded_to_fp8(once) if tsn.size() > 2 else once

    return _twice(lambda: AllReduce(algorithm="fp8", **BLOCK), lambda: torch.zeros(N), total)()


def _reduce_scatter(algorithm):
    def set_up():
        from tilescale_net.kernels.reduce_scatter import ReduceScatter

        def part(call):
            return _all(call, tsn.size() * N).reshape(tsn.size(), tsn.size(), N)[:, tsn.rank()].sum(0)

        make = lambda: ReduceScatter(algorithm=algorithm, chunk_bytes=512, slots=2, **BLOCK)  # noqa: E731
        return _twice(make, lambda: torch.zeros(N), part, lambda: tsn.empty((tsn.size(), N)))()

    return set_up


reduce_scatter_push, reduce_scatter_pull = map(_reduce_scatter, ("push", "pull"))


def broadcast():
    from tilescale_net.kernels.broadcast import Broadcast

    op, xs = Broadcast(**BLOCK), [tsn.empty((N,)), tsn.empty((N,))]
    for call, x in enumerate(xs):
        x.copy_(_values(tsn.rank(), call))

    def launch():
        for root, x in enumerate(xs):
            op(x, root % tsn.size())

    return launch, lambda: all(torch.equal(x, _values(root % tsn.size(), root)) for root, x in enumerate(xs))


def _moe(blocks, combines):
    """Two tokens of each rank, one to the next rank and one to itself, through an expert that doubles."""

    def set_up():
        from tilescale_net.kernels.moe import AllToAll, Tuning

        ranks, rank = tsn.size(), tsn.rank()
        moe = AllToAll(
            ranks, 2, N, 1, torch.float32, mode="latency", tuning=Tuning(blocks=blocks, threads=64), warm_up=False
        )
        x = _values(rank, 0, 2 * N).reshape(2, N)
        chosen = torch.tensor([[(rank + 1) % ranks], [rank]], dtype=torch.int64)
        y, done = torch.zeros((1, ranks * 2, N)), []

        def launch():
            received = moe.dispatch(x, chosen)
            done.append(received)
            if combines:
                y.copy_(torch.ones_like(y))
                done.append(moe.combine(y, received.handle))

        def right():
            received = done[0]
            rows = sorted(received.x[0, : int(received.counts[0])].tolist())
            left = (rank - 1) % ranks
            expected = sorted([_values(left, 0, 2 * N)[:N].tolist(), _values(rank, 0, 2 * N)[N:].tolist()])
            return rows == expected and (not combines or bool((done[1] == 1).all()))

        return launch, right

    return set_up


moe_dispatch, moe_dispatch_two_blocks = _moe(1, False), _moe(2, False)
moe_latency, moe_latency_two_blocks = _moe(1, True), _moe(2, True)
CALLS = (
    "all_gather", "all_to_all", "all_reduce_fp8", "all_reduce_one_shot", "all_reduce_overwritten", "all_reduce_packets", "all_reduce_two_shot",
    "all_reduce_two_shot_push",
    "reduce_scatter_push", "reduce_scatter_pull", "broadcast", "moe_dispatch", "moe_dispatch_two_blocks", "moe_latency",
    "moe_latency_two_blocks",
)  # fmt: skip
# Which of them run kernels of a file of tilescale_net/kernels.
_ONE_BLOCK_MOE = ("moe_dispatch", "moe_latency")
OF = {
    "all_reduce_fp8": ("all_reduce_fp8",),
    "all_reduce_push": ("all_reduce_one_shot", "all_reduce_two_shot_push"),
    "all_reduce_two_shot": ("all_reduce_two_shot", "all_reduce_overwritten"),
    "broadcast": ("broadcast",),
    "exchange": ("all_gather", "all_to_all"),
    "moe/latency_combine": ("moe_latency", "moe_latency_two_blocks"),
    "moe/latency_dispatch": _ONE_BLOCK_MOE,
    "packets": ("all_reduce_packets",),
    "reduce_scatter": ("reduce_scatter_push", "reduce_scatter_pull"),
}
