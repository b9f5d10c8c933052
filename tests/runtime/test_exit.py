"""The end of a program: nothing of the package outlives the interpreter."""

import os
import subprocess
import sys

SCRIPT = """
import atexit
import torch.distributed as dist

atexit.register(lambda: print("process group alive:", dist.is_initialized()))  # runs last
import tilescale_net as tsn

tsn.init("8M")
{finalize}
print("after finalize:", dist.is_initialized())
"""


def _run(finalize: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(finalize=finalize)], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_process_group_is_left_before_the_interpreter_ends():
    for finalize in ("tsn.finalize()", ""):
        printed = _run(finalize)
        assert "after finalize: True" in printed, "another init may follow"
        assert "process group alive: False" in printed
