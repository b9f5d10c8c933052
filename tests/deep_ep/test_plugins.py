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


def test_sglang_with_its_own_deep_ep():
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
    done = run(program, TSN_SGLANG="deep_ep")
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
sys.modules["vllm"] = types.ModuleType("vllm")
sys.modules["vllm"].__path__ = []  # a version that is built otherwise
try:
    import tilescale_net.vllm_communicator
except ImportError:
    raise
except Exception as err:
    assert "TSN_VLLM" in str(err) and "No module named 'vllm.compilation'" in str(err), err
"""
    for value, named in (("all_reduce", "True"), ("norm, all_reduce", "True"), ("0", "False")):
        done = run(program, TSN_VLLM=value)
        assert done.stdout.split() == [named], done.stderr
        assert ("stays vLLM's, whose platform has vllm.of.a.processor" in done.stderr) == (named == "True")
    done = run(program, TSN_VLLM="allreduce")
    assert "TSN_VLLM='allreduce': 'allreduce' is not one of deep_ep, all_reduce, norm" in done.stderr


def test_sglang_hooks():
    """Registered for the parts that are asked for, with SGLang's registry; nothing of deep_ep then."""
    program = """
import sys, types
registry = sys.modules["sglang.srt.plugins.hook_registry"] = types.ModuleType("hook_registry")
registry.HookType = types.SimpleNamespace(AFTER="after", BEFORE="before", AROUND="around")
registry.HookRegistry = types.SimpleNamespace(register=lambda target, hook, kind: print(target.split(".")[-1], kind))
from tilescale_net import plugins
plugins.sglang()
assert "deep_ep" not in sys.modules
"""
    always = ["__init__ after", "destroy before"]
    fused = ["flashinfer_allreduce_residual_rmsnorm around", "flashinfer_ar_fusion_applies around"]
    done = run(program, TSN_SGLANG="norm")
    assert done.stdout.splitlines() == always + fused, done.stderr
    done = run(program, TSN_SGLANG="all_reduce")
    assert done.stdout.splitlines() == [*always, "all_reduce around", "_all_reduce_out_place around"], done.stderr
    done = run(program, TSN_SGLANG="yes")
    assert "TSN_SGLANG='yes': 'yes' is not one of deep_ep, all_reduce, norm" in done.stderr


def test_workers_made_by_fork(tmp_path):
    """A server's main process loads the plug-in, and forks its workers, which use it."""
    program = f"""
import multiprocessing
from tilescale_net import plugins
plugins.vllm()
import deep_ep, torch
import torch.distributed as dist
assert not torch.cuda.is_initialized()

def work(rank):
    plugins.vllm()
    dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 24)
    x, choices = torch.randn(8, 256).bfloat16(), torch.arange(16).view(8, 2) % 4
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(choices, 4)
    rows, _, _, _, handle, _ = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=choices,
        topk_weights=torch.ones(8, 2),
    )
    out, _, _ = buffer.combine(rows, handle)
    assert torch.equal(out, x * in_rank.sum(1, keepdim=True))
    dist.destroy_process_group()

workers = [multiprocessing.get_context("fork").Process(target=work, args=(rank,)) for rank in range(2)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
print([worker.exitcode for worker in workers])
"""
    done = run(program, TSN_VLLM="deep_ep", TSN_DEVICE="simulator")
    assert done.stdout.splitlines()[-1:] == ["[0, 0]"], done.stderr
