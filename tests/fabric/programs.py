"""The C++ programs and libraries of these tests, and their sources."""

import functools
import runpy
from pathlib import Path

import pytest

from tests.native.builder import ROOT, build


def sources(*folders: str) -> tuple[str, ...]:
    """C++ files of folders of csrc, without their bindings."""
    found = []
    for folder in folders:
        found += [str(p.relative_to(ROOT)) for p in (ROOT / "tilescale_net/csrc" / folder).glob("*.cpp")]
    return tuple(sorted(p for p in found if not p.endswith("bindings.cpp")))


@functools.cache
def headers() -> tuple[str, ...]:
    """Flags for the libfabric headers that the package is built with; skips the test where there are none."""
    system = runpy.run_path(str(ROOT / "tilescale_net/launch/set_up.py"))
    folders = system["fabric_include"]()
    if folders is None:
        pytest.skip("lacks libfabric's headers (libfabric-dev)")
    return tuple(f"-I{folder}" for folder in folders)


def fake_device() -> Path:
    """A libfabric whose provider behaves like a strict EFA device."""
    return build(
        "fabric_fake", ["tests/native/fabric_fake.cpp"], flags=("-fvisibility=hidden", *headers()), shared=True
    )


def fake_cuda() -> Path:
    """A CUDA driver without a GPU."""
    return build("fake_cuda", ["tests/native/fake_cuda.cpp"], shared=True)


def small_shm() -> Path:
    """A library that leaves a process one MiB of /dev/shm."""
    return build("small_shm", ["tests/native/small_shm.cpp"], shared=True)


def device_test(sanitizer: str = "") -> Path:
    """The transport and the chaos around it, to be run against the fake device."""
    # Each folder as fabric_test of the proxy has it, so that it is compiled once for both.
    files = ["tests/native/fabric_device_test.cpp", sources("fabric"), sources("cuda"), sources("testing")]
    return build("fabric_device_test", files, sanitizer, flags=headers())


def loops() -> Path:
    """The benchmarks' loops with the command line of the bare ones; optimised as the package is."""
    ours = ["benchmark/native/loops.cpp", *sources("fabric", "cuda", "testing")]
    return build("fabric_loops", ["tests/native/fabric_loops.cpp", *ours], flags=("-O2", *headers()))
