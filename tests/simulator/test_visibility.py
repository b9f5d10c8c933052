"""Remote writes become visible as late as the memory model allows: right kernels pass under every seed, and kernels
that leave out a fence, a wait or a quiet fail under some seed of a handful."""

import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.simulator import litmus
from tests.variants import variants
from tilescale_net import _simulator
from tilescale_net.runtime import simulator


def _rounds(names, visibility, seeds):
    """For each kernel the number of seeds, tried in turn, until a rank received wrong data; None when none of them did."""
    n, other = litmus.COUNT, 1 - tsn.rank()
    src, dst = tsn.empty(n), tsn.empty(n)
    sig = tsn.zeros((4,), torch.uint64)
    caught, turn = {}, 0
    for name in names:
        kernel = litmus.kernel(name)
        caught[name] = None
        for seed in range(seeds):
            turn += 1
            mine = torch.arange(n) + 1000.0 * turn + 100_000.0 * tsn.rank()
            src.copy_(mine)
            dst.fill_(float("nan"))
            out = torch.zeros(n)
            tsn.barrier()
            with simulator.schedule(seed, visibility):
                kernel(src, dst, sig, out, other, turn)
            wrong = torch.tensor([not torch.equal(out, mine + 100_000.0 * (1 - 2 * tsn.rank()))], dtype=torch.int32)
            torch.distributed.all_reduce(wrong)
            tsn.barrier()
            if wrong:
                caught[name] = seed + 1
                break
    return caught


@pytest.mark.parametrize("visibility,seeds", [("late", 8), ("random", 12), ("eager", 3)])
def test_right_kernels_pass(visibility, seeds):
    names = tuple(litmus.RIGHT)
    assert ranks.run(2, _rounds, names, visibility, seeds)[0] == dict.fromkeys(names)


@variants(1, "visibility,seeds", [("late", 16), ("random", 60)])
def test_wrong_kernels_are_caught(visibility, seeds):
    caught = ranks.run(2, _rounds, tuple(litmus.WRONG), visibility, seeds)[0]
    assert all(caught.values()), caught


def test_it_is_the_visibility_that_catches_them():
    """Delivered at once, the same kernels pass: nothing but late arrival distinguishes them."""
    names = ("no fence between put_value and signal", "fence to another PE", "signal of another put")
    assert ranks.run(2, _rounds, names, "eager", 8)[0] == dict.fromkeys(names)


@ranks.on()
def test_signals_to_one_word_keep_their_order():
    n = 40
    kernel = litmus.signals_in_order(n)
    sig = tsn.zeros((2,), torch.uint64)
    for seed in range(8):
        seen = torch.zeros(n, dtype=torch.uint64)
        sig.zero_()
        tsn.barrier()
        with simulator.schedule(seed, "late"):
            kernel(sig, seen, 1 - tsn.rank())
        values = seen.tolist()
        assert values == sorted(values) and all(v > i for i, v in enumerate(values)), values
        tsn.barrier()
        assert sig.tolist() == [n, n]


@ranks.on()
def test_writes_outlive_their_kernel():
    """A put without quiet may arrive after its kernel: never half of it after a barrier, and always in the end."""
    kernel, n = litmus.put_only(), litmus.COUNT
    src, dst = tsn.empty(n), tsn.empty(n)
    late = 0
    for seed in range(12):
        src.fill_(seed + 1.0)
        dst.zero_()
        tsn.barrier()
        with simulator.schedule(seed, "late"):
            kernel(src, dst, 1 - tsn.rank())
        late += _simulator.pending_operations() > 0
        if seed % 2:
            tsn.barrier()
        else:  # no thread calls the package any more
            deadline = time.monotonic() + 5
            while _simulator.pending_operations():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            torch.distributed.barrier()
        assert (dst == seed + 1).all()
        tsn.barrier()
    assert 0 < late < 12
