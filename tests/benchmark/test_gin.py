"""The GIN baseline without a GPU: its sources, and its message where it cannot run."""

import pytest
import torch

from benchmark import gin
from benchmark.common import cuda_library
from tilescale_net.compiler import toolchain

HEADER = "#define NCCL_MAJOR 2\n#define NCCL_MINOR {minor}\n#define NCCL_PATCH 3\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """`home(minor)`: folder of headers of NCCL 2.MINOR.3, which NCCL_HOME names."""

    def make(minor: int) -> str:
        folder = tmp_path / str(minor) / "include"
        folder.mkdir(parents=True)
        (folder / "nccl.h").write_text(HEADER.format(minor=minor))
        (folder / "nccl_device.h").touch()
        monkeypatch.setenv("NCCL_HOME", str(folder.parent))
        return str(folder)

    monkeypatch.delenv("NCCL_HOME", raising=False)
    monkeypatch.setattr(cuda_library.metadata, "distribution", _no_wheel)
    return make


def _no_wheel(name):
    raise cuda_library.metadata.PackageNotFoundError(name)


def test_headers_that_are_too_old_are_passed_over(home):
    home(31)
    assert gin.headers() is None
    assert home(32) == gin.headers()


def test_names_the_missing_requirement(monkeypatch, home):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "it needs GPUs" in gin.missing()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TSN_DEVICE", raising=False)
    assert "it needs the headers of NCCL 2.32.3" in gin.missing()
    home(32)
    monkeypatch.setattr(gin, "version", lambda: 22809)
    assert "LD_PRELOAD" in gin.missing()
    monkeypatch.setattr(gin, "version", lambda: 23203)
    monkeypatch.setattr(toolchain, "find_tool", lambda name: None)
    assert "it needs nvcc" in gin.missing()


@pytest.mark.skipif(not (gin.headers() and toolchain.find_tool("nvcc")), reason="needs NCCL 2.32.3's headers and nvcc")
def test_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    symbols = gin.build(gin.headers(), toolchain.find_nvcc(), "sm_90").read_bytes()
    for name in ("init", "malloc", "ping_pong", "type", "finalize"):
        assert f"tsn_gin_{name}".encode() in symbols
