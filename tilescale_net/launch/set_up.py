"""Finds and installs missing packages of the interpreter and the operating system; called by path before any import.

python tilescale_net/launch/set_up.py check [EXTRA…]               file name suffix of extensions, then missing packages
python tilescale_net/launch/set_up.py list [EXTRA…]                all packages of a fresh environment
python tilescale_net/launch/set_up.py prepare [headers] [venv]     gets the missing ones of them, or fails
python tilescale_net/launch/set_up.py venv [OPTION] FOLDER         makes a virtual environment with pip
python tilescale_net/launch/set_up.py fabric                       fails if libfabric's headers are not found

pyproject.toml names the packages and their versions. C++ compiler, Python's and libfabric's headers, and Python's
venv come from the distribution's packages: installed by root, unpacked into build/system by others. launch.sh and setup.py
call this; the standard library is all it uses.
"""

import contextlib
import ctypes
import glob
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UNPACKED = os.path.join(ROOT, "build", "system")
INCLUDE = os.path.join(UNPACKED, "usr", "include")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def say(text: str) -> None:
    print(f"launch.sh: {text}", file=sys.stderr, flush=True)


# -- Python packages --------------------------------------------------------------------------------------------------

# The parts of nvcc.
COMPILER = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")


def _project() -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as f:
        content: dict[str, Any] = tomllib.load(f)
    return content


def _wanted(content: dict[str, Any], extras: list[str]) -> list[str]:
    """Dependencies of the package and of extras: users' extras, and those for work on a checkout."""
    groups = {**content["project"]["optional-dependencies"], **content["dependency-groups"]}
    return [*content["project"]["dependencies"], *(r for extra in extras for r in groups[extra])]


def dependencies() -> list[str]:
    """Requirements of the package, from the checkout or the installed metadata."""
    if os.path.exists(os.path.join(ROOT, "pyproject.toml")):
        return list(_project()["project"]["dependencies"])
    return [r for r in metadata.requires("tilescale_net") or [] if "extra ==" not in r]


def _parsed(requirement: str) -> Any:
    """A packaging.requirements.Requirement."""
    for owner in ("", "pip._vendor.", "setuptools._vendor."):  # few interpreters have packaging
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{owner}packaging.requirements").Requirement(requirement)
    raise ImportError("packaging")


def name_of(requirement: str) -> str:
    """Distribution name of a requirement such as `torch>=2.6; python_version < "4"`."""
    return str(_parsed(requirement).name)


def satisfied(requirement: str) -> bool:
    """Whether the distribution is installed, in a version that the requirement allows."""
    try:
        found = metadata.version(name_of(requirement))
    except metadata.PackageNotFoundError:
        return False
    return bool(_parsed(requirement).specifier.contains(found, prereleases=True))


def _opens(*libraries: str) -> bool:
    for library in libraries:
        try:
            ctypes.CDLL(library)
            return True
        except OSError:
            continue
    return False


def _stand_in(name: str) -> bool:
    """Whether the machine itself provides the content of a package."""
    if name in COMPILER:
        home = os.path.join(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "", "bin")
        return bool(shutil.which("nvcc", path=home) or shutil.which("nvcc"))
    if name.startswith("nvidia-cuda-"):  # headers for the simulator, unused with a driver
        return _opens("libcuda.so.1")
    if name == "mpich":  # libfabric
        explicit = os.environ.get("TSN_LIBFABRIC", "libfabric.so.1")
        return _opens(explicit, "/opt/amazon/efa/lib/libfabric.so.1", "libfabric.so.1")
    return False


def missing(extras: list[str]) -> list[str]:
    """Requirements of the package and of the extras that neither this interpreter nor the machine meets."""
    try:
        wanted = _wanted(_project(), extras)
    except ImportError:  # an interpreter of 3.10 without pip has none of them
        return ["pip"]
    with contextlib.suppress(ImportError):  # one that cannot read requirements has none of them, either
        return [r for r in wanted if not satisfied(r) and not _stand_in(name_of(r))]
    return wanted


# Of PyTorch itself: PyPI has torch for Linux with CUDA's libraries only.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def fresh(extras: list[str]) -> list[str]:
    """pip's packages for a new environment: build tools, dependencies, and all named extras, without duplicates.
    TSN_TORCH replaces the pinned torch: `cpu` for the same version without CUDA, or another requirement or wheel."""
    content = _project()
    wanted = list(dict.fromkeys([*content["build-system"]["requires"], *_wanted(content, extras)]))
    pinned = next((r for r in wanted if r.startswith("torch==")), None)
    chosen = os.environ.get("TSN_TORCH", "")
    if pinned and chosen:
        words = ["--extra-index-url", CPU_INDEX, f"{pinned}+cpu"] if chosen == "cpu" else [chosen]
        wanted = [*(r for r in wanted if r != pinned), *words]
    return wanted


# -- compiler and headers ---------------------------------------------------------------------------------------------

EXPLICIT = "TSN_LIBFABRIC_INCLUDE"
# Its value that leaves out the fabric, even if there is one.
NO_FABRIC = "none"
# Of the EFA installer, beside the library that a job tries first.
EFA_HEADERS = "/opt/amazon/efa/include"


def compiler() -> list[str]:
    """Command of the C++ compiler: $CXX, which may carry arguments ("ccache g++"), g++, clang++ or c++; [] for none."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # an open quotation
        return []
    for command in [named] if named else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    return []


def _compiles(header: str, folders: list[str]) -> bool:
    if not compiler():
        return False
    with tempfile.TemporaryDirectory() as folder:
        probe = os.path.join(folder, "probe.cpp")
        with open(probe, "w") as f:
            f.write(f"#include <{header}>\n")
        includes = ["-I" + folder for folder in folders]
        return subprocess.run([*compiler(), *includes, "-fsyntax-only", probe], capture_output=True).returncode == 0


def _first(header: str, choices: list[list[str]]) -> list[str] | None:
    return next((folders for folders in choices if _compiles(header, folders)), None)


def python_include() -> list[str] | None:
    """Include folders for Python.h, None if there is none."""
    own = sysconfig.get_path("include")
    return _first("Python.h", [[own], [os.path.join(INCLUDE, os.path.basename(own)), INCLUDE]])


def fabric_include() -> list[str] | None:
    """Include folders for rdma/fabric.h, [] if the compiler finds it without any, None if there is none.
    TSN_LIBFABRIC_INCLUDE, if set, is the only place, or is "none". The EFA installer's precede the system's, as its
    library does when a job starts: older headers have no DMABUF."""
    explicit = os.environ.get(EXPLICIT)
    if explicit == NO_FABRIC:
        return None
    if explicit:
        return _first("rdma/fabric.h", [[explicit]])
    newest = [[EFA_HEADERS]] if os.path.exists(os.path.join(EFA_HEADERS, "rdma", "fabric.h")) else []
    return _first("rdma/fabric.h", [*newest, [], [INCLUDE]])


# -- packages of the distribution -------------------------------------------------------------------------------------

# Debian keeps ensurepip, without which venv makes no pip, in the first package; in the second, pip itself as a wheel.
VENV, PIP_WHEEL = "python3-venv", "python3-pip-whl"
PATIENCE_S = 300  # a longer step hangs on a network that drops packets
APT = "apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20".split()


def _pip_wheel() -> str | None:
    """The unpacked wheel of pip; it runs as it is."""
    return next(iter(glob.glob(os.path.join(UNPACKED, "usr", "share", "python-wheels", "pip-*.whl"))), None)


def missing_packages(what: list[str]) -> dict[str, str]:
    """Descriptions of missing `headers` and `venv`, by the Debian package that has them."""
    found = {}
    if "headers" in what and python_include() is None:
        found[f"libpython{PYTHON}-dev"] = f"the headers of Python {PYTHON} (Python.h)"
    if "headers" in what and fabric_include() is None and not os.environ.get(EXPLICIT):
        found["libfabric-dev"] = "libfabric's headers (rdma/fabric.h)"
    importlib.invalidate_caches()
    has_venv = importlib.util.find_spec("venv") and (importlib.util.find_spec("ensurepip") or _pip_wheel())
    if "venv" in what and not has_venv:
        found[VENV] = "Python's venv and ensurepip"
    return found


def make_venv(arguments: list[str]) -> None:
    """`python -m venv` with these arguments, the last of which is the folder; pip comes from its wheel without ensurepip."""
    wheel = None if importlib.util.find_spec("ensurepip") else _pip_wheel()
    commands = [[sys.executable, "-m", "venv", *(["--without-pip"] if wheel else []), *arguments]]
    if wheel:
        pip = [os.path.join(arguments[-1], "bin", "python"), os.path.join(wheel, "pip")]
        commands.append([*pip, "install", "-qq", "--no-index", "--disable-pip-version-check", wheel])
    for command in commands:
        if code := subprocess.run(command).returncode:
            sys.exit(code)


def _run(*command: str, cwd: str | None = None) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _install(packages: list[str]) -> bool:
    """As root, by apt; updates the package lists if they lack the packages."""
    install = [*APT, "install", "-y", "--no-install-recommends", *packages]
    say(f"installing {' and '.join(packages)} (up to a minute)")
    return _run(*install) or (_run(*APT, "update") and _run(*install))


def _unpack(packages: list[str]) -> bool:
    """Without root: downloads the packages and unpacks them into build/system, with package lists of our own at need."""
    say(f"unpacking {' and '.join(packages)} into {UNPACKED} (up to a minute)")
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(os.path.join(folder, "lists", "partial"))
        os.makedirs(os.path.join(folder, "cache", "archives", "partial"))
        # apt's own user may not write here, and its caches and locks belong to root.
        apt = [*APT, "-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1", "-o", f"Dir::Cache={folder}/cache"]
        own = [*apt, "-o", f"Dir::State::Lists={folder}/lists"]
        if not _run(*apt, "download", *packages, cwd=folder):
            if not _run(*own, "update") or not _run(*own, "download", *packages, cwd=folder):
                return False
        try:
            os.makedirs(UNPACKED, exist_ok=True)
        except OSError:
            return False
        return all(_run("dpkg", "-x", package, UNPACKED) for package in glob.glob(os.path.join(folder, "*.deb")))


def prepare(what: list[str]) -> None:
    """Get missing `headers` and `venv`. Exits with one message about all packages still missing."""
    if "headers" in what and not compiler():
        if named := os.environ.get("CXX"):
            sys.exit(
                f"launch.sh: CXX names {named!r}, which is no program here; unset CXX or name another C++ compiler"
            )
        # Without a compiler headers cannot be searched: name the package, which is harmless if present.
        needs = {"g++": "a C++ compiler (g++ or clang)", f"libpython{PYTHON}-dev": f"the headers of Python {PYTHON}"}
        _refuse(needs | missing_packages([each for each in what if each == "venv"]))
    needs = missing_packages(what)
    if needs and shutil.which("apt-get"):
        if not (os.geteuid() == 0 and _install(list(needs))):
            _unpack([PIP_WHEEL if package == VENV else package for package in needs])
        needs = missing_packages(what)
    if needs and list(needs) != ["libfabric-dev"]:
        _refuse(needs)
    for text in needs.values():
        say(f"{text} are not here and could not be fetched: building without the fabric, for one node only")


def _refuse(needs: dict[str, str]) -> None:
    packages = " ".join(needs)
    tried = "" if "g++" in needs else ", which could not be fetched"
    sys.exit(
        f"launch.sh: this machine lacks {', '.join(needs.values())}{tried}.\n"
        f"launch.sh: install them first; Debian, Ubuntu: apt-get install {packages}; elsewhere, packages of like names "
        "(gcc-c++, python3-devel, libfabric-devel)"
    )


def main(command: str = "", *words: str) -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 (run by whichever python3 there is)
        sys.exit(f"tilescale_net needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}")
    if command == "check":
        print(sysconfig.get_config_var("EXT_SUFFIX"), *missing([*words]), sep="\n")
    elif command == "list":
        print(*fresh([*words]), sep="\n")
    elif command == "prepare":
        prepare([*words])
    elif command == "venv" and words:
        make_venv([*words])
    elif command == "fabric":
        sys.exit(fabric_include() is None)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
