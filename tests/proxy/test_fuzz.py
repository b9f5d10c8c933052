"""Fuzzers of what a proxy reads from a peer; see tests/native/fuzz_peer.cpp."""

import os

import pytest

from tests.native.builder import run
from tests.proxy import programs

TARGETS = ("records", "slot", "immediates", "blob")


def fuzz(folder, *options, timeout=120, target=None):
    env = {"FUZZ_TARGET": target} if target else {}
    run(programs.fuzz_peer(), "-max_len=4096", f"-artifact_prefix={folder}/", *options, timeout=timeout, env=env)


def test_fuzz_peer(tmp_path):
    fuzz(tmp_path, "-runs=20000", "-seed=1")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_a_minute(tmp_path, target):
    """FUZZ_INPUTS=10000000 is so many inputs instead, FUZZ_SECONDS another time. A failure names its seed."""
    seconds, inputs = int(os.environ.get("FUZZ_SECONDS", "60")), os.environ.get("FUZZ_INPUTS")
    limit = f"-runs={inputs}" if inputs else f"-max_total_time={seconds}"
    fuzz(tmp_path, "-len_control=0", limit, timeout=3600 if inputs else seconds + 60, target=target)
