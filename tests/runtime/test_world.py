"""init, heap, teams, barrier, and what happens when ranks disagree or die."""

import ctypes
import os
import subprocess
import sys
import time
import types

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tilescale_net.compiler import toolchain
from tilescale_net.runtime import cuda_memory, settings, worlds


@ranks.on(3)
def test_heap_is_symmetric_and_reusable():
    a = tsn.zeros((5, 7), torch.float32)
    b = tsn.empty(3, torch.bfloat16)
    w = tsn.world()
    assert tuple(a.shape) == (5, 7) and a.dtype == torch.float32 and bool((a == 0).all())
    if w.device_kind == "simulator":
        assert bool(torch.isnan(b).all()), "fresh memory must be poisoned"
    offsets = (w.heap.offset_of(a), w.heap.offset_of(b))
    tsn.free(a)
    c = tsn.zeros(2, torch.int64)
    assert w.heap.offset_of(c) == offsets[0], "freed memory is used again"
    tsn.barrier()
    assert w.control.gather("offsets", list(offsets)) == [list(offsets)] * 3
    assert list(tsn.team()) == list(tsn.team("node")) == [0, 1, 2] and all(w.peer_base)


@pytest.mark.parametrize("case, words", [("twice", "freed already"), ("view", "is a view"), ("foreign", "not in the")])
@ranks.fails("HeapError")
def test_wrong_free(case, words):
    a = tsn.empty(16, torch.float32)
    if case == "twice":
        tsn.free(a)
        assert tsn.empty(16, torch.float32).data_ptr() == a.data_ptr()
        tsn.free(a)
    elif case == "view":
        tsn.free(a[4:])
    else:
        tsn.free(torch.zeros(4, device=tsn.device()))


@ranks.on()
def test_different_calls_are_named():
    world = tsn.world()
    mine, other = 8 + world.rank, 9 - world.rank
    with pytest.raises(tsn.RankMismatch, match=rf"empty\(\[{mine}\].* while .*empty\(\[{other}\]"):
        tsn.empty(mine)
    control = world.control
    calls = tsn.barrier, lambda: control.gather("a gather", "x" * 900), lambda: control.exchange("an exchange", [1, 2])
    names = "barrier", "a gather", "an exchange"
    for pair in ((0, 1), (1, 2), (2, 0)):
        mine, other = pair if tsn.rank() == 0 else pair[::-1]
        with pytest.raises(tsn.RankMismatch, match=f"{names[mine]}.* while .*{names[other]}"):
            calls[mine]()
        tsn.barrier()


def _aborted(says_why: bool):
    """The device side was stopped: nothing may look as if it had worked."""
    world = tsn.world()
    ctypes.c_uint32.from_address(world.page.address).value = 1
    if says_why:
        world.proxy = types.SimpleNamespace(failure=lambda: tsn.FabricError("the network broke"), close=lambda: None)
    tsn.synchronize()


@pytest.mark.parametrize(
    "env, mode",
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, None),
        ({"WORLD_SIZE": "4"}, None),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "EAGER"),
        ({"WORLD_SIZE": "2", "VIRTUAL_NODES": "2"}, "EAGER"),
        ({"WORLD_SIZE": "2", "VIRTUAL_NODES": "2", "CUDA_MODULE_LOADING": "LAZY"}, "LAZY"),
    ],
)
def test_kernels_are_loaded_early_across_nodes(monkeypatch, env, mode):
    monkeypatch.setattr(os, "environ", dict(env))  # which the call changes
    settings.load_kernels_early()
    assert os.environ.get("CUDA_MODULE_LOADING") == mode


@pytest.mark.parametrize("says_why", [True, False])
def test_an_aborted_job_is_not_a_success(says_why):
    kind, text, trace = ranks.launch(1, _aborted, says_why)[0].error
    assert kind == ("FabricError" if says_why else "TileScaleError"), text
    assert ("the network broke" if says_why else "rank 0: the job was aborted") in text
    assert "in synchronize" in trace


@ranks.fails("PeerLost", "rank 1", rank=0, TSN_TIMEOUT="2")
def test_missing_rank_is_named_after_the_timeout():
    if tsn.rank() == 1:
        time.sleep(14)
    tsn.barrier()


@pytest.mark.parametrize(
    "env, words",
    [
        ({"VIRTUAL_NODES": "3"}, "does not divide"),
        ({"TSN_HEAP_SIZE": "lots"}, "TSN_HEAP_SIZE='lots'"),
        ({"TSN_HEAP_SIZE": "100T"}, "109951162777600 bytes"),
        ({"TSN_DEVICE": "abacus"}, "TSN_DEVICE='abacus'"),
        ({"TSN_TIMEOUT": "soon"}, "TSN_TIMEOUT='soon'"),
        ({"TSN_HEAPSIZE": "8M"}, "there is no setting TSN_HEAPSIZE; did you mean TSN_HEAP_SIZE?"),
        # Also where no network is used.
        ({"TSN_PROVIDER": "tpc"}, "TSN_PROVIDER='tpc': libfabric has no provider 'tpc'; did you mean tcp?"),
        ({"TSN_CHAOS": "banana=1"}, "TSN_CHAOS='banana=1': unknown field 'banana'"),
    ],
)
def test_bad_settings(env, words):
    for o in ranks.launch(2, tsn.init, env=env, init=False):
        assert o.error[0] == "ConfigurationError" and words in o.error[1], o.error


class _Driver:
    """Stands for the CUDA runtime."""

    def __init__(self):
        self.freed = []

    def cudaMalloc(self, size):
        return (0, 4096)

    def cudaFree(self, address):
        self.freed.append(address)


def test_device_memory_lives_as_long_as_references_to_it():
    driver = _Driver()
    heap = cuda_memory._Allocation(driver, 100)
    view = cuda_memory._Bytes(heap.address + 16, 8, heap)
    assert view.__cuda_array_interface__["data"] == (4112, False) and heap.held() == ""
    heap.left_behind = True
    del heap
    assert not driver.freed and "still hold 100 bytes" in cuda_memory._Allocation.held()
    del view
    assert driver.freed == [4096] and cuda_memory._Allocation.held() == ""


@ranks.on(init=False)
def test_torch_settings_of_users_change_nothing():
    """The user's default device, dtype and inference mode are the user's alone."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    with torch.inference_mode():
        tsn.init("8M")
        made = tsn.zeros((2, 3), torch.float32), tsn.empty(5, torch.int16), tsn.zeros(0)
        tsn.barrier()
        tsn.free(made[1])
    assert [t.device.type for t in made] == [tsn.device().type] * 3
    assert made[0].dtype == made[2].dtype == torch.float32
    made[0].add_(1)  # refused for tensors made in inference mode
    values = tsn.world().control.gather("test", [tsn.rank(), b"\0"])
    tsn.finalize()
    tsn.init("8M")
    tsn.finalize()
    assert torch.empty(1).device.type == "meta" and torch.empty(1).dtype == torch.bfloat16
    assert values == [[0, b"\0"], [1, b"\0"]] and made[0].tolist() == [[1.0] * 3] * 2


@ranks.on(init=False)
def test_tensors_outlive_the_heap():
    """Tensors outlive the heap; nothing else does."""
    tsn.init("8M")
    x, world = tsn.zeros(1000, torch.float32), tsn.world()
    x[:] = 7
    whole = world.heap.as_bytes()
    tsn.finalize()
    assert float(x.sum()) == 7000 and int(whole[-1]) >= 0
    x.fill_(1)
    for use in (
        world.barrier, world.check, world.synchronize, lambda: world.heap.allocate(4, torch.int32, zero=True),
        lambda: world.heap.free(x), tsn.barrier, tsn.stats, tsn.device, lambda: tsn.free(x), tsn.synchronize,
    ):  # fmt: skip
        with pytest.raises(tsn.TileScaleError, match="has ended|not initialised"):
            use()
    world.abort()
    tsn.finalize()
    tsn.init("8M")
    y = tsn.zeros(1000, torch.float32)
    with pytest.raises(tsn.HeapError, match="not in the symmetric heap"):
        tsn.free(x)
    assert float(x.sum()) == 1000 and float(y.sum()) == 0
    z = tsn.zeros(4, torch.int32)
    tsn.free(z)
    tsn.barrier()
    if tsn.world().device_kind == "simulator":
        assert z.tolist() == [-1] * 4, "freed memory is poisoned"
    nothing = tsn.empty((0, 3), torch.int32)
    free = tsn.world().heap._allocator.largest_hole
    tsn.free(nothing)
    tsn.free(y[:0])
    assert nothing.shape == (0, 3) and tsn.world().heap._allocator.largest_hole == free
    tsn.finalize()


@ranks.on()
def test_wrong_arguments():
    for args, kind, words in (
        ((4, "float32"), TypeError, "dtype='float32' is not a torch dtype"),
        ((4, torch.qint8), TypeError, "dtype is torch.qint8; a quantized tensor is more than its memory"),
        ((4, 5), TypeError, r"zeros\(\(4, 5\)\)"),
        (("four",), TypeError, "not 'four'"),
        (((2.5, 2),), TypeError, "whole number"),
        ((None,), TypeError, "not None"),
        (((0, 1 << 70),), tsn.HeapError, "more elements than any heap"),
        ((1 << 60,), tsn.HeapError, "needs 4611686018427387904 bytes.* more than any memory holds"),
        ((-1,), TypeError, "negative size"),
    ):
        with pytest.raises(kind, match=words):
            tsn.zeros(*args)
    assert tsn.zeros(torch.Size([2])).shape == (2,) and tsn.zeros([torch.tensor(3)]).shape == (3,)
    long = "x" * 5000
    with pytest.raises(tsn.RankMismatch, match="differ further on"):
        tsn.world().control.agree("call", long + str(tsn.rank()))
    with pytest.raises(tsn.RankMismatch, match="nonsense"):
        with_garbage = tsn.world().control
        tsn.runtime.job_store.encode, kept = lambda _: b"\xff{", tsn.runtime.job_store.encode
        try:
            with_garbage.gather("call", 1)
        finally:
            tsn.runtime.job_store.encode = kept
    tsn.barrier()


@ranks.fails("RankMismatch", "tilescale_net 0.0, device code abc", tsn.__version__, init=False)
def test_ranks_of_different_versions_do_not_meet():
    if os.environ["RANK"] == "1":
        tsn.__version__ = "0.0"
        toolchain.sources_hash = lambda: "abc"
    tsn.init("8M")


@ranks.on(1)
def test_kernels_are_notified_before_their_memory_is_freed():
    world = tsn.world()
    seen, release = [], world._release

    def look_and_release():
        seen.append(world.page.aborted)
        release()

    world._release = look_and_release
    world.give_up("a test")
    worlds._take_all()
    # The watchdog's thread waits for the store at times, and may come back when the pages are unmapped.
    world._on_loss()
    world.abort()
    assert world._device_error() is None and seen == [True]


def test_single_rank_needs_no_launcher(tmp_path):
    code = "import tilescale_net as tsn; tsn.init(); x = tsn.zeros(4); tsn.barrier(); print(tsn.size(), x.sum().item())"
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0 and done.stdout.split() == ["1", "0.0"], done.stderr
