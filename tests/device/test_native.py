"""Device headers as plain host programs, under the address and undefined-behaviour sanitizers."""

import os
import subprocess

import pytest

import tilescale_net

HERE = os.path.dirname(__file__)
DEVICE = os.path.join(os.path.dirname(tilescale_net.__file__), "device")


@pytest.mark.parametrize("name", ["engines", "semantics"])
def test_program(name, tmp_path):
    program = str(tmp_path / name)
    build = [
        "g++", "-std=c++17", "-O1", "-g", "-Wall", "-Werror", "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all", f"-I{DEVICE}", os.path.join(HERE, f"{name}.cpp"), "-o", program, "-pthread",
    ]  # fmt: skip
    subprocess.run(build, check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
