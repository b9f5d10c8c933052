"""Kernels lowered for the simulator are kept, and made again whenever anything that they depend on is another."""

import os
import shutil

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
from tilescale_net.compiler import jit, toolchain
from tilescale_net.compiler.simulator import cache
from tilescale_net.errors import KernelError
from tilescale_net.runtime import private_folder


@pytest.fixture(autouse=True)
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


def kept():
    return sorted(p for p in cache.folder().iterdir() if p.suffix == ".lowered")


def test_lowered_once(lowerings):
    first, second = scale(40, 2.0), scale(40, 2.0)
    assert lowerings == ["scale"] and len(kept()) == 1
    assert first.source == second.source
    assert works(first, 40, 2.0) and works(second, 40, 2.0)
    with pytest.raises(tsn.KernelError):  # the checks of arguments are kept too
        second(torch.zeros(41), torch.zeros(41))


@pytest.mark.parametrize("other", [dict(n=41), dict(factor=3.0), dict(name="other"), dict(guard=True)])
def test_what_differs_is_lowered(lowerings, other):
    scale(40, 2.0)
    made = dict(n=40, factor=2.0) | other
    assert works(scale(**made), made["n"], made["factor"])
    assert len(lowerings) == len(kept()) == 2


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
    (path,) = kept()
    if damage == "gone":  # between the look and the read
        path.unlink()
        os.symlink("/nowhere", path)
    elif damage == "unreadable":
        path.write_bytes(b"\xff\xfe\x00")
    else:
        path.write_text(damage)
    for _ in range(2):
        assert works(scale(40, 2.0), 40, 2.0) and len(lowerings) == 2


def test_a_kernel_that_cannot_be_lowered_is_not_kept(monkeypatch):
    def fails(*_):
        raise KernelError("cannot be lowered")

    monkeypatch.setattr(jit, "lower", fails)
    for _ in range(2):
        with pytest.raises(KernelError, match="cannot be lowered"):
            scale(40, 2.0)
    assert kept() == [] and not list(cache.folder().glob("tmp*"))
