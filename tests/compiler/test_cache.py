"""The folder of lowered and compiled kernels: what is kept in it, and for how long."""

import errno
import json
import os
import subprocess
import time

import pytest

import tilescale_net as tsn
from tests.simulator import kernels
from tests.simulator.kernels import simulate
from tilescale_net.compiler.simulator import cache, host_compiler, host_source
from tilescale_net.compiler.simulator.cache import CachedKernel, Lowered
from tilescale_net.runtime import private_folder


def test_cache_must_be_writable(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(tsn.ConfigurationError, match="XDG_CACHE_HOME"):
        host_compiler.build("kernel", "int x;")


def test_compiled_kernels_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = simulate(kernels.prefix_sum, 64).host_source
    first = host_compiler.build("kernel", text)
    made = first.stat().st_ino
    assert host_compiler.build("kernel", text) == first and first.stat().st_ino == made
    assert host_compiler.build("kernel", text + "\n// changed") != first
    monkeypatch.setenv("TSN_SIM_CXXFLAGS", "-DX")
    assert host_compiler.build("kernel", text) != first
    kept = [p for p in first.parent.iterdir() if p.name.startswith("kernel-")]
    assert len(kept) == 3 and {p.suffix for p in kept} == {".so"}, kept


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
    # What is used is young again, and what is too much goes, the longest unused first.
    os.utime(first, (time.time() - 20 * 86400,) * 2)
    assert host_compiler.build("kernel", "int x;") == first
    monkeypatch.setattr(cache, "KEPT_BYTES", 2 * first.stat().st_size + 5)
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
    else:  # the same seen from the other side: what is below belongs to the caller, and the folder above does not
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


def test_a_full_disk_is_told_with_the_folder(monkeypatch, tmp_path):
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
