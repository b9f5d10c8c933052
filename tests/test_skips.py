"""What a run ends with when tests are skipped that may not be: CI runs failed tests once more, and must not lose sight of it."""

import subprocess
import sys

import pytest

from tests.native.builder import ROOT

TESTS = """
import pytest
def test_fails(): assert False
def test_skips(): pytest.skip("lacks patience (patience)")
"""


@pytest.mark.parametrize("allowed, code", [("^lacks ", 1), ("GPU", 6)])
def test_skips_that_are_not_allowed_are_no_failed_tests(tmp_path, allowed, code):
    (tmp_path / "test_two.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
    ]
    command += ["--allow-skips", allowed, str(tmp_path / "test_two.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "as this machine lacks patience: install patience" in done.stdout
    assert ("may not be skipped" in done.stdout) == (code == 6)
