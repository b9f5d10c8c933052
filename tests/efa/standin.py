"""The libfabrics of this machine over the stand-in for EFA's libraries (standin.cpp)."""

import functools
import os
import subprocess
from pathlib import Path

import pytest

from tests import lacking
from tests.native.builder import CACHE
from tilescale_net.runtime import fabric, private_folder

HERE = Path(__file__).parent
# (libfabric, provider, device) under test: 1.17 emulates writes, by reads of a p5 and by messages of a p4d.
WAYS = {
    "1.17-efa-p4d": ("system", "efa", "p4d"),
    "2.x-efa-p5": ("bundled", "efa", "p5"),
    "2.x-efa-direct-p5en": ("bundled", "efa-direct", "p5en"),
}


@functools.cache
def library(which: str) -> str:
    """Path of a libfabric: the `system`'s, or the one `bundled` in the mpich wheel. Skips the test where there is none."""
    lacking.program("g++", "g++")
    if not os.path.exists("/usr/include/infiniband/efadv.h"):
        pytest.skip("lacks rdma-core's headers (libibverbs-dev)")
    if which == "bundled" and not fabric.bundled_library():
        pytest.skip("lacks a libfabric 2.x (mpich with pip)")
    assert private_folder.make(CACHE), f"{CACHE} belongs to another user; remove it"
    folder = CACHE / f"efa-{which}"
    done = subprocess.run(
        [HERE / "build.sh", folder, "system" if which == "system" else fabric.bundled_library()],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return str(folder / "libfabric-efa.so")


def environment(way: str, **options: object) -> dict[str, str]:
    """Variables of ranks or programs that run over a way of WAYS; `options` go to EFA_STANDIN."""
    which, provider, device = WAYS[way]
    options = {"device": device, **options}
    return {
        "TSN_LIBFABRIC": library(which),
        "TSN_PROVIDER": provider,
        "EFA_STANDIN": ",".join(f"{name}={value}" for name, value in options.items()),
        # As csrc/fabric/provider.cpp sets them, for programs that it is not in.
        "FI_EFA_ENABLE_SHM_TRANSFER": "0",
        "FI_EFA_USE_UNSOLICITED_WRITE_RECV": "0",
    }
