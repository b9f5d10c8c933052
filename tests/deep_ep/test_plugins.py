"""The entry points for servers: without their variable they do nothing; with it, deep_ep is this package."""

import importlib
import os
import subprocess
import sys

import pytest

from tilescale_net.launch.set_up import _project


def run(program: str, **env: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in ("TSN_VLLM", "TSN_SGLANG")}
    return subprocess.run([sys.executable, "-c", program], env=clean | env, capture_output=True, text=True)


def test_entry_points_name_functions():
    points = _project()["project"]["entry-points"]
    assert set(points) == {"vllm.general_plugins", "sglang.srt.plugins"}
    for group in points.values():
        module, _, function = group["tilescale_net"].partition(":")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("value", [{}, {"TSN_VLLM": "0", "TSN_SGLANG": "0"}])
def test_nothing_is_taken_over_without_the_variable(value):
    program = """
import sys
from tilescale_net import plugins
plugins.vllm(), plugins.sglang()
assert "deep_ep" not in sys.modules and "torch" not in sys.modules
"""
    done = run(program, **value)
    assert done.returncode == 0, done.stderr


def test_vllm():
    program = """
import logging, sys, types
logging.basicConfig(level=logging.INFO)
from tilescale_net import plugins
plugins.vllm(), plugins.vllm()
import deep_ep
assert deep_ep.__name__ == "tilescale_net.deep_ep"
del sys.modules["deep_ep"]
sys.modules[plugins._VLLM] = types.ModuleType(plugins._VLLM)
plugins.vllm()
"""
    done = run(program, TSN_VLLM="deep_ep")
    assert "INFO:vllm.tilescale_net:deep_ep is tilescale_net.deep_ep" in done.stderr
    assert "TileScaleError: TSN_VLLM: vllm.model_executor" in done.stderr and "PYTHONPATH" in done.stderr


def test_sglang_with_a_deep_ep_of_its_own():
    """SGLang depends on one, and has imported it before it loads plug-ins."""
    program = """
import sys, types
theirs = sys.modules["deep_ep"] = types.ModuleType("deep_ep")
sys.modules["deep_ep.utils"] = types.ModuleType("deep_ep.utils")
from tilescale_net import plugins
for name, (taken, flag, error) in plugins._SGLANG.items():
    module = sys.modules[name] = types.ModuleType(name)
    module.__dict__.update({each: None for each in taken} | {flag: True, error: None})
plugins.sglang()
import deep_ep, deep_ep.utils
from tilescale_net.deep_ep import Buffer, ElasticBuffer
first, second = (sys.modules[name] for name in plugins._SGLANG)
assert deep_ep is not theirs and first.Buffer is Buffer and second.ElasticBuffer is ElasticBuffer
assert deep_ep.utils.__name__ == "tilescale_net.deep_ep.utils"
"""
    done = run(program, TSN_SGLANG="1")
    assert done.returncode == 0, done.stderr


def test_vllm_communicator():
    """Named to the platform of CUDA alone, and only for the parts that need it."""
    program = """
import sys, types
from tilescale_net import plugins
platforms = sys.modules["vllm.platforms"] = types.ModuleType("vllm.platforms")

class Platform:
    named = plugins._COMMUNICATOR

    @classmethod
    def get_device_communicator_cls(cls):
        return cls.named

platforms.current_platform = Platform()
plugins.vllm()
print(Platform().get_device_communicator_cls() == plugins._OURS)
Platform.get_device_communicator_cls, Platform.named = classmethod(lambda cls: cls.named), "vllm.of.a.processor"
plugins.vllm()
assert Platform().get_device_communicator_cls() == "vllm.of.a.processor" and "deep_ep" not in sys.modules
"""
    for value, named in (("all_reduce", "True"), ("norm, all_reduce", "True"), ("0", "False")):
        done = run(program, TSN_VLLM=value)
        assert done.stdout.split() == [named], done.stderr
    done = run(program, TSN_VLLM="allreduce")
    assert "TSN_VLLM='allreduce': 'allreduce' is not one of deep_ep, all_reduce, norm" in done.stderr
