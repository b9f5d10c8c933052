"""The simulator's cache: its folder, libraries and their age; lowered kernels; whole kernels of the package, which are not traced
again. Everything is made again whenever anything that it depends on changes.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import types

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
from tests import ranks
from tests.compiler import kernels as elsewhere
from tests.simulator import kernels
from tests.simulator.kernels import simulate
from tilescale_net.compiler import jit, toolchain
from tilescale_net.compiler.jit import KernelFactory
from tilescale_net.compiler.simulator import cache, host_compiler, host_source
from tilescale_net.compiler.simulator.cache import CachedKernel, Lowered
from tilescale_net.errors import KernelError
from tilescale_net.kernels import p2p
from tilescale_net.runtime import private_folder


def test_cache_must_be_writable(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(tsn.ConfigurationError, match="XDG_CACHE_HOME"):
        host_compiler.build("kernel", "int x;")


def test_compiled_kernels_are_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = simulate(kernels.prefix_sum, 64).host_source
    first = host_compiler.build("kernel", text)
    made = first.stat().st_ino
    assert host_compiler.build("kernel", text) == first and first.stat().st_ino == made
    assert host_compiler.build("kernel", text + "\n// changed") != first
    monkeypatch.setenv("TSN_SIM_CXXFLAGS", "-DX")
    assert host_compiler.build("kernel", text) != first
    cached = [p for p in first.parent.iterdir() if p.name.startswith("kernel-")]
    assert len(cached) == 3 and {p.suffix for p in cached} == {".so"}, cached


def test_kernels_that_nobody_uses_are_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache.folder()
    folder.mkdir(parents=True)

    def make(name, days, size=10):
        path = folder / name
        path.write_bytes(b"x" * size)
        os.utime(path, (time.time() - days * 86400,) * 2)
        return path

    old, recent, other = make("a-1.so", 31), make("b-2.lowered", 29), make("notes.txt", 400)
    abandoned, working = folder / "tmpold", folder / "tmpnew"
    for path, days in ((abandoned, 0.05), (working, 0)):
        path.mkdir()
        (path / "kernel.cpp").write_text("")
        os.utime(path, (time.time() - days * 86400,) * 2)
    first = host_compiler.build("kernel", "int x;")
    assert not old.exists() and not abandoned.exists()
    assert recent.exists() and other.exists() and working.exists() and first.exists()
    # Use makes an entry young; entries beyond the limit go, the longest unused first.
    os.utime(first, (time.time() - 20 * 86400,) * 2)
    assert host_compiler.build("kernel", "int x;") == first
    monkeypatch.setattr(cache, "MAX_BYTES", 2 * first.stat().st_size + 5)
    second = host_compiler.build("kernel", "int y;")
    assert first.exists() and second.exists() and not recent.exists() and other.exists()


def test_the_folder_and_its_files_are_this_users_alone(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = host_compiler.build("kernel", "int x;")
    assert first.parent.stat().st_mode & 0o777 == 0o700
    # What others may write is made again, not run.
    first.parent.chmod(0o777)
    first.write_bytes(b"planted")
    first.chmod(0o666)
    assert host_compiler.build("kernel", "int x;") == first and first.read_bytes() != b"planted"
    assert first.parent.stat().st_mode & 0o777 == 0o700
    # A folder of another user is not used at all.
    mine = os.getuid()
    monkeypatch.setattr(private_folder.os, "getuid", lambda: mine + 1)
    instead = private_folder.temporary(first.parent)
    (said,) = caplog.records
    assert said.name == "tilescale_net" and "belongs to another user" in said.getMessage()
    private_folder.temporary.cache_clear()
    monkeypatch.setattr(cache.private_folder, "temporary", lambda _: instead)
    assert not private_folder.make(first.parent)
    monkeypatch.setattr(cache, "is_usable", lambda path: path.exists())
    assert host_compiler.build("kernel", "int x;").parent == instead and instead.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("base", ["tilescale_net", "tilescale_net-0"])
def test_a_folder_below_one_of_another_user_is_not_used(monkeypatch, tmp_path, base):
    """Its owner could put another folder in its place between the look at its owner and the load."""
    folder = tmp_path / base / "simulator"
    assert private_folder.make(folder) and (tmp_path / base).stat().st_mode & 0o777 == 0o700
    (tmp_path / base).chmod(0o777)
    assert private_folder.make(folder) and (tmp_path / base).stat().st_mode & 0o777 == 0o700
    if os.getuid() == 0:
        os.chown(tmp_path / base, 65534, 65534)
    else:  # the reverse: the folder's contents belong to the caller, and the folder above does not
        real = os.lstat

        def lstat(path, **how):
            status = list(real(path, **how))
            status[4] += str(path) == str(tmp_path / base)
            return os.stat_result(status)

        monkeypatch.setattr(private_folder.os, "lstat", lstat)
    assert not private_folder.make(folder)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / base).symlink_to(folder.parent)
    assert not private_folder.make(tmp_path / "link" / base / "simulator")


def test_no_home_is_not_the_working_directory(monkeypatch):
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(_):
        raise KeyError

    monkeypatch.setattr(private_folder.pwd, "getpwuid", nobody)
    assert cache.folder().is_absolute() and str(os.getuid()) in str(cache.folder())
    monkeypatch.setenv("HOME", "~")
    assert cache.folder().is_absolute()


def test_a_damaged_library_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = simulate(kernels.prefix_sum, 96)
    (path,) = cache.folder().glob("*.so")
    whole = path.read_bytes()
    zeros = whole[:64] + b"\0" * (len(whole) - 64)  # as after a power cut
    for damaged in (b"", whole[:10], whole[:3000], whole[:-100], zeros):
        path.unlink()  # it is loaded, so that it may not be changed in place
        path.write_bytes(damaged)
        assert host_compiler.load(kernel.name, kernel.host_source) is not None
        (made,) = cache.folder().glob("*.so")
        assert made.stat().st_size == len(whole)


def test_a_full_disk_is_reported_with_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(tsn.ConfigurationError, match=f"{tmp_path}.*No space left on device.*XDG_CACHE_HOME"):
        cache.get_or_build("kernel", "abc", ".so", full)
    said = subprocess.CompletedProcess([], 1, "", "fatal error: error writing to x.s: No space left on device")
    host_compiler.compiler_identity()  # is asked once, and not the compiler that follows
    monkeypatch.setattr(host_compiler.subprocess, "run", lambda *_, **__: said)
    with pytest.raises(tsn.ConfigurationError, match="No space left on device"):
        host_compiler.build("kernel", "int z;")
    assert not list(cache.folder().glob("tmp*"))


@pytest.mark.timeout(30)
def test_a_kernel_in_the_making_keeps_few_others_waiting(monkeypatch, tmp_path):
    """Where many processes compiled at once, a rank waited for the lock of a first digit longer than its peers for the rank."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def library(work):
        (work / "kernel.so").write_bytes(b"library")
        return work / "kernel.so"

    def of_another(work):  # while the other's lock is held
        assert cache.get_or_build("kernel", "abd", ".so", library).exists()
        return library(work)

    assert cache.get_or_build("kernel", "acd", ".so", of_another).exists()


def test_headers_are_read_once(monkeypatch, tmp_path):
    """Kernels start from headers precompiled by the first of them; without those they compile all the same."""
    if "Free Software Foundation" not in host_compiler.compiler_identity():
        pytest.skip("lacks g++ (g++)")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = host_source.PRELUDE + "int x;"
    folder = host_compiler.build("kernel", text).parent
    (made,) = folder.glob("prelude-*.gch")
    written = made.stat().st_ino
    host_compiler.build("kernel", text + "int y;")
    assert [p.stat().st_ino for p in folder.glob("prelude-*.gch")] == [written]
    made.write_bytes(b"cut short")
    assert host_compiler.build("kernel", text + "int z;").exists()


@pytest.mark.parametrize("text", ["[", "[" * 100_000, "5", "[]", "{}", '{"names": [], "lines": [], "lowered": []}'])
def test_text_that_is_no_kernel(text):
    with pytest.raises((ValueError, KeyError, TypeError)):
        CachedKernel.parse(text)
    with pytest.raises((ValueError, KeyError, TypeError)):
        Lowered.parse(json.dumps({"unit": {"text": "", "kernels": [], "dynamic_shared": []}}) if text == "{}" else text)


# -- lowered kernels --------------------------------------------------------------------------------------------------


@pytest.fixture
def lowerings(monkeypatch, tmp_path):
    """An empty cache; the names of the kernels that tilelang lowers."""
    compiled = cache.folder().glob("prelude-*.gch")  # of the headers, which takes a second
    headers = max(compiled, key=lambda p: p.stat().st_mtime, default=None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert private_folder.make(cache.folder())
    for path in (headers, headers.with_suffix("")) if headers else ():
        shutil.copy(path, cache.folder())
    names, lower = [], jit.lower

    def counted(func, *how):
        names.append(str(func.attrs["global_symbol"]))
        return lower(func, *how)

    monkeypatch.setattr(jit, "lower", counted)
    return names


def scale(n, factor, name="scale", guard=False):
    @T.prim_func
    def main(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                y[i] = x[i] * factor

    return jit.compile(main, target="simulator", name=name, pass_configs={"tl.disable_safe_memory_legalize": guard})


def works(kernel, n, factor):
    x = torch.arange(n, dtype=torch.float32)
    y = torch.zeros(n)
    kernel(x, y)
    return torch.equal(y, x * factor)


def lowered():
    return sorted(p for p in cache.folder().iterdir() if p.suffix == ".lowered")


def test_lowered_once(lowerings):
    first, second = scale(40, 2.0), scale(40, 2.0)
    assert lowerings == ["scale"] and len(lowered()) == 1
    assert first.source == second.source
    assert works(first, 40, 2.0) and works(second, 40, 2.0)
    with pytest.raises(tsn.KernelError):  # the checks of arguments are cached too
        second(torch.zeros(41), torch.zeros(41))


@pytest.mark.parametrize("other", [dict(n=41), dict(factor=3.0), dict(name="other"), dict(guard=True)])
def test_different_kernels_are_lowered(lowerings, other):
    scale(40, 2.0)
    made = dict(n=40, factor=2.0) | other
    assert works(scale(**made), made["n"], made["factor"])
    assert len(lowerings) == len(lowered()) == 2


def test_other_headers_or_rules_lower_again(lowerings, monkeypatch):
    scale(40, 2.0)
    monkeypatch.setattr(toolchain, "sources_hash", lambda: "another")
    scale(40, 2.0)
    assert len(lowerings) == 2


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"kernel_source": "", "unit": {"text": ""}, "host_function": "", "n_arguments": 2}',
        "gone",
        "unreadable",
    ],
)
def test_damaged_files_are_made_again(lowerings, damage):
    scale(40, 2.0)
    (path,) = lowered()
    if damage == "gone":  # between the look and the read
        path.unlink()
        os.symlink("/nowhere", path)
    elif damage == "unreadable":
        path.write_bytes(b"\xff\xfe\x00")
    else:
        path.write_text(damage)
    for _ in range(2):
        assert works(scale(40, 2.0), 40, 2.0) and len(lowerings) == 2


def test_a_kernel_that_cannot_be_lowered_is_not_cached(lowerings, monkeypatch):
    def fails(*_):
        raise KernelError("cannot be lowered")

    monkeypatch.setattr(jit, "lower", fails)
    for _ in range(2):
        with pytest.raises(KernelError, match="cannot be lowered"):
            scale(40, 2.0)
    assert lowered() == [] and not list(cache.folder().glob("tmp*"))


# -- whole kernels ----------------------------------------------------------------------------------------------------


class Traces:
    """Which factories have been traced in this process."""

    def __init__(self):
        self.names = []
        trace = KernelFactory.trace

        def counted(factory, *args, **kwargs):
            self.names.append(factory.__name__)
            return trace(factory, *args, **kwargs)

        KernelFactory.trace = counted

    def of(self, factory, *args, **kwargs):
        """The kernel as a new process gets it, and how many traces that took."""
        factory._kernels.clear()
        before = len(self.names)
        return factory(*args, **kwargs), len(self.names) - before


def _works(kernel, count):
    x, y = tsn.empty(64, torch.uint8), tsn.zeros(64, torch.uint8)
    x.copy_(torch.arange(64))
    kernel(y, x, count, 0, 1)
    tsn.synchronize()
    return torch.equal(y[:count], x[:count]) and not y[count:].any()


def _whole():
    return [p for p in cache.folder().iterdir() if p.suffix == ".kernel"]


def _traced_once(traces):
    for expected in (1, 0, 0):
        kernel, made = traces.of(p2p.push, 64, threads=32)
        assert made == expected and _works(kernel, 40) and kernel.parameters[0] == "dst"
    with pytest.raises(tsn.KernelError, match="argument src: expected uint8"):
        kernel(tsn.empty(64, torch.uint8), tsn.empty(64, torch.int8), 1, 0, 1)
    assert len(_whole()) == 1


def _other(traces, monkeypatch):
    for kwargs in (dict(threads=64), dict(threads=32, unroll=2), dict(threads=32, blocks=2)):
        kernel, made = traces.of(p2p.push, 64, **kwargs)
        assert made == 1 and _works(kernel, 64), kwargs
    assert traces.of(p2p.pull, 64, threads=32)[1] == 1
    assert len(_whole()) == 5


def _changed_sources(traces, monkeypatch):
    """Other sources, or other modules instead of the package's own."""
    before = len(_whole())
    with monkeypatch.context() as m:
        m.setattr(cache, "package_hash", lambda: "another")
        assert traces.of(p2p.push, 64, threads=32)[1] == 1 and len(_whole()) == before + 1
    with monkeypatch.context() as m:
        m.setattr(cache, "_IMPORTED", 0.0)
        assert [traces.of(p2p.push, 64, threads=32)[1] for _ in range(2)] == [1, 1], "files younger than the process"
    with monkeypatch.context() as m:
        changed = types.ModuleType("tilescale_net.kernels.collective")
        changed.__file__ = "/tmp/partition.py"
        m.setitem(sys.modules, changed.__name__, changed)
        assert traces.of(p2p.push, 64, threads=32)[1] == 1
    mine = tsn.jit(elsewhere.pusher)
    assert [traces.of(mine, 64)[1] for _ in range(2)] == [1, 1], "a kernel of a user"
    assert len(_whole()) == before + 1


def _damaged(traces):
    traces.of(p2p.push, 64, threads=32)
    for damage in (b"", b"{}", b"\xff\xfe"):
        for path in _whole():
            path.write_bytes(damage)
            cache.seal(path)
        kernel, made = traces.of(p2p.push, 64, threads=32)
        assert made == 1 and _works(kernel, 7)
        assert traces.of(p2p.push, 64, threads=32)[1] == 0


def _all():
    traces, monkeypatch = Traces(), pytest.MonkeyPatch()
    _traced_once(traces)
    _other(traces, monkeypatch)
    _changed_sources(traces, monkeypatch)
    _damaged(traces)


def test_whole_kernels_are_traced_once(tmp_path):
    ranks.run(1, _all, env={"XDG_CACHE_HOME": str(tmp_path), "TSN_DEVICE": "simulator"}, timeout=180)


def test_ranks_make_a_kernel_once(tmp_path):
    """All ranks ask at the same time; one traces, the others wait for it."""
    env = {"XDG_CACHE_HOME": str(tmp_path), "TSN_DEVICE": "simulator"}
    made = ranks.run(3, _made, env=env, timeout=180)
    assert sum(made) == 1, made


def _made():
    tsn.barrier()
    return Traces().of(p2p.push, 64, threads=32)[1]
