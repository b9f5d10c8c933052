"""Getting what building needs from the operating system: with a compiler and package programs that only look at files."""

import os
import runpy
import shutil
import stat
import subprocess
import sys

import pytest

from tests.launch.conftest import ROOT, clean_environment

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
# Finds a header in the folders after -I and in $SYSTEM, as a compiler would.
COMPILER = """#!{python}
import os, re, sys
if "--wrapped" in os.environ.get("NEEDS", "") and "--wrapped" not in sys.argv:
    sys.exit(1)
header = re.search("<(.*)>", open(sys.argv[-1]).read())[1]
folders = [a[2:] for a in sys.argv if a.startswith("-I")] + [os.environ["SYSTEM"]]
sys.exit(not any(os.path.exists(os.path.join(f, header)) for f in folders))
"""
# `download` writes a file for each package, `install` puts its headers into $SYSTEM; $OFFLINE makes both fail.
APT = """#!{python}
import os, sys
open(os.environ["LOG"], "a").write(" ".join(sys.argv[1:]) + chr(10))
if os.environ.get("OFFLINE"):
    sys.exit(100)
if "download" in sys.argv:
    for package in sys.argv[sys.argv.index("download") + 1:]:
        open(package + "_1.deb", "w").close()
"""
# Unpacks the headers that a package of this name has; pip is a program that prints where it runs.
DPKG = """#!{python}
import os, sys, zipfile
if "pip-whl" in sys.argv[2]:
    wheels = os.path.join(sys.argv[3], "usr", "share", "python-wheels")
    os.makedirs(wheels)
    with zipfile.ZipFile(os.path.join(wheels, "pip-1-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("pip/__main__.py", "import sys; print(sys.prefix, *sys.argv)")
    sys.exit()
package, include = os.path.basename(sys.argv[2]), os.path.join(sys.argv[3], "usr", "include")
header = "rdma/fabric.h" if "fabric" in package else "python{version}/Python.h"
os.makedirs(os.path.dirname(os.path.join(include, header)), exist_ok=True)
open(os.path.join(include, header), "w").close()
"""


@pytest.fixture
def machine(tmp_path):
    """`machine(...)` runs the preparation on a machine that has a compiler, no root, apt-get and no headers."""
    script = tmp_path / "tilescale_net" / "launch" / "set_up.py"
    script.parent.mkdir(parents=True)
    text = open(os.path.join(ROOT, "tilescale_net", "launch", "set_up.py")).read()
    # Python's own headers are there on this machine; the user here is not root.
    text = text.replace('sysconfig.get_path("include")', repr(f"/nowhere/python{VERSION}"))
    text = text.replace('importlib.util.find_spec("ensurepip")', "os.path.exists(os.path.join(ROOT, 'ensurepip'))")
    script.write_text(text.replace("os.geteuid() == 0", 'bool(os.environ.get("ROOT"))'))
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "include").mkdir()
    for name, program in (("g++", COMPILER), ("apt-get", APT), ("dpkg", DPKG)):
        (programs / name).write_text(program.format(python=sys.executable, version=VERSION))
        (programs / name).chmod(0o755)

    def run(*words, **env):
        environment = clean_environment(PATH=str(programs), SYSTEM=str(tmp_path / "include"), LOG=str(tmp_path / "log"))
        for name in ("CXX", "TSN_LIBFABRIC_INCLUDE", "VIRTUAL_ENV"):
            environment.pop(name, None)
        return subprocess.run(
            [sys.executable, script, *(words or ("prepare", "headers"))], env=environment | env, capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip

    run.root, run.programs = tmp_path, programs
    return run


def test_without_root_headers_are_unpacked_beside_the_build(machine):
    done = machine()
    assert done.returncode == 0, done.stderr
    assert f"unpacking libpython{VERSION}-dev and libfabric-dev into {machine.root}/build/system" in done.stderr
    unpacked = machine.root / "build" / "system" / "usr" / "include"
    assert {p.name for p in unpacked.rglob("*.h")} == {"Python.h", "fabric.h"}
    again = machine(OFFLINE="1")
    assert (again.returncode, again.stderr) == (0, "")


def test_all_missing_parts_are_reported_at_once(machine):
    done = machine(OFFLINE="1")
    assert done.returncode == 1
    assert "Python.h" in done.stderr and "rdma/fabric.h" in done.stderr
    assert f"apt-get install libpython{VERSION}-dev libfabric-dev" in done.stderr
    (machine.programs / "g++").unlink()
    done = machine()
    assert done.returncode == 1
    assert f"apt-get install g++ libpython{VERSION}-dev" in done.stderr


def test_without_libfabrics_headers_there_is_no_fabric(machine):
    (machine.root / "include" / "Python.h").touch()
    done = machine(OFFLINE="1")
    assert done.returncode == 0
    assert "building without the fabric, for one node only" in done.stderr
    (machine.programs / "apt-get").unlink()
    assert machine().returncode == 0
    # Where that is wanted, nothing is looked for or fetched.
    (machine.root / "include" / "rdma").mkdir()
    (machine.root / "include" / "rdma" / "fabric.h").touch()
    assert machine("fabric").returncode == 0 and machine("fabric", TSN_LIBFABRIC_INCLUDE="none").returncode == 1
    done = machine("prepare", "headers", TSN_LIBFABRIC_INCLUDE="none")
    assert done.returncode == 0 and done.stderr == ""


def test_pip_of_a_machine_without_ensurepip(machine):
    (machine.root / "include" / "Python.h").touch()
    folder = machine.root / "environment"
    done = machine("prepare", "venv", OFFLINE="1")
    assert done.returncode == 1 and "lacks Python's venv and ensurepip, which could not be fetched" in done.stderr
    assert "apt-get install python3-venv" in done.stderr
    done = machine("prepare", "headers", "venv")
    assert done.returncode == 0 and "unpacking libfabric-dev and python3-pip-whl" in done.stderr, done.stderr
    done = machine("venv", str(folder))
    assert done.returncode == 0 and done.stdout.startswith(f"{folder} ") and " install " in done.stdout, done.stderr
    done = machine("prepare", "headers", "venv", OFFLINE="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_root_installs_the_packages_of_venv(machine):
    done = machine("prepare", "venv", ROOT="1", OFFLINE="1")
    assert done.returncode == 1 and "installing python3-venv" in done.stderr
    (machine.root / "ensurepip").touch()
    assert machine("prepare", "venv", ROOT="1", OFFLINE="1").stderr == ""
    done = machine("venv", "--without-pip", str(machine.root / "environment"))
    assert done.returncode == 0 and (machine.root / "environment" / "bin" / "python").exists(), done.stderr


def test_headers_of_the_efa_installer_go_before_the_systems(tmp_path, monkeypatch):
    """Debian's headers are older, without DMABUF; the library is taken in the same order."""
    monkeypatch.delenv("TSN_LIBFABRIC_INCLUDE", raising=False)
    fabric_include = runpy.run_path(os.path.join(ROOT, "tilescale_net", "launch", "set_up.py"))["fabric_include"]
    monkeypatch.setitem(fabric_include.__globals__, "_compiles", lambda header, folders: True)
    monkeypatch.setitem(fabric_include.__globals__, "EFA_HEADERS", str(tmp_path))
    assert fabric_include() == []
    (tmp_path / "rdma").mkdir()
    (tmp_path / "rdma" / "fabric.h").touch()
    assert fabric_include() == [str(tmp_path)]


def test_a_compiler_with_arguments(machine):
    shutil.move(machine.programs / "g++", machine.programs / "mine")
    assert "a C++ compiler" in machine().stderr
    done = machine(CXX="mine --wrapped", NEEDS="--wrapped")
    assert done.returncode == 0, done.stderr
    done = machine(CXX="nosuchcxx -O2")
    assert done.returncode == 1
    assert (
        done.stderr
        == "launch.sh: CXX names 'nosuchcxx -O2', which is no program here; unset CXX or name another C++ compiler\n"
    )


def test_a_checkout_that_cannot_be_written(machine):
    if os.geteuid() == 0:
        (machine.root / "build").write_text("a file where the folder would be")
    else:
        machine.root.chmod(stat.S_IRUSR | stat.S_IXUSR)
    done = machine()
    machine.root.chmod(0o755)
    assert done.returncode == 1 and "Python.h" in done.stderr
