"""Kernels of the package are kept as they are when they have been traced, unless anything that they depend on is another."""

import sys
import types

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.compiler import kernels as elsewhere
from tilescale_net.compiler.jit import KernelFactory
from tilescale_net.compiler.simulator import cache
from tilescale_net.kernels import p2p


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


def _kept():
    return [p for p in cache.folder().iterdir() if p.suffix == ".kernel"]


def _traced_once(traces):
    for expected in (1, 0, 0):
        kernel, made = traces.of(p2p.push, 64, threads=32)
        assert made == expected and _works(kernel, 40) and kernel.parameters[0] == "dst"
    with pytest.raises(tsn.KernelError, match="argument src: expected uint8"):
        kernel(tsn.empty(64, torch.uint8), tsn.empty(64, torch.int8), 1, 0, 1)
    assert len(_kept()) == 1


def _other(traces, monkeypatch):
    for kwargs in (dict(threads=64), dict(threads=32, unroll=2), dict(threads=32, blocks=2)):
        kernel, made = traces.of(p2p.push, 64, **kwargs)
        assert made == 1 and _works(kernel, 64), kwargs
    assert traces.of(p2p.pull, 64, threads=32)[1] == 1
    assert len(_kept()) == 5


def _sources(traces, monkeypatch):
    """Other sources, or other modules in the place of the package's own."""
    before = len(_kept())
    with monkeypatch.context() as m:
        m.setattr(cache, "package_hash", lambda: "another")
        assert traces.of(p2p.push, 64, threads=32)[1] == 1 and len(_kept()) == before + 1
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
    assert len(_kept()) == before + 1


def _damaged(traces):
    traces.of(p2p.push, 64, threads=32)
    for damage in (b"", b"{}", b"\xff\xfe"):
        for path in _kept():
            path.write_bytes(damage)
            cache.seal(path)
        kernel, made = traces.of(p2p.push, 64, threads=32)
        assert made == 1 and _works(kernel, 7)
        assert traces.of(p2p.push, 64, threads=32)[1] == 0


def _all():
    traces, monkeypatch = Traces(), pytest.MonkeyPatch()
    _traced_once(traces)
    _other(traces, monkeypatch)
    _sources(traces, monkeypatch)
    _damaged(traces)


def test_kept_kernels(tmp_path):
    ranks.run(1, _all, env={"XDG_CACHE_HOME": str(tmp_path), "TSN_DEVICE": "simulator"}, timeout=180)


def test_ranks_make_a_kernel_once(tmp_path):
    """All ranks ask at the same time; one traces, the others wait for it."""
    env = {"XDG_CACHE_HOME": str(tmp_path), "TSN_DEVICE": "simulator"}
    made = ranks.run(3, _made, env=env, timeout=180)
    assert sum(made) == 1, made


def _made():
    tsn.barrier()
    return Traces().of(p2p.push, 64, threads=32)[1]
