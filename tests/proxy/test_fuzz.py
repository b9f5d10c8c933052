"""Fuzzers of what a proxy reads from a peer; see tests/native/fuzz_peer.cpp."""

import os

import pytest

from tests.native.builder import run
from tests.proxy import programs


def fuzz(folder, *options, timeout=120):
    run(programs.fuzz_peer(), "-max_len=4096", f"-artifact_prefix={folder}/", *options, timeout=timeout)


def test_fuzz_peer(tmp_path):
    fuzz(tmp_path, "-runs=20000", "-seed=1")


@pytest.mark.nightly
def test_fuzz_peer_for_a_minute(tmp_path):
    """FUZZ_SECONDS lengthens it. Each night begins with another seed, which a failure names."""
    seconds = int(os.environ.get("FUZZ_SECONDS", "60"))
    fuzz(tmp_path, f"-max_total_time={seconds}", timeout=seconds + 60)
