"""For every test: a check that nothing is left behind, and an account of programs that the machine lacked."""

import gc
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests import outcomes, shared_memory

# Tests compile hundreds of small kernels and run each for milliseconds; the nightly run keeps the default.
os.environ.setdefault("TSN_SIM_CXXFLAGS", "-Og")


def _part(text: str) -> tuple[int, int]:
    k, n = (int(number) for number in text.split("/"))
    if not 0 <= k < n:
        raise ValueError(f"--part {text}: K/N with 0 <= K < N")
    return k, n


def pytest_addoption(parser):
    group = parser.getgroup("tilescale_net")
    group.addoption("--thorough", action="store_true", help="all variants of all tests, as where tests are named")
    group.addoption(
        "--part",
        metavar="K/N",
        type=_part,
        help="of the variants left to a thorough run, the K-th of N equal parts too",
    )
    group.addoption("--allow-skips", metavar="REGEX", help="fail when a test is skipped for any other reason")
    group.addoption("--outcomes", metavar="FILE", help="add what became of each test; leave out what passed before")
    group.addoption("--list-lacking", metavar="FILE", help="append the tests that the machine lacked something for")


def pytest_configure(config):
    """Ctrl-C must reach what tests start, also where the process that started them in the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    outcomes.configure(config)
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    # Workers of xdist do not see which paths were given to the process that starts them.
    if config.option.part is None:
        config.option.thorough |= config.workerinput["thorough"] if hasattr(config, "workerinput") else named


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["thorough"] = node.config.option.thorough


def left_to_a_thorough_run(items: list) -> list:
    """Tests that the whole suite leaves to a thorough run: all but n variants of each test marked `sample(n)`, from first to last."""
    variants = {}
    for item in items:
        if (mark := item.get_closest_marker("sample")) and not item.get_closest_marker("nightly"):
            variants.setdefault((item.path, item.originalname, mark.args[0]), []).append(item)
    left = []
    for (_, _, n), found in variants.items():
        kept = {round(i * (len(found) - 1) / max(1, n - 1)) for i in range(n)}
        left += [item for index, item in enumerate(found) if index not in kept]
    return left


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Tests that may take long begin first: at the end, all processors have something to do."""
    left = [] if config.option.thorough else left_to_a_thorough_run(items)
    if config.option.part:
        k, n = config.option.part
        left = [item for index, item in enumerate(left) if index % n != k]
    if left:
        left = set(left)
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))
    items.sort(key=lambda item: -(mark.args[0] if (mark := item.get_closest_marker("timeout")) else 0))


def pytest_collection_finish(session):
    """Objects that exist by now stay: the garbage collector need not scan them again."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config) -> int:
    """One worker more than processors, most tests wait now and then; not so many that they crowd a GPU."""
    return min((os.cpu_count() or 1) + 1, 16)


# Files whose tests look at one thing that takes long to make, or share ranks: a worker that gets one of them gets all.
TOGETHER = (
    "tests/integration/",
    "tests/compiler/test_device_code.py",
    "tests/device/test_code.py",
    "tests/kernels/test_generated_code.py",
    "tests/kernels/fused/test_generated_code.py",
    "tests/kernels/moe/test_generated_code.py",
    "tests/package/test_rooms.py",
    "tests/package/test_wheel.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests go to workers one by one, but for files of TOGETHER."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::", 1)[0]
            return file if file.startswith(TOGETHER) else nodeid

    return Scheduling(config, log) if config.getvalue("dist") == "load" else None


def _reason(report) -> str:
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _skipped(reporter) -> list:
    return [r for r in reporter.stats.get("skipped", []) if not hasattr(r, "wasxfail")]


def pytest_terminal_summary(terminalreporter, config):
    """One line on the programs that the machine lacks, with their packages: `tests.lacking` makes the reasons."""
    skipped = _skipped(terminalreporter)
    lacking = [r for r in skipped if _reason(r).startswith("lacks ")]
    if lacking:
        found = [re.match(r"lacks (.*?)(?: \((.*)\))?$", _reason(r)).groups() for r in lacking]
        missing, packages = (", ".join(sorted(set(filter(None, column)))) for column in zip(*found))
        terminalreporter.write_line(
            f"{len(lacking)} tests were skipped, as this machine lacks {missing}: install {packages}"
        )
    if config.option.list_lacking:
        with open(config.option.list_lacking, "a") as f:
            f.writelines(r.nodeid + "\n" for r in lacking)
    for report in _unexpected(skipped, config):
        terminalreporter.write_line(f"may not be skipped: {report.nodeid}: {_reason(report)}", red=True)


def _unexpected(skipped: list, config) -> list:
    allowed = config.option.allow_skips
    return [] if allowed is None else [r for r in skipped if not re.search(allowed, _reason(r))]


# No code of pytest's own: tests that fail may be run once more, a skip that must not be stays one.
SKIPPED = 6


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if reporter and whole and _unexpected(_skipped(reporter), session.config):
        session.exitstatus = SKIPPED


# The error of a native part that was built without the fabric, as setup.py notes in this file.
WITHOUT_FABRIC = "built without libfabric's headers"
NOTE = Path(__file__).resolve().parents[1] / "build" / "without-fabric"


def _without_fabric(report, path: Path):
    """In a build without the fabric, a test or a file with that error met what this machine lacks, and is skipped."""
    if report.failed and WITHOUT_FABRIC in report.longreprtext and NOTE.exists():
        report.outcome = "skipped"
        report.longrepr = (str(path), 0, "Skipped: lacks libfabric's headers (libfabric-dev)")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _without_fabric((yield), item.path)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _without_fabric((yield), collector.path)


@pytest.fixture
def seed() -> int:
    """A random number that pytest prints with a test that fails."""
    number = random.randrange(1 << 30)
    print(f"seed {number}")
    return number


@pytest.fixture(scope="session")
def files_of_this_run():
    """The files in /dev/shm that processes of this pytest process have made; other programs have theirs."""
    with shared_memory.Watch() as watch:
        yield watch


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory(files_of_this_run):
    """A test may not leave a file in /dev/shm, even after its ranks have died."""
    yield
    end = time.monotonic() + 3
    while left := files_of_this_run.left():
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    files_of_this_run.forget(left)
    assert not left, f"left behind in {shared_memory.FOLDER}: {sorted(left)}"
