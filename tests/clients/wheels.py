"""Published wheels of frameworks, which pip downloads when a test needs one, and DeepEP's sources, which git does: without their
dependencies, never committed."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

# Downloads, of which the Python files are kept in a temporary folder for later runs.
SIZES = {
    "megatron-core==0.16.1": "2.6 MB",
    "sglang==0.5.23": "39 MB",
    "torchtitan==0.3.0": "1.3 MB",
    "vllm==0.33.0": "336 MB",
}

DEEP_EP = "https://github.com/deepseek-ai/DeepEP"
REVISIONS = {"v1.2.1": "v1.2.1", "main": "dd758caf451848bd150e1046af3d0a73e5fff38d"}


def _kept(name: str) -> Path:
    """Where a download is kept for later runs; its parent is there."""
    folder = Path(tempfile.gettempdir()) / f"tilescale_net-clients-{os.getuid()}" / name
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    return folder


def _keep(found: Path, folder: Path) -> None:
    try:
        os.rename(found, folder)
    except OSError:  # another process was faster
        if not folder.is_dir():
            raise


def deep_ep(revision: str) -> Path:
    """A checkout of DeepEP, one of REVISIONS: of the folder DEEPEP where that is set. Skips the test where it cannot be had."""
    if path := os.environ.get("DEEPEP"):
        return Path(path) / revision
    folder = _kept(f"DeepEP-{REVISIONS[revision]}")
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        found, env = Path(scratch) / "found", os.environ | {"GIT_TERMINAL_PROMPT": "0"}
        found.mkdir()
        for command in ("init -q", f"fetch -q --depth 1 {DEEP_EP} {REVISIONS[revision]}", "checkout -q FETCH_HEAD"):
            done = subprocess.run(["git", "-C", str(found), *command.split()], env=env, capture_output=True)
            if done.returncode:
                pytest.skip(f"lacks a network for {DEEP_EP}, or DEEPEP=FOLDER with checkouts v1.2.1 and main of it")
        _keep(found, folder)
    return folder


def modules(requirement: str) -> Path:
    """The folder with a framework's Python files. Skips the test where its wheel cannot be had."""
    folder = _kept(requirement.replace("==", "-"))
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        options = "-q --no-deps --only-binary :all: --ignore-requires-python --retries 1 --disable-pip-version-check"
        command = [sys.executable, "-m", "pip", "download", *options.split(), "-d", scratch, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            pytest.skip(f"lacks a network for the wheel of {requirement}, {SIZES[requirement]} (pip download)")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(scratch) / "found", [name for name in wheel.namelist() if name.endswith(".py")])
        _keep(Path(scratch) / "found", folder)
    return folder
