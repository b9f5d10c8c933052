"""Races that are not between a transfer and a kernel: threads of a rank, remote views, the host between launches."""

import itertools
import re
import threading
from concurrent import futures

import pytest
import tilelang.language as T
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _get_current_dispatch_mode_stack

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.shorthand import f32, jitted, u64
from tests.simulator.recorded import all_reports, recorded_errors
from tests.variants import variants
from tilescale_net.errors import DataRace
from tilescale_net.runtime import simulator

BLOCKS, HALVES, ATOMIC, LAST_READ, VIEW, LANES, PUT, SAME, HINT = range(9)
RACES = {"TSN_SIM_RACES": "1"}


# Without this tilelang puts a barrier between any two accesses to shared memory.
@jitted(pass_configs={"tl.disable_thread_storage_sync": True})
def one_of_many(
    ctx: N.Context(), case: T.int32, right: T.int32, plain: f32(128), word: u64(2), flag: u64(2), x: f32(64), y: f32(64)
):
    """Kernel `(case, right)`: one of the cases, with what orders it or without."""
    with T.Kernel(2, threads=64) as block:
        tx = T.get_thread_binding()
        pe = 1 - N.my_pe()
        shared = T.alloc_shared((64,), "float32")
        halves = T.alloc_shared((64,), "float16")
        count = T.alloc_shared((1,), "int32")
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
        if case == SAME:  # stored by all threads of a block, or of both
            if right == 0:
                shared[0] = T.cast(tx, "float32")
            else:
                shared[0] = 3.0
                plain[0] = 3.0
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
        if case == HINT and block == 0:
            N.put_signal_block(y, x, pe, flag[0], 1)
            if right != 0:
                N.wait_block(flag[0], "ge", 1)
            plain[tx] = T.call_extern("float32", "__ldcg", T.address_of(y[tx]))
            N.wait_block(flag[0], "ge", 1)
            N.quiet_block(pe)
        if case == PUT and block == 0:
            N.put_signal_block(y, x, pe, flag[0], 1)
            if right != 0:
                N.wait_block(flag[0], "ge", 1)
                N.quiet_block(pe)


@T.macro
def _tell(word, plain, block, first, store, load, scope, fence):
    """Block 1 writes, and announces it to block 0 by a word."""
    if block == 1 and first:
        plain[0] = 1.0
        if fence != "":
            T.evaluate(T.call_extern("void", fence))
        N.st(word[0], T.uint64(1), sem=store, scope=scope)
    if block == 0 and first:
        while N.ld(word[0], sem=load, scope=scope) == T.uint64(0):
            T.evaluate(0)
        if fence != "":
            T.evaluate(T.call_extern("void", fence))
        plain[1] = plain[0] + 1.0


@T.macro
def _count(word, plain, first, order):
    """The last of two blocks reads the data that the other has written."""
    if first:
        plain[T.get_block_binding() % 2] = 1.0
        if T.atomic_add(word[1], T.uint64(1), memory_order=order, return_prev=True) % T.uint64(2) == T.uint64(1):
            plain[2] = plain[0] + plain[1]


# Order of the store, of the load, scope of both, and a fence beside each; or the order of an atomic operation.
WORDS = {
    ("release", "acquire", "gpu", ""): "",
    ("release", "acquire", "sys", ""): "",
    ("release", "acquire", "cta", ""): "wrong",
    ("relaxed", "relaxed", "gpu", ""): "wrong",
    ("release", "relaxed", "gpu", ""): "wrong",
    ("relaxed", "acquire", "gpu", ""): "wrong",
    ("relaxed", "relaxed", "gpu", "__threadfence"): "",
    ("relaxed", "relaxed", "gpu", "__threadfence_block"): "wrong",
    ("relaxed", "relaxed", "cta", "__threadfence"): "wrong",
    ("volatile", "volatile", "gpu", "__threadfence"): "",
    ("weak", "weak", "gpu", "__threadfence"): "wrong",
    "acq_rel": "",
    "release": "wrong",
    "relaxed": "wrong",
    "barrier": "",
}


@jitted
def told_by_words(ctx: N.Context(), case: T.int32, plain: f32(128), word: u64(2)):
    """Kernel `(case, plain, word)`: one of WORDS."""
    with T.Kernel(2, threads=32) as block:
        first = T.get_thread_binding() == 0
        for number, how in enumerate(WORDS):
            if case == number:
                if how == "barrier":
                    plain[block * 32 + T.get_thread_binding()] = 1.0
                    N.barrier_grid()
                    plain[64 + block * 32 + T.get_thread_binding()] = plain[63 - block * 32 - T.get_thread_binding()]
                elif isinstance(how, str):
                    _count(word, plain, first, how)
                else:
                    _tell(word, plain, block, first, *how)


@ranks.on(1)
def test_an_order_counts_within_its_scope():
    said = recorded_errors()
    kernel, plain = told_by_words(), torch.zeros(128)
    for number, (how, wrong) in enumerate(WORDS.items()):
        for seed in range(3):
            said.clear()
            word = torch.zeros(2, dtype=torch.int64).view(torch.uint64)
            with simulator.schedule(seed, races=True):
                kernel(number, plain, word)
            assert bool(said) == bool(wrong), (how, seed, said)
            assert all('an acquire of scope "gpu"' in s for s in said), said


@jitted
def of_many_warps(plain: f32(64), warps: T.int32):
    """Kernel `(plain, warps)`."""
    with T.Kernel(warps, threads=1) as block:
        if block < 2:
            plain[0] = T.cast(block, "float32")


def test_launches_beyond_the_limits_are_reported(caplog):
    with simulator.schedule(0, races=True), caplog.at_level("WARNING", "tilescale_net"):
        for _ in range(2):
            of_many_warps()(torch.zeros(64), 1 << 16)
    assert [
        r.message for r in caplog.records if "not checked for races as a whole: a launch of 65,536 warps" in r.message
    ] != []
    assert len(caplog.records) == 1  # once
    with simulator.schedule(0, races=True), pytest.raises(DataRace, match=r"test_races_of_a_rank\.py:\d+\) by block"):
        of_many_warps()(torch.zeros(64), 2)
    hosts = ["a"] * 65
    assert "2 hosts" in simulator._race_limit(["a", "b"], 1 << 20) and "at most 64" in simulator._race_limit(
        hosts, 1 << 20
    )
    assert "64 GiB" in simulator._race_limit(["a"], 1 << 36) and not simulator._race_limit(hosts[:64], 1 << 20)


@jitted
def told_by_peer(ctx: N.Context(), right: T.int32, x: f32(64), y: f32(64), word: u64(2), out: f32(64)):
    """Kernel `(right, x, y, word, out)`: a put, and a word of the peer that announces it without an order."""
    with T.Kernel(1, threads=64):
        tx, pe = T.get_thread_binding(), 1 - N.my_pe()
        N.put_block(y, x, pe)
        if right != 0:
            N.quiet_block(pe)
        if tx == 0:
            N.atomic_add(word[0], T.uint64(1), pe)
            while N.ld(word[0], sem="relaxed", scope="sys") == T.uint64(0):
                T.evaluate(0)
            if right != 0:
                T.evaluate(T.call_extern("void", "__threadfence_system"))
        T.sync_threads()
        out[tx] = y[tx]


@ranks.on(**RACES)
def test_a_relaxed_word_of_a_peer_orders_nothing():
    reports, x, y, out = recorded_errors(), tsn.zeros((64,)), tsn.zeros((64,)), torch.zeros(64)
    for seed, right in itertools.product(range(3), (0, 1)):
        word = tsn.zeros((2,), torch.uint64)
        tsn.barrier()
        reports.clear()
        with simulator.schedule(seed, races=True):
            told_by_peer()(right, x, y, word, out)
        tsn.barrier()
        assert not reports if right else "a load of y (test_races_of_a_rank.py:" in reports[0], (seed, reports)


def _run(case, right, seed):
    """Reports of one launch on this rank, and of the host after it."""
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
    (BLOCKS, "memory of this rank", "two blocks"),
    (ATOMIC, "an atomic operation", "T.sync_threads() is missing"),
    (LAST_READ, "a store to shared (shared memory)", "a load of shared"),
    (SAME, "a store to shared (shared memory)", "one thread is to store (if tx == 0), or N.benign_race"),
    (VIEW, "remote view", "N.fence"),
    (LANES, "remote view", "T.sync_warp()"),
    (PUT, "torch's zero_ on the host", "N.quiet"),
    (HINT, "N.put_signal_block", "wait"),
]


@variants(3, "case, report, advice", CASES)
def test_found_in_any_schedule(case, report, advice):
    said = [o.error[1] if o.error else o.value[1] for o in ranks.launch(2, _run, case, 0, case, env=RACES)]
    assert any(report in s and advice in s for s in said), said


def _elsewhere(function, *args):
    """In a thread of its own."""
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def test_the_host_is_followed_in_any_thread():
    said = [o.error[1] if o.error else o.value[1] for o in ranks.launch(2, _elsewhere, _run, PUT, 0, PUT, env=RACES)]
    assert any("torch's zero_ on the host" in s for s in said), said


# What the host does with the source and the target of a put that nothing has waited for, and with which of them.
HOSTS = {
    "numpy": lambda x, y: y.numpy(),
    "tolist": lambda x, y: y.tolist(),
    "allreduce_": lambda x, y: torch.distributed.all_reduce(x),
    "_allgather_base_": lambda x, y: torch.distributed.all_gather_into_tensor(y, torch.ones(32)),
    "fill_": lambda x, y: _elsewhere(x.fill_, 3.0),
    "tilescale_net.free": lambda x, y: tsn.free(x),
}
RIGHT_HOSTS = [
    lambda x, y: (x.numpy().sum(), x.tolist()),  # reading a source is fine
    lambda x, y: torch.distributed.all_gather_into_tensor(torch.ones(128), x),
    lambda x, y: (tsn.barrier(), y.numpy(), tsn.free(y)),
]


@ranks.on(**RACES)
def test_accesses_of_the_host_without_operators():
    """Its arrays and lists, torch.distributed, threads that never call the package, and `free`."""
    reports = recorded_errors()
    simulator.on_race = lambda base, error: reports.append(str(error))
    plain, word = torch.zeros(128), torch.zeros(2, dtype=torch.int64).view(torch.uint64)
    for name, act in [*HOSTS.items(), *(("", act) for act in RIGHT_HOSTS)]:
        flag, x, y = tsn.zeros((2,), torch.uint64), tsn.zeros((64,)), tsn.zeros((64,))
        tsn.barrier()
        reports.clear()
        with simulator.schedule(0):
            one_of_many()(PUT, 0, plain, word, flag, x, y)
        act(x, y)
        tsn.barrier()
        everyone = all_reports(reports)
        if not name:
            assert not everyone
            continue
        # The rank that comes second finds it: the host, or a kernel that puts data that a host has touched.
        # With the line of the host's program, but where a thread of the library's runs C++ alone.
        place = "" if name == "fill_" else f" (test_races_of_a_rank.py:{act.__code__.co_firstlineno})"
        report = re.compile(rf"({name}( on the host)?|the host of rank \d){re.escape(place)} (reads|writes)")
        assert any(report.search(text) for text in everyone), (name, everyone)
        assert all("N.put_signal_block" in text for text in everyone), (name, everyone)
    tsn.finalize()
    assert torch.Tensor.numpy is torch._C.TensorBase.numpy and threading.getprofile() is None


class _Counts(TorchDispatchMode):
    """A mode of the user's own."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@ranks.on(**RACES)
def test_modes_of_the_user_are_left_alone():
    """Modes of torch's dispatcher, which the check uses itself: init and finalize may run in any mode and thread."""
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


@ranks.on(**RACES)
def test_right_forms_are_not_accused():
    for case in [*(c[0] for c in CASES), HALVES]:
        for seed in range(3):
            where, said = _run(case, 1, seed)
            assert not said, (case, where, said)
            tsn.barrier()


@jitted
def overtaken(ctx: N.Context(), flag: u64(2)):
    """Kernel `(flag)`: a wait for the async proxy, for at least a value that the word may have passed already."""
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 0:
            N.signal(flag[0], 1, 1 - N.my_pe())
            N.signal(flag[0], 2, 1 - N.my_pe())
            N.wait(flag[0], "ge", 1, proxy="async")


@ranks.on(**RACES)
def test_a_wait_for_the_async_proxy_may_be_overtaken():
    flag = tsn.zeros((2,), torch.uint64)
    with simulator.schedule(0, races=True):
        overtaken()(flag)
