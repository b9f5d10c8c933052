"""libfabric's own efa provider, without a device: standin.cpp takes the place of EFA's libraries."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import jobs, lacking

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def libfabric(tmp_path_factory) -> str:
    """libfabric over the stand-in."""
    lacking.program("g++", "g++")
    if not os.path.exists("/usr/include/infiniband/efadv.h"):
        pytest.skip("lacks rdma-core's headers (libibverbs-dev)")
    folder = tmp_path_factory.mktemp("efa")
    subprocess.run([HERE / "build.sh", folder], check=True)
    return str(folder / "libfabric-efa.so")


@pytest.mark.parametrize("script, device", [("01_put_signal", "p4d"), ("08_collectives", "p5")])
def test_tutorials_run_over_the_provider_of_efa(libfabric, script, device):
    """Debian 12's libfabric 1.17 emulates writes: the target reads, or copies from messages, and raises the immediates."""
    env = {
        **os.environ, "TSN_DEVICE": "simulator", "GPUS": "2", "VIRTUAL_NODES": "2", "TSN_PROVIDER": "efa",
        "TSN_LIBFABRIC": libfabric, "EFA_STANDIN": f"device={device}",
    }  # fmt: skip
    done = jobs.launch(f"docs/tutorials/{script}.py", env=env)
    assert done.returncode == 0, done.stderr
    assert "provider efa emulates RDMA writes" in done.stderr
