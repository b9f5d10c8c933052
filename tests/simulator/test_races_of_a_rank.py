"""Races that are not between a transfer and a kernel: threads of a rank, remote views, the host between launches."""

from concurrent import futures

import pytest
import tilelang.language as T
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tilescale_net.errors import DataRace
from tilescale_net.runtime import simulator

WARPS, WARP, BLOCKS, HALVES, ATOMIC, LAST_READ, VIEW, LANES, PUT = range(9)


# Without this tilelang puts a barrier between any two accesses to shared memory by itself.
@tsn.jit(pass_configs={"tl.disable_thread_storage_sync": True})
def one_of_many():
    """Kernel `(case, right)`: one of the cases, with what orders it or without."""

    @T.prim_func
    def main(
        ctx: N.Context(),
        case: T.int32,
        right: T.int32,
        plain: T.Tensor((128,), "float32"),
        word: T.Tensor((2,), "uint64"),
        flag: T.Tensor((2,), "uint64"),
        x: T.Tensor((64,), "float32"),
        y: T.Tensor((64,), "float32"),
    ):
        with T.Kernel(2, threads=64) as block:
            tx = T.get_thread_binding()
            pe = 1 - N.my_pe()
            shared = T.alloc_shared((64,), "float32")
            halves = T.alloc_shared((64,), "float16")
            count = T.alloc_shared((1,), "int32")
            if case == WARPS:
                shared[tx] = 1.0
                if right != 0:
                    T.sync_threads()
                plain[block * 64 + tx] = shared[63 - tx]
            if case == WARP and tx < 32:
                shared[tx] = 1.0
                if right != 0:
                    T.sync_warp()
                plain[block * 64 + tx] = shared[31 - tx]
            if case == BLOCKS:
                if block == 1 and tx == 0:
                    plain[0] = 1.0
                    if right != 0:
                        N.st(word[0], T.uint64(1), sem="release", scope="gpu")
                if block == 0 and tx == 0:
                    if right != 0:
                        while N.ld(word[0], sem="acquire", scope="gpu") == T.uint64(0):
                            T.evaluate(0)
                    plain[1] = plain[0] + 1.0
            if case == HALVES:  # two threads share each 4 bytes, and race in the wrong form only
                halves[(tx % 2) * 32 + tx // 2 if right == 0 else tx] = T.float16(1)
                if right == 0:
                    plain[block * 64 + tx] = T.cast(halves[(63 - tx)], "float32")
            if case == ATOMIC:
                if tx == 0:
                    count[0] = 0
                if right != 0:
                    T.sync_threads()
                T.atomic_add(count[0], 1)
            if case == LAST_READ:  # written again before all have read
                if tx == 0:
                    shared[0] = 1.0
                T.sync_threads()
                plain[block * 64 + tx] = shared[0]
                if right != 0:
                    T.sync_threads()
                if tx == 0:
                    shared[0] = 2.0
            if case == VIEW and block == 0:
                view = N.remote(y, pe)
                view[tx] = x[tx]
                T.sync_threads()
                if tx == 0:
                    if right != 0:
                        N.fence(pe)
                    N.signal(flag[0], 1, pe)
                N.wait_block(flag[0], "ge", 1)
                x[tx] = y[tx]
            if case == LANES and block == 0 and tx < 32:
                view = N.remote(y, pe)
                view[tx] = x[tx]
                if right != 0:
                    T.sync_warp()
                if tx == 0:
                    N.fence(pe)
                    N.signal(flag[0], 1, pe)
                N.wait_warp(flag[0], "ge", 1)
                x[tx] = y[tx]
            if case == PUT and block == 0:
                N.put_signal_block(y, x, pe, flag[0], 1)
                if right != 0:
                    N.wait_block(flag[0], "ge", 1)
                    N.quiet_block(pe)

    return main


def _run(case, right, seed):
    """What the check says of one launch on this rank, and of the host after it."""
    kernel = one_of_many()
    plain, word = torch.zeros(128), torch.zeros(2, dtype=torch.int64).view(torch.uint64)
    flag, x, y = tsn.zeros((2,), torch.uint64), tsn.zeros((64,)), tsn.zeros((64,))
    tsn.barrier()
    try:
        with simulator.schedule(seed, races=True):
            kernel(case, right, plain, word, flag, x, y)
        if case == PUT:
            x.zero_()
        return "", ""
    except DataRace as error:
        return "kernel" if "kernel one_of" in str(error) or "kernel main" in str(error) else "host", str(error)


CASES = [
    (WARPS, "shared memory", "T.sync_threads() is missing"),
    (WARP, "shared memory", "T.sync_warp()"),
    (BLOCKS, "memory of this rank", "two blocks"),
    (ATOMIC, "an atomic operation", "T.sync_threads() is missing"),
    (LAST_READ, "a store to shared (shared memory)", "a load of shared"),
    (VIEW, "remote view", "N.fence"),
    (LANES, "remote view", "T.sync_warp()"),
    (PUT, "torch's zero_ on the host", "N.quiet"),
]


@pytest.mark.parametrize("case, what, advice", CASES)
def test_found_in_any_schedule(case, what, advice):
    said = [o.error[1] if o.error else o.value[1] for o in ranks.launch(2, _run, case, 0, case, env=RACES)]
    assert any(what in s and advice in s for s in said), said


def _elsewhere(function, *args):
    """In a thread of its own."""
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def test_the_host_is_followed_in_any_thread():
    said = [o.error[1] if o.error else o.value[1] for o in ranks.launch(2, _elsewhere, _run, PUT, 0, PUT, env=RACES)]
    assert any("torch's zero_ on the host" in s for s in said), said


class _Counts(TorchDispatchMode):
    """A mode of the user's own."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _beside_modes_of_the_user():
    x = torch.ones(4)
    assert torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(x).tolist() == [2] * 4
    _elsewhere(tsn.finalize)
    with _Counts() as outer:
        tsn.init("32M")
    x + 1
    assert outer.calls and (outer.calls, x.sum()) == (outer.calls, 4)
    seen = outer.calls
    with _Counts() as other:
        tsn.finalize()
        x + 1
        assert other.calls and outer.calls == seen
        said = _get_current_dispatch_mode_stack()
    assert said[-1] is other and not _get_current_dispatch_mode()
    tsn.init("32M")


def test_modes_of_the_user_are_left_alone():
    """Those of torch's dispatcher, which the check uses itself: init and finalize may stand in any, and in any thread."""
    ranks.run(2, _beside_modes_of_the_user, env=RACES)


def test_right_forms_are_not_accused():
    ranks.run(2, _accepts, env=RACES)


def _accepts():
    for case in [*(c[0] for c in CASES), HALVES]:
        for seed in range(3):
            where, said = _run(case, 1, seed)
            assert not said, (case, where, said)
            tsn.barrier()


@tsn.jit
def overtaken():
    """Kernel `(flag)`: a wait for the async proxy, for at least what the word may have passed already."""

    @T.prim_func
    def main(ctx: N.Context(), flag: T.Tensor((2,), "uint64")):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                N.signal(flag[0], 1, 1 - N.my_pe())
                N.signal(flag[0], 2, 1 - N.my_pe())
                N.wait(flag[0], "ge", 1, proxy="async")

    return main


def _overtaken():
    flag = tsn.zeros((2,), torch.uint64)
    with simulator.schedule(0, races=True):
        overtaken()(flag)


def test_a_wait_for_the_async_proxy_may_be_overtaken():
    ranks.run(2, _overtaken, env=RACES)


RACES = {"TSN_SIM_RACES": "1"}
