"""Builds the native extensions: `_native` (queue, proxy, fabric, launches), `_simulator`, and in a checkout
`benchmark.instruments`, for which no wheel has a place.

`python setup.py build_ext --inplace` is enough to use a checkout. Neither part needs CUDA or a GPU to build;
libfabric's headers are read from the system, from CPATH, from TSN_LIBFABRIC_INCLUDE or from build/system, and the library
is opened at run time. Without these headers the fabric is left out: one node works, and calls across nodes raise
an error.
"""

import glob
import hashlib
import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = os.path.dirname(os.path.abspath(__file__))
CSRC = os.path.join("tilescale_net", "csrc")
INSTRUMENTS = os.path.join("benchmark", "native")
# The only files that include libfabric's headers.
FABRIC = [os.path.join(CSRC, "fabric", name) for name in ("provider.cpp", "libfabric_*.cpp")]
FABRIC.append(os.path.join(INSTRUMENTS, "sharing.cpp"))
# Present when the extension was built without libfabric's headers; launch.sh builds again once they are there.
WITHOUT_FABRIC = os.path.join("build", "without-fabric")


def sources(*folders):
    """C++ files directly in the given folders of csrc, sorted so that builds repeat exactly."""
    found = []
    for folder in folders:
        found += glob.glob(os.path.join(CSRC, folder, "*.cpp"))
    return sorted(found)


def without_fabric(files):
    """The same extension where libfabric's headers are missing."""
    left_out = {path for pattern in FABRIC for path in glob.glob(pattern)}
    return sorted(set(files) - left_out) + sources("no_fabric")


def with_joined_bindings(ext):
    """Join the extension's files that include pybind11: its headers take about 6 s of processor time per file.

    The native part has two joined files, as a machine that builds has two processors or more.
    """
    alone, bindings = [], []
    for path in ext.sources:
        with open(path, encoding="utf-8") as file:
            (bindings if "#include <pybind11/" in file.read() else alone).append(path)
    ext.depends = [*ext.depends, *bindings]
    bindings.sort(key=os.path.getsize, reverse=True)
    parts = 2 if ext.name.endswith("_native") else 1
    joined = []
    for part in range(parts):
        joined.append(os.path.join("build", f"{ext.name.split('.')[-1]}_bindings_{part}.cpp"))
        with open(joined[-1], "w", encoding="utf-8") as file:
            file.writelines(f'#include "{path}"\n' for path in bindings[part::parts])
        # As old as its includes: else the extension would be compiled again each time.
        newest = max(map(os.path.getmtime, bindings[part::parts]))
        os.utime(joined[-1], (newest, newest))
    ext.sources = joined + alone


class BuildNative(build_ext):
    """build_ext that compiles the files of an extension side by side, and those of two extensions once."""

    def finalize_options(self):
        super().finalize_options()
        if self.editable_mode:
            # The folder of `build_ext --inplace`, whose extensions are taken where they are up to date.
            self.build_lib = os.path.join("build", f"lib.{self.plat_name}-{sys.implementation.cache_tag}")

    def build_extensions(self):
        import pybind11

        system = runpy.run_path(os.path.join(ROOT, "tilescale_net", "launch", "set_up.py"))
        cxx = system["compiler"]()
        if not cxx:
            named = os.environ.get("CXX")
            sys.exit(
                "tilescale_net: "
                + (
                    f"CXX names {named!r}, which is no program here; unset CXX or name another compiler"
                    if named
                    else "there is no C++ compiler; install g++ or clang, or name one in CXX"
                )
            )
        self._use(cxx)
        python, fabric = system["python_include"](), system["fabric_include"]()
        if python is None:
            (advice,) = [p for p in system["missing_packages"](["headers"]) if "python" in p]
            sys.exit(f"tilescale_net: Python.h was not found. Debian, Ubuntu: apt-get install {advice}")
        if fabric is None and os.environ.get(system["EXPLICIT"], system["NO_FABRIC"]) not in ("", system["NO_FABRIC"]):
            sys.exit(f"tilescale_net: TSN_LIBFABRIC_INCLUDE={os.environ[system['EXPLICIT']]} has no rdma/fabric.h")
        for ext in self.extensions:
            ext.include_dirs += [pybind11.get_include(), ROOT, *python]
            # The same folders for all, so that one object serves two extensions.
            ext.include_dirs += fabric or []
            if fabric is None and not ext.name.endswith("_simulator"):
                ext.sources = without_fabric(ext.sources)
        os.makedirs(os.path.dirname(WITHOUT_FABRIC), exist_ok=True)
        if fabric is None:
            print("tilescale_net: built without libfabric's headers: nothing can cross nodes", file=sys.stderr)
            open(WITHOUT_FABRIC, "w").close()
        elif os.path.exists(WITHOUT_FABRIC):
            os.remove(WITHOUT_FABRIC)
        for ext in self.extensions:
            with_joined_bindings(ext)
        self._compile_side_by_side(cxx)
        self.parallel = None  # `-j` would build extensions side by side, which share objects; files are, in any case
        super().build_extensions()

    def _use(self, cxx):
        """Make this the compiler and linker, with the flags that Python was built with."""
        for key in ("compiler_so", "compiler_so_cxx", "linker_so", "linker_so_cxx"):
            command = getattr(self.compiler, key, None)
            if command:
                options = [word for word in command if word.startswith("-")]
                setattr(self.compiler, key, [*cxx, *options])

    def _precompiled_headers(self, cxx):
        """Options that parse the standard library's headers once, in common/base.h: 0.4 s of processor time less for each
        of 70 files.

        g++ takes the precompiled header by itself where it fits; other compilers, and caches of them, go without.
        """
        if len(cxx) > 1 or not os.path.basename(cxx[0]).startswith("g++"):
            return []
        header = os.path.abspath(os.path.join("build", "standard.h"))
        with open(header, "w", encoding="utf-8") as file:
            file.write(f'#include "{ROOT}/{CSRC}/common/base.h"\n')
        command = [*self.compiler.compiler_so, *FLAGS, "-x", "c++-header", header, "-o", header + ".gch"]
        return ["-include", header] if subprocess.run(command, capture_output=True).returncode == 0 else []

    def _compile_side_by_side(self, cxx):
        compile_one = self.compiler.compile
        compiled = {}
        newest = max(map(os.path.getmtime, [*HEADERS, __file__]))
        # Objects of another compiler or of other folders are others.
        flags = repr((self.compiler.compiler_so, [ext.include_dirs for ext in self.extensions], os.environ.get("CXX")))
        self.build_temp = os.path.join(self.build_temp, hashlib.sha256(flags.encode()).hexdigest()[:8])

        def compile_or_take(file, *args, output_dir, **kwargs):
            """The object of an earlier build where neither its source nor any header is newer."""
            (out,) = self.compiler.object_filenames([file], output_dir=output_dir)
            if not os.path.exists(out) or os.path.getmtime(out) < max(newest, os.path.getmtime(file)):
                # Whole or not at all, also when this process is killed.
                (partial,) = compile_one([file], *args, output_dir=os.path.join(output_dir, "partial"), **kwargs)
                os.makedirs(os.path.dirname(out), exist_ok=True)
                os.replace(partial, out)
            return [out]

        workers = max(1, min(os.cpu_count() or 1, 16))
        precompiled = []  # once, when something is compiled at all

        def compile_many(files, *args, extra_postargs=None, **kwargs):
            if not precompiled:
                precompiled.append(self._precompiled_headers(cxx))
            kwargs["extra_postargs"] = [*(extra_postargs or []), *precompiled[0]]
            # The longest first, so that no processor is left with one of them at the end; the joined files are short
            # themselves, and their includes take longest of all.
            missing = [f for f in files if f not in compiled]
            order = sorted(missing, key=lambda f: (f.startswith("build"), os.path.getsize(f)), reverse=True)
            with ThreadPoolExecutor(workers) as pool:
                compiled.update(zip(order, pool.map(lambda f: compile_or_take(f, *args, **kwargs), order)))
            return [o for f in files for o in compiled[f]]

        self.compiler.compile = compile_many


FLAGS = ["-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-fvisibility=hidden", "-Wno-unused-parameter"]
HEADERS = sorted(
    glob.glob(os.path.join(CSRC, "**", "*.h"), recursive=True)
    + glob.glob(os.path.join("tilescale_net", "device", "**", "*.h"), recursive=True)
    + glob.glob(os.path.join(INSTRUMENTS, "*.h"))
)


def extension(name, files):
    options = {"extra_compile_args": FLAGS, "extra_link_args": ["-ldl", "-lpthread"], "depends": HEADERS}
    return Extension(name, files, language="c++", **options)


EXTENSIONS = [
    extension("tilescale_net._native", sources("", "cuda", "fabric", "proxy", "testing", "launch")),
    extension("tilescale_net._simulator", sources("simulator", "explore")),
]
if "--inplace" in sys.argv:
    shared = [f for f in sources("cuda", "fabric", "proxy", "testing") if not f.endswith("bindings.cpp")]
    files = sorted(glob.glob(os.path.join(INSTRUMENTS, "*.cpp"))) + shared
    EXTENSIONS.append(extension("benchmark.instruments", files))

# `tilescale_net.kernels` is the folder kernels/ (package-dir in pyproject.toml). It has no __init__.py, so that a checkout's
# root on PYTHONPATH does not hide an installed distribution of that name.
KERNELS = ["tilescale_net.kernels", *(f"tilescale_net.kernels.{name}" for name in find_packages("kernels"))]
setup(
    packages=find_packages(include=["tilescale_net*"]) + KERNELS,
    ext_modules=EXTENSIONS,
    cmdclass={"build_ext": BuildNative},
)
