"""Kernels of the package for GPUs are found again without being traced, by other users too; kernels are compiled together."""

import _thread
import contextlib
import os
import threading
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.registry import FP8, MOE, TUNING
from tests.variants import nightly
from tilescale_net.compiler import gpu_cache, jit
from tilescale_net.compiler.jit import KernelFactory, compile_together
from tilescale_net.compiler.simulator import cache
from tilescale_net.kernels import p2p
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.kernels.moe.buffers import variants_of

SM_90A = {"kind": "cuda", "arch": "sm_90a"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder that holds one kernel, and the kernel as it was compiled."""
    with pytest.MonkeyPatch.context() as patch, gpu_cache.writing_to(folder := tmp_path_factory.mktemp("kernels")):
        patch.setitem(p2p.push._options, "target", SM_90A)
        p2p.push._kernels.clear()
        made = p2p.push(64, threads=32)
    yield folder, made
    p2p.push._kernels.clear()


@pytest.fixture
def traced(monkeypatch, compiled):
    """A new process that compiles for a GPU and has its own cache; the names of the kernels that it traces."""
    folder, _ = compiled
    names, trace = [], KernelFactory.trace

    def counted(factory, *args, **kwargs):
        names.append(factory.__name__)
        return trace(factory, *args, **kwargs)

    monkeypatch.setattr(KernelFactory, "trace", counted)
    monkeypatch.setitem(p2p.push._options, "target", SM_90A)
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(folder))
    monkeypatch.setattr(gpu_cache, "folder", lambda: folder / "tilescale_net-own")
    monkeypatch.setenv("TSN_KERNELS", str(folder))
    p2p.push._kernels.clear()
    return names


def test_a_shipped_kernel_is_the_one_that_was_compiled(compiled, traced, monkeypatch):
    folder, made = compiled
    found = p2p.push(64, threads=32)
    assert not traced and found is not made
    assert found.cached == made.cached and found.source == made.source and found.integers == made.integers
    assert found.parameters == made.parameters == ("dst", "src", "count", "pe", "loops")
    assert found._function() is not None, "its library is loaded"
    with pytest.raises(tsn.KernelError, match="argument dst: expected uint8"):
        found._explain((torch.empty(64, dtype=torch.uint8), None, 1, 0, 1), RuntimeError())
    assert traced == ["push"], "errors are found by tracing the kernel"
    assert folder.stat().st_mode & 0o777 == 0o755
    assert [(p.suffix, p.stat().st_mode & 0o777) for p in folder.iterdir()] == [(".so", 0o644)], "nothing else"


@pytest.mark.parametrize("fault", ["folder", "file", "damaged"])
def test_damaged_files_and_files_that_others_may_write_are_not_loaded(compiled, traced, monkeypatch, caplog, fault):
    folder, _ = compiled
    (path,) = folder.glob("*.so")
    whole = path.read_bytes()
    monkeypatch.setattr(gpu_cache, "_warn", gpu_cache._warn.__wrapped__)
    monkeypatch.setattr(gpu_cache, "get_or_compile", _only_shipped)
    try:
        if fault == "damaged":
            path.unlink()  # it is loaded, so that it may not be changed in place
            path.write_bytes(whole[:-100])
        else:
            (folder if fault == "folder" else path).chmod(0o777)
        with pytest.raises(LookupError):
            p2p.push(64, threads=32)
    finally:
        folder.chmod(0o755)
        path.unlink()
        path.write_bytes(whole)
        path.chmod(0o644)
    assert "TSN_KERNELS" in caplog.text and str(folder) in caplog.text
    assert p2p.push(64, threads=32).name == "push"


def _only_shipped(name, key, *_):
    found = gpu_cache._shipped(f"{name}-{key}.so")
    if found is None:
        raise LookupError
    return found


def test_other_arguments_targets_and_sources_have_other_keys(monkeypatch):
    def key(*args, target=SM_90A, **kwargs):
        return cache.kernel_key(p2p.push._function, args, kwargs, p2p.push._options | {"target": target}, anywhere=True)

    first = key(64, threads=32)
    others = [key(64, threads=64), key(65, threads=32), key(64, threads=32, target={"kind": "cuda", "arch": "sm_100a"})]
    monkeypatch.setattr(cache, "contents_hash", lambda: "another")
    others.append(key(64, threads=32))
    assert len({first, *others}) == 5 and None not in others


def test_a_package_elsewhere_has_the_same_contents(monkeypatch, tmp_path):
    hashes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.py").write_text("x = 1")
        monkeypatch.setattr(cache, "_folders", lambda name=name: (tmp_path / name,))
        hashes.append((cache.contents_hash.__wrapped__(), cache.package_hash.__wrapped__()))
    assert hashes[0][0] == hashes[1][0] and hashes[0][1] != hashes[1][1]


def _kernels_of(variants) -> list[str]:
    with jit.recording() as calls:
        for variant in variants:
            with contextlib.suppress(jit.Recorded):
                variant()
    return sorted(f"{factory.__name__} {args} {kwargs}" for factory, args, kwargs in calls)


def _as_listed(nodes: int) -> None:
    tuning = Tuning(**TUNING)
    latency = dict(mode="latency")
    for options, most in ((latency, 5), (latency | dict(dtype=FP8, hidden=128), 7), ({}, 7), (dict(layout="rank"), 6)):
        op = AllToAll(**MOE | options, tuning=tuning)
        op._mode._launches.clear()
        mine = _kernels_of(op._mode.variants(True))
        assert 0 < len(mine) <= most, mine  # each takes seconds where no cache has it
        assert mine == _kernels_of(variants_of(op.config, tuning, op.all_blocks, nodes)), options
        op.free()


@pytest.mark.parametrize("nodes", [1, nightly(2)])
def test_the_kernels_of_an_object_are_known_without_it(nodes):
    """`precompile` compiles the kernels that the object asks for."""
    ranks.run(2 * nodes, _as_listed, nodes, env={"TSN_DEVICE": "simulator", "VIRTUAL_NODES": str(nodes)})


def test_a_trace_and_a_cache_that_is_off_cache_nothing(monkeypatch, tmp_path):
    assert gpu_cache.is_enabled()
    monkeypatch.setenv("TSN_TRACE", str(tmp_path / "trace"))
    assert not gpu_cache.is_enabled()
    monkeypatch.delenv("TSN_TRACE")
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    assert not gpu_cache.is_enabled()


def test_folders_above_and_files_of_long_ago_are_left_alone(tmp_path, monkeypatch):
    """A cache, or what `precompile` writes, may lie in a checkout of this package, and is not emptied by age."""
    checkout, made = tmp_path / "tilescale_net", []
    place = checkout / "cache" / "tilescale_net"
    checkout.mkdir(mode=0o755)
    for name in ("old", "new"):
        path = cache.get_or_build(name, "1", ".so", lambda work: _written(work, made), place, "lock-1")
        os.utime(path, (0, 0))
    assert checkout.stat().st_mode & 0o777 == 0o755 and place.stat().st_mode & 0o777 == 0o700
    assert {p.name for p in place.glob("*.so")} == {"old-1.so", "new-1.so"} and len(made) == 2


def _written(work, made):
    made.append(work)
    (work / "kernel.so").write_bytes(b"library")
    return work / "kernel.so"


def test_a_folder_of_another_user_is_not_written(tmp_path, monkeypatch):
    def refused(folder, said):
        with pytest.raises(tsn.ConfigurationError, match=said), gpu_cache.writing_to(folder):
            pass

    monkeypatch.setattr(gpu_cache.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    for mode in (0o777, 0o755):  # the latter of root's can be read, but not written
        tmp_path.chmod(mode)
        refused(tmp_path, f"{tmp_path} belongs to another user")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "kernels cannot be written")


# -- compiled together ------------------------------------------------------------------------------------------------


def _processors(monkeypatch, count):
    monkeypatch.setattr(jit.os, "sched_getaffinity", lambda _: range(count))


def test_kernels_are_compiled_at_the_same_time(monkeypatch):
    _processors(monkeypatch, 3)
    meeting = threading.Barrier(3, timeout=20)
    compile_together([meeting.wait] * 3)
    with torch.inference_mode():
        found = []
        compile_together([lambda: found.append(torch.is_inference_mode_enabled())] * 3)
    assert found == [False] * 3


@pytest.mark.parametrize("processors, ranks", [(1, 1), (4, 4), (7, 4)])
def test_ranks_share_processors_and_begin_elsewhere(monkeypatch, processors, ranks):
    _processors(monkeypatch, processors)
    made = []
    compile_together([lambda i=i: made.append((i, threading.get_ident())) for i in range(8)], None, 1, ranks)
    first = 8 // ranks % 8
    assert made == [(i % 8, threading.get_ident()) for i in range(first, first + 8)]


def test_an_interrupt_begins_no_further_kernel(monkeypatch):
    _processors(monkeypatch, 2)
    begun = []

    def call():
        begun.append(len(begun))
        if begun[-1] == 1:
            _thread.interrupt_main()
        time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        compile_together([call] * 100)
    assert len(begun) < 50


def test_the_first_error_of_the_list_is_raised_when_all_have_ended(monkeypatch):
    _processors(monkeypatch, 8)
    ended = []

    def fail(i):
        time.sleep(0.02 * (4 - i))
        ended.append(i)
        raise ValueError(f"kernel {i}")

    with pytest.raises(ValueError, match="kernel 0"):
        compile_together([lambda i=i: fail(i) for i in range(4)], None, 1, 2)
    assert sorted(ended) == [0, 1, 2, 3]
