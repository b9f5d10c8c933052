"""A source distribution and a wheel of this checkout, and environments that they are installed into."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from tests import lacking

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> list[str]:
    """Files of the checkout that git tracks or would add."""
    command = [lacking.program("git", "git"), "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and os.path.lexists(ROOT / name)]


def run(*command, **options) -> subprocess.CompletedProcess:
    """Run a program that must succeed, without the variables of an outer launcher or pytest."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "NODE", "GPUS", "VIRTUAL_", "PYTHON", "TSN_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)} | options.pop("env", {})
    done = subprocess.run(
        [str(c) for c in command], env=env, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
        **options,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done


def copy_checkout(folder: Path) -> Path:
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def add_extensions(package: Path) -> None:
    """Put the extensions that this checkout has built into a folder; as new as can be, so that nothing is compiled."""
    package.mkdir(parents=True, exist_ok=True)
    for extension in (ROOT / "tilescale_net").glob("_*" + sysconfig.get_config_var("EXT_SUFFIX")):
        shutil.copy(extension, package)


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """The folder of an unpacked source distribution."""
    folder = tmp_path_factory.mktemp("source")
    checkout = copy_checkout(folder / "checkout")
    run(sys.executable, "setup.py", "-q", "sdist", "-d", folder, cwd=checkout)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="session")
def wheel(source, tmp_path_factory) -> Path:
    """A wheel made of the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = shutil.copytree(source, folder / "tree")
    add_extensions(tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "tilescale_net")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ".", cwd=tree)
    (path,) = folder.glob("*.whl")
    return path


def new_environment(folder: Path) -> Path:
    """A virtual environment that sees the packages of the running interpreter; its python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python: Path, *packages) -> None:
    """Install into an environment of `new_environment`, without its dependencies."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "-q", "--no-deps", "--no-build-isolation", *packages)
