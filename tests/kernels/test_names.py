"""Every call of a host object is a range in a profile, by the name of its class."""

import contextlib
import importlib
import inspect
import pkgutil

import pytest
import torch

from tilescale_net import kernels
from tilescale_net.kernels.collective import Collective
from tilescale_net.kernels.moe import AllToAll

OTHER_CALLS = {
    "SendRecv": ("send", "recv"),
    "ExpertMatmul": ("__call__", "arriving", "combined"),
    "moe": ("dispatch", "dispatch_send", "dispatch_recv", "combine", "combine_send", "combine_recv", "combine_values"),
}


def _collectives() -> list[tuple[str, type, str]]:
    """Range, class and method of each call of the classes that kernels/ has for callers."""
    found = {AllToAll}
    for package in (kernels, importlib.import_module("tilescale_net.kernels.fused")):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            classes = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
            found |= {c for _, c in classes if issubclass(c, Collective) and c.__module__ == module.name}
    calls = []
    for cls in sorted(found, key=lambda c: (c.__module__, c.__name__)):
        name = "moe" if cls is AllToAll else cls.__name__
        for method in OTHER_CALLS.get(name, ("__call__",) if "__call__" in vars(cls) else ()):
            calls.append((f"tilescale_net.{name}" + ("" if method == "__call__" else f".{method}"), cls, method))
    return calls


@pytest.mark.parametrize(
    ("name", "cls", "method"), _collectives(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_call_has_a_name(name, cls, method):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, contextlib.suppress(AttributeError, TypeError):
        getattr(cls, method)(None)  # of no object: the range begins before the call looks at it
    assert name in {event.key for event in profile.key_averages()}


def test_every_collective_is_asked():
    found = {cls.__name__ for _, cls, _ in _collectives()}
    some = {"AllGather", "AllReduceNorm", "SendRecv", "MatmulAllReduce", "ExpertMatmul"}
    assert some <= found and len(found) >= 12, found
