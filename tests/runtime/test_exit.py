"""The end of a program or world: nothing of the package outlives the interpreter, no kernel the memory it uses."""

import json
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

LEAVES = """
import atexit, os, sys
import torch.distributed as dist

atexit.register(lambda: print("process group alive:", dist.is_initialized()))  # runs last
import tilescale_net as tsn

for finalizes in (True, False):
    if (pid := os.fork()) == 0:
        tsn.init("8M")
        if finalizes:
            tsn.finalize()
        print("another init may follow:", dist.is_initialized())
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0
os._exit(0)
"""


def test_process_group_is_left_before_the_interpreter_ends():
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", LEAVES], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "another init may follow: True\nprocess group alive: False\n" * 2


# Each text runs in a fork of a program that has imported the package, to its end, with a world that prints how it ends.
END = """
import json, os, sys, threading
from sys import exit as early
from tilescale_net.runtime import worlds

class World:
    failure = None
    announce = give_up = lambda self, why: print(why)
    close = lambda self, described_as: print(described_as)

worlds._take_all = lambda: [World()]
for number, text in enumerate(json.loads(sys.argv[1])):
    if (pid := os.fork()) == 0:
        os.dup2(os.open(f"{sys.argv[2]}/{number}", os.O_CREAT | os.O_WRONLY), 1)
        worlds.watch_process_end()
        exec(text)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
ENDS = [
    ("sys.exit(3)", 3),
    ("early(3)", 3),
    ("exit(3)", 3),
    ("quit('a word')", 1),
    ("raise SystemExit(259)", 3),
    ("raise SystemExit", 0),
    ("try: early(3)\nexcept SystemExit as e: assert e.code == 3", 0),
    ("try: early(3)\nexcept SystemExit as e: e.code = 4; raise", 4),
    ("threading.Thread(target=sys.exit, args=(3,)).start()", 0),
]


def test_code_of_the_end(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", END, json.dumps([text for text, _ in ENDS]), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert [int(code) for code in done.stdout.split()] == [code for _, code in ENDS], done.stderr
    for number, (text, code) in enumerate(ENDS):
        said = f"it ended (exit code {code})" if code else "ended (exit code 0)"
        assert (tmp_path / str(number)).read_text().strip() == said, text


@ranks.on(TSN_DEVICE="simulator", TSN_TIMEOUT="3")
def test_finalize_waits_for_kernels_of_other_threads():
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
    assert said == ["WaitTimeout"] * (rank == 0), said
