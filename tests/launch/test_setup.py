"""Choosing an interpreter, installing, building: in a copy of the launcher with a native part that builds in no time."""

import importlib.metadata
import os
import runpy
import shutil
import subprocess
import sys

import pytest

from tests.launch.conftest import ROOT, clean_environment

requirements = runpy.run_path(os.path.join(ROOT, "tilescale_net", "launch", "set_up.py"))

FAKE_BUILD = """
import sysconfig, time
for name in ("_native", "_simulator"):
    with open(f"tilescale_net/{name}{sysconfig.get_config_var('EXT_SUFFIX')}", "a") as f:
        f.write(open("tilescale_net/csrc/part.cpp").read())
    if "slow" in open("tilescale_net/csrc/part.cpp").read():
        time.sleep(0.7)
    assert "broken" not in open("tilescale_net/csrc/part.cpp").read(), "part.cpp: error: broken"
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the real launcher and a pretended native part; `checkout(*args)` runs its launch.sh."""
    root = tmp_path / "checkout"
    shutil.copytree(os.path.join(ROOT, "tilescale_net", "launch"), root / "tilescale_net" / "launch")
    shutil.copytree(os.path.join(ROOT, "tilescale_net", "runtime"), root / "tilescale_net" / "runtime")
    for part in ("__init__", "errors"):
        shutil.copy(os.path.join(ROOT, "tilescale_net", f"{part}.py"), root / "tilescale_net" / f"{part}.py")
    for name in ("launch.sh", "pyproject.toml"):
        shutil.copy(os.path.join(ROOT, name), root)
    (root / "setup.py").write_text(FAKE_BUILD)
    for folder in ("csrc", "device"):
        (root / "tilescale_net" / folder).mkdir()
    (root / "tilescale_net" / "csrc" / "part.cpp").write_text("1")
    (root / "hello.py").write_text("print('hello')")

    def run(*arguments, **env):
        environment = clean_environment(**{"TSN_BUILD": "1", "PYTEST_XDIST_AUTO_NUM_WORKERS": "1", **env})
        return subprocess.run(
            ["bash", "launch.sh", *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=120
        )

    run.root = root
    return run


def without_network(tmp_path, **env: str) -> dict[str, str]:
    """Variables with which an interpreter is chosen, and pip finds nothing."""
    env = {"TSN_PYTHON": "", "VIRTUAL_ENV": "", "TSN_VENV": str(tmp_path / "venv"), **env}
    return {**env, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def bare_python(folder) -> str:
    """The path that finds a python3 without any packages first."""
    folder.mkdir()
    (folder / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (folder / "python3").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def built(root) -> str:
    (path,) = (root / "tilescale_net").glob("_native*")
    return path.read_text()


def age(path) -> None:
    """Make a file older than everything just written."""
    stat = os.stat(path)
    os.utime(path, (stat.st_atime - 100, stat.st_mtime - 100))


def test_builds_when_sources_are_newer_and_only_then(checkout):
    first = checkout("hello.py", GPUS="2")
    assert (first.returncode, first.stdout) == (0, "hello\n"), first.stderr
    assert "building" in first.stderr and built(checkout.root) == "1"
    second = checkout("hello.py", GPUS="2")
    assert second.stderr == "" and built(checkout.root) == "1"
    source = checkout.root / "tilescale_net" / "csrc" / "part.cpp"
    for library in (checkout.root / "tilescale_net").glob("_*.so"):
        age(library)
    source.write_text("2")
    assert "building" in checkout("hello.py", GPUS="1").stderr
    assert built(checkout.root) == "12"


def test_build_failure_shows_the_compilers_words(checkout):
    (checkout.root / "tilescale_net" / "csrc" / "part.cpp").write_text("broken")
    done = checkout("hello.py")
    assert done.returncode == 1
    assert "part.cpp: error: broken" in done.stderr and "the build failed" in done.stderr
    assert done.stdout == ""


def test_a_long_step_is_not_silent(checkout):
    (checkout.root / "tilescale_net" / "csrc" / "part.cpp").write_text("slow")
    launcher = checkout.root / "launch.sh"
    launcher.write_text(launcher.read_text().replace("read -rt 15", "read -rt 0.2"))
    done = checkout("hello.py", GPUS="1")
    assert done.returncode == 0 and "launch.sh: still building (" in done.stderr
    assert "still" not in checkout("hello.py", GPUS="1").stderr


def test_a_checkout_of_another_user_names_the_missing_parts(checkout, tmp_path):
    """Whose interpreter only its owner may start, and which nobody else can write."""
    (checkout.root / "build").write_text("a file where the folder would be")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/nonexistent/python")
    done = checkout("hello.py", **without_network(tmp_path), PATH=bare_python(tmp_path / "bin"))
    assert done.returncode == 1
    assert f"{python} does not start" in done.stderr and "python3 lacks: tilelang>=" in done.stderr
    assert "cannot be written, and something must be installed in it" in done.stderr


@pytest.mark.sample(0)
def test_pytest_runs_in_the_checkout(checkout, tmp_path):
    (checkout.root / "tests").mkdir()
    (checkout.root / "tests" / "test_one.py").write_text("def test_pass(): pass\ndef test_fail(): assert False\n")
    assert "1 passed" in checkout("pytest", "-k", "pass", GPUS="2").stdout
    assert checkout("pytest").returncode == 1


def test_setup_only_prints_the_interpreter(checkout):
    done = checkout("--setup-only")
    assert done.returncode == 0, done.stderr
    assert os.path.samefile(done.stdout.strip(), sys.executable)


def test_complete_interpreter_installs_nothing(checkout, tmp_path):
    """No network is touched where everything is importable: pip is a program that fails."""
    missing = requirements["missing"]([])
    if missing:
        pytest.skip(f"the running interpreter lacks {missing}")
    done = checkout("hello.py", **without_network(tmp_path, VIRTUAL_ENV=sys.prefix))
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert "setting up" not in done.stderr and not (tmp_path / "venv").exists()


@pytest.mark.sample(0)
def test_a_failed_installation_is_reported_and_leaves_nothing(checkout, tmp_path):
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('tilelang') is None)"
    if subprocess.run(["python3", "-c", probe]).returncode == 0:
        pytest.skip("python3 has tilelang, so that nothing would be installed")
    done = checkout("hello.py", **without_network(tmp_path))
    assert done.returncode == 1
    assert "could not be installed" in done.stderr or "ensurepip, which could not be fetched" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    "script, env, said",
    [
        ("helo.py", {}, "there is no script 'helo.py'"),
        ("hello.py", {"TSN_HEAPSIZE": "1G"}, "did you mean TSN_HEAP_SIZE?"),
        ("hello.py", {"GPUS": "two"}, "GPUS='two' is not a whole number"),
    ],
)
def test_errors_are_reported_before_installation(checkout, tmp_path, script, env, said):
    done = checkout(script, **without_network(tmp_path, **env), PATH=bare_python(tmp_path / "bin"))
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr
    assert "setting up" not in done.stderr and not (tmp_path / "venv").exists()


def test_missing_packages_of_tsn_python_are_reported(checkout, tmp_path):
    bare = bare_python(tmp_path / "bin").partition(":")[0] + "/python3"
    done = checkout("hello.py", TSN_PYTHON=bare)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"TSN_PYTHON={bare} lacks: tilelang>=" in done.stderr and "torch>=2.6" in done.stderr
    assert "leave TSN_PYTHON out" in done.stderr and "building" not in done.stderr
    # What may be of another version is reported, and runs.
    project = checkout.root / "pyproject.toml"
    project.write_text(project.read_text().replace('"torch>=2.6"', '"torch>=999"'))
    done = checkout("hello.py", TSN_BUILD="0")
    assert (done.returncode, done.stdout) == (0, "hello\n") and "lacks: torch>=999" in done.stderr


@pytest.mark.sample(0)
def test_tests_run_with_installed_packages_when_none_can_be_added(checkout, tmp_path):
    if requirements["missing"]([]):
        pytest.skip("the running interpreter lacks packages that running needs")
    project = checkout.root / "pyproject.toml"
    project.write_text(project.read_text().replace("test = [", 'test = ["no-such-package-anywhere", '))
    (checkout.root / "tests").mkdir()
    (checkout.root / "tests" / "test_one.py").write_text("def test_pass(): pass\n")
    done = checkout("pytest", **without_network(tmp_path, VIRTUAL_ENV=sys.prefix))
    assert done.returncode == 0, done.stderr
    assert "which lacks: no-such-package-anywhere" in done.stderr
    assert "1 passed" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_requirements_come_from_pyproject():
    fresh = requirements["fresh"](["test", "fresh"])
    names = [requirements["name_of"](r) for r in fresh]
    assert {"tilelang", "torch", "pytest", "setuptools", "pybind11"} <= set(names)
    assert "torch==2.13.0" in fresh


@pytest.mark.parametrize(
    "chosen, torch",
    [
        ("", ["torch==2.13.0"]),
        ("cpu", ["--extra-index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0+cpu"]),
        ("torch==2.11.0", ["torch==2.11.0"]),
        ("/wheels/torch-2.11.0-cp311-cp311-linux_x86_64.whl", ["/wheels/torch-2.11.0-cp311-cp311-linux_x86_64.whl"]),
    ],
)
def test_tsn_torch_chooses_the_torch_of_a_new_environment(monkeypatch, chosen, torch):
    monkeypatch.setenv("TSN_TORCH", chosen)
    wanted = requirements["fresh"](["fresh"])
    assert [w for w in wanted if w.startswith(("torch==", "/wheels", "--extra", "https"))] == torch
    assert "torch>=2.6" in wanted and "torch==2.13.0" not in requirements["fresh"]([])


def test_pins_are_checked():
    satisfied = requirements["satisfied"]
    assert satisfied("pytest>=8")
    assert satisfied(f"pytest=={pytest.__version__}")
    assert not satisfied("pytest==0.1")
    assert not satisfied("no-such-package-anywhere")


def test_a_version_that_was_built_here_is_one_of_the_range(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0.dev20250801+cu128")
    assert requirements["satisfied"]('torch[x] >= 2.6 , != 2.7; python_version >= "3"')
    assert not requirements["satisfied"]("torch>=2.9")


def test_all_requirements_can_be_checked(monkeypatch):
    groups = ["test", "fresh", "bench", "docs", "lint"]
    for requirement in requirements["fresh"](groups):
        requirements["satisfied"](requirement)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    assert "torch>=2.6" in requirements["missing"]([])
