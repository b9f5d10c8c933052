"""Published modules of frameworks, unmodified, over tilescale_net.deep_ep; wheels.py downloads them.

The programs run on GPUs as they are: `GPUS=2 MODULES=FOLDER bash launch.sh tests/clients/vllm_layers.py`.
"""

import os
import subprocess
import sys

import pytest

from tests import jobs
from tests.clients import wheels
from tilescale_net.launch.set_up import _project

PROGRAMS = {
    "megatron_layer.py": "megatron-core==0.16.1",
    "sglang_dispatchers.py": "sglang==0.5.23",
    "sglang_tensor_parallel.py": "sglang==0.5.23",
    "torchtitan_layer.py": "torchtitan==0.3.0",
    "vllm_layers.py": "vllm==0.33.0",
    "vllm_tensor_parallel.py": "vllm==0.33.0",
}


def run(program: str, gpus: int, nodes: int = 1, cases: str = "") -> None:
    env = dict(
        os.environ, GPUS=str(gpus), VIRTUAL_NODES=str(nodes), TSN_DEVICE="simulator", TSN_OUTPUT="all", CASES=cases
    )
    env["MODULES"] = str(wheels.modules(PROGRAMS[program]))
    done = jobs.launch(f"tests/clients/{program}", env=env, timeout=1500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.nightly
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("gpus, nodes", [(2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_published_modules(program, gpus, nodes):
    run(program, gpus, nodes)


@pytest.mark.timeout(400)
def test_a_layer_of_megatron():
    run("megatron_layer.py", 2, cases="expert parallel")


# DeepEP's own tests: a file of a checkout of a version, and its arguments.
DEEP_EP = {
    "v1.2.1/tests/test_intranode.py": "--num-tokens 32 --hidden 256 --num-topk 4 --num-experts 8",
    "v1.2.1/tests/test_low_latency.py": "--num-tokens 16 --hidden 512 --num-topk 4 --num-experts 8",
    "main/tests/elastic/test_ep.py": "--num-tokens 16 --hidden 256 --num-topk 3 --num-experts 8 --num-sms 4 --skip-perf-test",
}


@pytest.mark.nightly
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("program", DEEP_EP)
def test_tests_of_deep_ep(program):
    revision, _, file = program.partition("/")
    command = [sys.executable, os.path.join(jobs.ROOT, "tests", "deep_ep", "run_peer_tests.py")]
    command += [str(wheels.deep_ep(revision) / file), "--num-processes", "2", *DEEP_EP[program].split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


PLUGINS = {
    "vllm==0.33.0": ("vllm.plugins", "import vllm.envs; vllm.envs.VLLM_PLUGINS = None", "load_general_plugins"),
    "sglang==0.5.23": ("sglang.srt.plugins", "", "load_plugins"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("server", PLUGINS)
def test_servers_load_the_plugin(server, tmp_path):
    """By their own code that looks for entry points, from the metadata that an installed package has."""
    package, before, load = PLUGINS[server]
    root = package.split(".")[0]
    info = tmp_path / "tilescale_net-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tilescale_net\nVersion: 0\n")
    points = _project()["project"]["entry-points"]
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\ntilescale_net = {names['tilescale_net']}\n" for group, names in points.items())
    )
    real = [package, f"{package}.hook_registry", f"{root}.srt.environ"]
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from tests.clients import stand_ins
stand_ins.install_modules({root!r}, {str(wheels.modules(server))!r}, {real!r})
{before}
from {package} import {load}
{load}()
print(sys.modules["deep_ep"].__name__ if "deep_ep" in sys.modules else None)
"""
    for value, name in (("1", "tilescale_net.deep_ep"), ("0", "None")):
        env = os.environ | {f"TSN_{root.upper()}": value, "PYTHONPATH": jobs.ROOT}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
        assert done.stdout.split()[-1:] == [name], done.stderr
