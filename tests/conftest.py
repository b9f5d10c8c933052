"""What every test needs: a check that nothing is left behind."""

import os
import re
import time

import pytest

FOLDER = "/dev/shm"
# Of Python, and of the CUDA driver, which shares files among processes and takes them away when it likes.
OTHERS = ("sem.", "pym-", "cuda.shm.", "mps_shm_")


def pytest_xdist_auto_num_workers(config) -> int:
    """One worker more than processors, most tests wait now and then; not so many that they crowd a GPU."""
    return min((os.cpu_count() or 1) + 1, 16)


def _files() -> set[str]:
    return set(os.listdir(FOLDER)) if os.path.isdir(FOLDER) else set()


def _in_use_elsewhere(name: str) -> bool:
    """libfabric's shared-memory provider names its files after the process; other programs may be running."""
    owner = re.match(r"(\d+):", name)
    return bool(owner) and os.path.exists(f"/proc/{owner.group(1)}")


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory():
    """A test may not leave a file in /dev/shm, whatever happened to its ranks."""
    before = _files()
    yield
    end = time.monotonic() + 3
    while True:
        left = {n for n in _files() - before if not n.startswith(OTHERS) and not _in_use_elsewhere(n)}
        if not left or time.monotonic() > end:
            break
        time.sleep(0.1)
    assert not left, f"left behind in {FOLDER}: {sorted(left)}"
