"""Builds the two native extensions: `_native` (queue, proxy, fabric, benchmarks) and `_simulator`.

`python setup.py build_ext --inplace` is enough to use a checkout. Neither part needs CUDA or a GPU to build;
libfabric's headers are read from the system, from CPATH or from TSN_LIBFABRIC_INCLUDE, and the library is opened at run
time.
"""

import glob
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = os.path.dirname(os.path.abspath(__file__))
CSRC = os.path.join("tilescale_net", "csrc")


def sources(*folders):
    """C++ files directly in the given folders of csrc, sorted so that builds repeat exactly."""
    found = []
    for folder in folders:
        found += glob.glob(os.path.join(CSRC, folder, "*.cpp"))
    return sorted(found)


def libfabric_include():
    """Folder with rdma/fabric.h, or '' when the compiler finds it by itself; exits with advice when there is none."""
    explicit = os.environ.get("TSN_LIBFABRIC_INCLUDE")
    for folder in [explicit] if explicit else ["", "/opt/amazon/efa/include"]:
        flags = ["-I" + folder] if folder else []
        with tempfile.TemporaryDirectory() as tmp:
            probe = os.path.join(tmp, "probe.cpp")
            with open(probe, "w") as f:
                f.write("#include <rdma/fabric.h>\n")
            done = subprocess.run(
                [os.environ.get("CXX", "g++"), *flags, "-fsyntax-only", probe], capture_output=True, text=True
            )
        if done.returncode == 0:
            return folder
    sys.exit(
        "tilescale_net: libfabric's headers (rdma/fabric.h) were not found. Install them (Debian and Ubuntu: "
        "apt-get install libfabric-dev) or name their folder in TSN_LIBFABRIC_INCLUDE."
    )


class BuildNative(build_ext):
    """build_ext that compiles the files of an extension side by side and tells Python which compiler to ask for."""

    def build_extensions(self):
        import pybind11

        fabric = libfabric_include()
        for ext in self.extensions:
            ext.include_dirs += [pybind11.get_include(), ROOT]
            if fabric and ext.name.endswith("_native"):
                ext.include_dirs.append(fabric)
        compile_one = self.compiler.compile
        workers = max(1, min(os.cpu_count() or 1, 16))

        def compile_many(files, *args, **kwargs):
            with ThreadPoolExecutor(workers) as pool:
                return [o for objs in pool.map(lambda f: compile_one([f], *args, **kwargs), files) for o in objs]

        self.compiler.compile = compile_many
        super().build_extensions()


FLAGS = ["-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-fvisibility=hidden", "-Wno-unused-parameter"]
HEADERS = sorted(
    glob.glob(os.path.join(CSRC, "**", "*.h"), recursive=True)
    + glob.glob(os.path.join("tilescale_net", "device", "**", "*.h"), recursive=True)
)

setup(
    ext_modules=[
        Extension(
            "tilescale_net._native",
            sources("", "cuda", "fabric", "proxy", "bench"),
            extra_compile_args=FLAGS,
            extra_link_args=["-ldl", "-lpthread"],
            depends=HEADERS,
            language="c++",
        ),
        Extension(
            "tilescale_net._simulator",
            sources("simulator"),
            extra_compile_args=FLAGS,
            extra_link_args=["-ldl", "-lpthread"],
            depends=HEADERS,
            language="c++",
        ),
    ],
    cmdclass={"build_ext": BuildNative},
)
