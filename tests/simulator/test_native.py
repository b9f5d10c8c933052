"""The simulator's native part as a plain program: under sanitizers, and with POSIX contexts instead of its own switch."""

import glob
import os
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.mark.parametrize("flags", ["-fsanitize=address,undefined", "-DTSN_SIM_PORTABLE_FIBERS"])
def test_program(flags, tmp_path):
    program = str(tmp_path / "simulator_test")
    sources = glob.glob(os.path.join(ROOT, "tilescale_net", "csrc", "simulator", "*.cpp"))
    sources = [s for s in sources if not s.endswith("module.cpp")]
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}", *flags.split(),
         os.path.join(ROOT, "tests", "native", "simulator_test.cpp"), *sources, "-o", program, "-ldl", "-lpthread"],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
