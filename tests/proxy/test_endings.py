"""Endpoints close in good order, or stay: no process crashes when a job ends with much on its way."""

import subprocess

import pytest

from tests.fabric.pair import IDS, PROVIDERS
from tests.proxy import programs
from tests.proxy.test_fabric import finish, start
from tests.variants import variants

HOW = ["failed=1", "failed=0"]
SHARED = ["threads=2", "peer_threads=2"]


def end(folder, library, provider, how, rounds, timeout, threads=()):
    ended = finish(start(folder, "endings", 3, library, provider, how, f"rounds={rounds}", *threads), timeout=timeout)
    assert not any(status for status, _ in ended), ended  # one that fails lets the others wait


@pytest.mark.parametrize("threads", [[], SHARED], ids=["one", "shared"])
@variants(2, "how", HOW)
def test_endings(tmp_path, how, threads):
    """A PE gives up while large puts are in flight; or finalize comes while put_signals are that no PE waits for."""
    _, library, provider = PROVIDERS[0]
    end(tmp_path, library, provider, how, 3 if how == "failed=1" else 6, 120, threads)


@pytest.mark.nightly
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("threads", [[], SHARED], ids=["one", "shared"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("library, provider", [p[1:] for p in PROVIDERS], ids=IDS)
def test_many_endings(tmp_path, library, provider, how, threads):
    """200, of which a process goes through some: a failed proxy's resources stay open, 85 MB of them with tcp;ofi_rxm."""
    for batch in range(10):
        folder = tmp_path / str(batch)
        folder.mkdir()
        end(folder, library, provider, how, 20, 300, [*threads, f"first={20 * batch}"])


def test_drain_while_descriptors_are_taken():
    program = programs.proxy_test()
    ended = subprocess.run([program, "endings", "rounds=0", "drains=60"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
