"""Fuzzers of the data that a proxy reads from a peer; see tests/native/fuzz_peer.cpp and, for whole proxies, fuzz_worker.cpp."""

import os

import pytest

from tests.native.builder import run
from tests.proxy import programs

TARGETS = ("records", "slot", "immediates", "blob")


def fuzz(folder, *options, timeout=120, target=None):
    whole = target == "worker"
    env = {"FUZZ_TARGET": target} if target and not whole else {}
    run(
        programs.fuzz_worker() if whole else programs.fuzz_peer(), "-max_len=4096", f"-artifact_prefix={folder}/",
        *options, timeout=timeout, env=env,
    )  # fmt: skip


def test_fuzz_peer(tmp_path):
    fuzz(tmp_path, "-runs=20000", "-seed=1")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", [*TARGETS, "worker"])
def test_a_minute(tmp_path, target):
    """FUZZ_INPUTS=10000000 sets the number of inputs instead (of "worker", which starts proxies, a thousandth), FUZZ_SECONDS another
    time. A failure names its seed."""
    seconds, inputs = int(os.environ.get("FUZZ_SECONDS", "60")), os.environ.get("FUZZ_INPUTS")
    if inputs and target == "worker":
        inputs = max(1, int(inputs) // 1000)
    limit = f"-runs={inputs}" if inputs else f"-max_total_time={seconds}"
    fuzz(tmp_path, "-len_control=0", limit, timeout=3600 if inputs else seconds + 60, target=target)
