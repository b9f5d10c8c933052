"""Programs for DeepEP, run with this package in its place."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib.util
import deep_ep
from deep_ep.utils.math import halved
from deep_ep.utils.event import EventOverlap

assert deep_ep.__name__ == "tilescale_net.deep_ep" and deep_ep.utils.EventOverlap is EventOverlap
assert importlib.util.find_spec("kernels").origin is None, "the checkout hides installed packages"
print(halved(6))
"""


def test_a_program_of_a_checkout(tmp_path):
    """It finds the Python files of its checkout, and none of this checkout's folders under names of other packages."""
    utils, tests = tmp_path / "deep_ep" / "utils", tmp_path / "tests" / "elastic"
    utils.mkdir(parents=True)
    tests.mkdir(parents=True)
    (utils / "math.py").write_text("from .. import _C\n\n\ndef halved(n):\n    return _C.anything and n // 2\n")
    (tests / "test_ep.py").write_text(PROGRAM)
    runner = Path(__file__).with_name("run_peer_tests.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, str(runner), str(tests / "test_ep.py")], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, "3\n"), run.stderr
