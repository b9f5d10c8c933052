"""The end of a program or world: nothing of the package outlives the interpreter, no kernel the memory it uses."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tilescale_net.kernels.send_recv import SendRecv
from tilescale_net.runtime import simulator

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


# A world that prints how it ends, in a program of which only the end counts.
END = """
import sys, threading
from sys import exit as early
from tilescale_net.runtime import worlds

class World:
    failure = None
    announce = give_up = lambda self, why: print(why)
    close = lambda self, described_as: print(described_as)

worlds._take_all = lambda: [World()]
worlds.watch_process_end()
"""


@pytest.mark.parametrize(
    "text, code",
    [
        ("sys.exit(3)", 3),
        ("early(3)", 3),
        ("exit(3)", 3),
        ("quit('a word')", 1),
        ("raise SystemExit(259)", 3),
        ("raise SystemExit", 0),
        ("try: early(3)\nexcept SystemExit as e: assert e.code == 3", 0),
        ("try: early(3)\nexcept SystemExit as e: e.code = 4; raise", 4),
        ("threading.Thread(target=sys.exit, args=(3,)).start()", 0),
    ],
)
def test_code_of_the_end(text, code):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", END + text], env=env, capture_output=True, text=True, timeout=100)
    said = f"it ended (exit code {code})" if code else "ended (exit code 0)"
    assert (done.returncode, done.stdout.strip()) == (code, said), done.stderr


def _finalize_beside_a_kernel():
    """A thread waits in a kernel for a message that no rank sends."""
    op, rank, said = SendRecv(chunk=128, threads=32, blocks=2), tsn.rank(), []

    def receive():
        try:
            op.recv(torch.zeros(4), 1)
        except tsn.TileScaleError as error:
            said.append(type(error).__name__)

    thread = threading.Thread(target=receive)
    tsn.barrier()
    if rank == 0:
        thread.start()
        while not simulator.running._heaps:
            time.sleep(0.01)
    with pytest.raises(tsn.TileScaleError, match="rank 0: wait in block|rank 0 failed"):
        tsn.finalize()
    if rank == 0:
        thread.join()
    tsn.init("4M")
    return said


def test_finalize_waits_for_kernels_of_other_threads():
    env = {"TSN_DEVICE": "simulator", "TSN_TIMEOUT": "3"}
    assert ranks.run(2, _finalize_beside_a_kernel, env=env) == [["WaitTimeout"], []]
