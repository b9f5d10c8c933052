"""What setting up needs from the operating system: a C++ compiler, Python's and libfabric's headers, and Python's venv.

Run by path before anything can be imported, by launch.sh and by setup.py; the standard library is all it uses.

    python tilescale_net/launch/system.py prepare [headers] [venv]   gets what is missing of them; fails when something still is
    python tilescale_net/launch/system.py venv [OPTION] FOLDER       makes a virtual environment with pip
    python tilescale_net/launch/system.py fabric                     fails when libfabric's headers are not found

What is missing comes from the distribution's packages: installed by root, unpacked into build/system by others.
"""

import glob
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UNPACKED = os.path.join(ROOT, "build", "system")
EXPLICIT = "TSN_LIBFABRIC_INCLUDE"
# A value of it: the fabric is left out, even if there is one.
NO_FABRIC = "none"
# Of the EFA installer, beside the library that is taken first when a job starts.
EFA_HEADERS = "/opt/amazon/efa/include"
# A step that takes longer hangs on a network that swallows packets.
PATIENCE_S = 300
QUICK = ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20"]


def say(text: str) -> None:
    print(f"launch.sh: {text}", file=sys.stderr, flush=True)


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
    """Include folders for Python.h, None when there is no such header."""
    own = sysconfig.get_path("include")
    include = os.path.join(UNPACKED, "usr", "include")
    return _first("Python.h", [[own], [os.path.join(include, os.path.basename(own)), include]])


def fabric_include() -> list[str] | None:
    """Include folders for rdma/fabric.h, [] when the compiler finds it by itself, None when there is no such header.

    TSN_LIBFABRIC_INCLUDE, where it is set, is the only place that is looked at, or is "none". Those of the EFA
    installer go before the system's, as its library does when a job starts: older headers have no DMABUF.
    """
    explicit = os.environ.get(EXPLICIT)
    if explicit == NO_FABRIC:
        return None
    if explicit:
        return _first("rdma/fabric.h", [[explicit]])
    newest = [[EFA_HEADERS]] if os.path.exists(os.path.join(EFA_HEADERS, "rdma", "fabric.h")) else []
    return _first("rdma/fabric.h", [*newest, [], [os.path.join(UNPACKED, "usr", "include")]])


def missing_headers() -> dict[str, str]:
    """What is missing, as text, by the Debian package that has it."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {}
    if python_include() is None:
        found[f"libpython{version}-dev"] = f"the headers of Python {version} (Python.h)"
    if fabric_include() is None and not os.environ.get(EXPLICIT):
        found["libfabric-dev"] = "libfabric's headers (rdma/fabric.h)"
    return found


# Debian keeps ensurepip, without which venv makes no pip, in the first package; in the second, pip itself as a wheel.
VENV, PIP_WHEEL = "python3-venv", "python3-pip-whl"


def _pip_wheel() -> str | None:
    """The wheel of pip that was unpacked; it runs as it is."""
    return next(iter(glob.glob(os.path.join(UNPACKED, "usr", "share", "python-wheels", "pip-*.whl"))), None)


def missing_venv() -> dict[str, str]:
    """What making virtual environments needs, in the form of `missing_headers`."""
    importlib.invalidate_caches()
    has = importlib.util.find_spec("venv") and (importlib.util.find_spec("ensurepip") or _pip_wheel())
    return {} if has else {VENV: "Python's venv and ensurepip"}


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
    """As root, by apt; the package lists are brought up to date when they lack the packages."""
    apt = ["apt-get", *QUICK, "-qq"]
    install = [*apt, "install", "-y", "--no-install-recommends", *packages]
    say(f"installing {' and '.join(packages)} (up to a minute)")
    return _run(*install) or (_run(*apt, "update") and _run(*install))


def _unpack(packages: list[str]) -> bool:
    """Without root: downloads the packages and unpacks them into build/system, with package lists of our own at need."""
    say(f"unpacking {' and '.join(packages)} into {UNPACKED} (up to a minute)")
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(os.path.join(folder, "lists", "partial"))
        os.makedirs(os.path.join(folder, "cache", "archives", "partial"))
        # apt's own user may not write here, and its caches and locks belong to root.
        apt = ["apt-get", *QUICK, "-qq", "-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1"]
        apt += ["-o", f"Dir::Cache={folder}/cache"]
        own = ["-o", f"Dir::State::Lists={folder}/lists"]
        if not _run(*apt, "download", *packages, cwd=folder):
            if not _run(*apt, *own, "update") or not _run(*apt, *own, "download", *packages, cwd=folder):
                return False
        try:
            os.makedirs(UNPACKED, exist_ok=True)
        except OSError:
            return False
        return all(_run("dpkg", "-x", package, UNPACKED) for package in glob.glob(os.path.join(folder, "*.deb")))


def _get(packages: list[str]) -> None:
    if shutil.which("apt-get") is None:
        return
    if os.geteuid() == 0 and _install(packages):
        return
    _unpack([PIP_WHEEL if package == VENV else package for package in packages])


def prepare(what: list[str]) -> None:
    """Get what is missing of `headers` and `venv`. Exits with one message about everything that cannot be done without."""

    def missing() -> dict[str, str]:
        return (missing_headers() if "headers" in what else {}) | (missing_venv() if "venv" in what else {})

    if "headers" in what and not compiler():
        named = os.environ.get("CXX")
        if named:
            sys.exit(
                f"launch.sh: CXX names {named!r}, which is no program here; unset CXX or name another C++ compiler"
            )
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        # Without a compiler no header can be looked for: name the package, which does no harm where it is there.
        needs = {"g++": "a C++ compiler (g++ or clang)", f"libpython{version}-dev": f"the headers of Python {version}"}
        _refuse(needs | (missing_venv() if "venv" in what else {}))
    needs = missing()
    if needs:
        _get(list(needs))
        needs = missing()
    fabric = needs.pop("libfabric-dev", None)
    if needs:
        _refuse({**needs, **({"libfabric-dev": fabric} if fabric else {})})
    if fabric:
        say(f"{fabric} are not here and could not be fetched: building without the fabric, for one node only")


def _refuse(needs: dict[str, str]) -> None:
    packages = " ".join(needs)
    tried = "" if "g++" in needs else ", which could not be fetched"
    sys.exit(
        f"launch.sh: this machine lacks {', '.join(needs.values())}{tried}.\n"
        f"launch.sh: install them first; Debian, Ubuntu: apt-get install {packages}; elsewhere, packages of like names "
        "(gcc-c++, python3-devel, libfabric-devel)"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["prepare"]:
        prepare(sys.argv[2:])
    elif sys.argv[1:2] == ["venv"] and len(sys.argv) > 2:
        make_venv(sys.argv[2:])
    elif sys.argv[1:] == ["fabric"]:
        sys.exit(fabric_include() is None)
    else:
        sys.exit(__doc__)
