"""The NVSHMEM baseline where it cannot run: its report, how it is compiled, and that it compiles where NVSHMEM is."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmark import nvshmem
from tilescale_net.compiler import toolchain

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake 13.0"; exit 0; fi
echo call >> {calls}
sleep 0.2
while [ "$1" != -o ]; do shift; done
{action}
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`fake(action)`: folder of an NVSHMEM without content, and a compiler that notes its calls in `calls`."""
    for folder in ("include", "lib"):
        (tmp_path / "nvshmem" / folder).mkdir(parents=True)
    (tmp_path / "nvshmem" / "include" / "nvshmem.h").touch()
    (tmp_path / "nvshmem" / "lib" / "libnvshmem_host.so.3").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path / "nvshmem"))

    def make(action='echo made > "$2"'):
        compiler = tmp_path / "nvcc"
        compiler.write_text(COMPILER.format(calls=tmp_path / "calls", action=action))
        compiler.chmod(0o755)
        return str(tmp_path / "nvshmem"), str(compiler)

    make.calls = lambda: len((tmp_path / "calls").read_text().splitlines()) if (tmp_path / "calls").exists() else 0
    return make


def test_compiled_once_however_many_ask(fake):
    folder, compiler = fake()
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: nvshmem.build(folder, compiler, "sm_90"), range(4)))
    assert fake.calls() == 1
    (path,) = paths
    assert path.read_bytes().startswith(b"made\n")  # and a digest
    other = nvshmem.build(folder, compiler, "sm_100")
    assert other != path and fake.calls() == 2


def test_failed_compilation_shows_the_compilers_words(fake):
    folder, compiler = fake('echo "p2p.cu(7): error: no such thing" >&2; touch "$2"; exit 1')
    with pytest.raises(RuntimeError, match=r"p2p.cu\(7\): error: no such thing"):
        nvshmem.build(folder, compiler, "sm_90")
    folder, compiler = fake()
    assert os.path.exists(nvshmem.build(folder, compiler, "sm_90"))  # a failure is not kept


def test_names_the_missing_requirement(monkeypatch, tmp_path, fake):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "it needs GPUs" in nvshmem.missing()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TSN_DEVICE", "simulator")
    assert "it needs GPUs" in nvshmem.missing()
    monkeypatch.delenv("TSN_DEVICE")
    monkeypatch.setattr(toolchain, "find_tool", lambda name: None)
    assert "it needs nvcc" in nvshmem.missing()
    monkeypatch.setattr(nvshmem, "home", lambda: None)
    assert "it needs the package nvidia-nvshmem-cu13" in nvshmem.missing()
    monkeypatch.undo()


def test_home_is_looked_for_in_the_environment_first(fake, tmp_path, monkeypatch):
    folder, _ = fake()
    assert nvshmem.home() == folder
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))  # nothing in it
    assert nvshmem.home() != str(tmp_path)


@pytest.mark.skipif(not (nvshmem.home() and toolchain.find_tool("nvcc")), reason="needs NVSHMEM and nvcc")
def test_compiles_and_links(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = nvshmem.build(nvshmem.home(), toolchain.find_nvcc(), "sm_90")
    symbols = path.read_bytes()
    for name in ("put", "get", "ping_pong", "init", "version"):
        assert f"tsn_nvshmem_{name}".encode() in symbols
