"""The harness: recorded outcomes, samples, skips, the check for files in /dev/shm."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests import shared_memory
from tests.conftest import left_to_a_thorough_run
from tests.native.builder import ROOT
from tests.outcomes import Outcomes, read

# -- outcomes: the records of tests, and the tests that a second run leaves out ----------------------------------------


def _report(test, when, outcome="passed", said=""):
    return SimpleNamespace(nodeid=test, when=when, outcome=outcome, duration=1, capstdout=said, longreprtext=outcome)


def test_a_run_that_was_cut_short_goes_on(tmp_path):
    path = tmp_path / "outcomes"
    first = Outcomes(path)
    for report in [
        *(_report("right", when, said="| row |\n") for when in ("setup", "call", "teardown")),
        *(
            _report("wrong", when, "failed" if when == "teardown" else "passed")
            for when in ("setup", "call", "teardown")
        ),
        *(_report("nowhere", when, "skipped" if when == "setup" else "passed") for when in ("setup", "teardown")),
        _report("died", "???", "failed"),
        _report("running", "setup"),
    ]:
        first.pytest_runtest_logreport(report)
    path.write_text(path.read_text() + '{"test": "cut off", "outc')
    found = read(path)
    assert {test: o["outcome"] for test, o in found.items()} == {
        "right": "passed", "wrong": "failed", "nowhere": "skipped", "died": "failed",
    }  # fmt: skip
    assert found["right"]["said"] == "| row |\n" and found["right"]["seconds"] == 3

    gone, config = [], SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)))
    items = [SimpleNamespace(nodeid=test) for test in (*found, "running")]
    second = Outcomes(path)
    second.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in gone] == ["right"] and len(items) == 4
    second.pytest_runtest_logreport(_report("running", "teardown"))
    assert read(path)["running"]["outcome"] == "passed"


# -- sample(n): the whole suite runs some variants of tests, the same ones on every machine ----------------------------


def _items(count: int, **marks) -> list:
    found = {name: SimpleNamespace(args=args) for name, args in marks.items()}
    return [
        SimpleNamespace(path="a.py", originalname="test_a", number=i, get_closest_marker=found.get)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "n, kept", [(0, []), (1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, range(10)), (12, range(10))]
)
def test_variants_from_the_first_to_the_last_are_kept(n, kept):
    left = [item.number for item in left_to_a_thorough_run(_items(10, sample=(n,)))]
    assert sorted({*range(10)} - {*left}) == list(kept)


def test_others_are_kept():
    assert not left_to_a_thorough_run(_items(10)) and not left_to_a_thorough_run(_items(10, sample=(0,), nightly=()))


# -- skips: CI runs failed tests once more, and must not lose sight of tests that may not be skipped -------------------

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


# -- /dev/shm: the run's own processes are judged, and no others -------------------------------------------------------

MAKE = "import os, sys; open(f'/dev/shm/{os.getpid()}:test', 'w').close(); print(os.getpid(), flush=True); sys.stdin.read()"


def _maker(**env):
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip() + ":test"


def test_only_files_of_processes_that_were_started_here_count():
    with shared_memory.Watch() as watch:
        ours, our_name = _maker(**os.environ)
        other, other_name = _maker(PATH=os.environ["PATH"])
        try:
            time.sleep(1)
            assert watch.left() == set()  # their makers still run
            for process in (ours, other):
                process.communicate(timeout=30)
            assert watch.left() == {our_name}
            watch.forget({our_name})
            assert watch.left() == set()
        finally:
            for process, name in ((ours, our_name), (other, other_name)):
                process.kill()
                process.wait()
                os.unlink(os.path.join(shared_memory.FOLDER, name))
