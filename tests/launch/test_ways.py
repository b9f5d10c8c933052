"""Other ways than launch.sh to start ranks: torchrun, cells of a notebook, a test of pytest's."""

import os
import subprocess
import sys

from tests import lacking
from tests.launch.conftest import ROOT, clean_environment
from tests.variants import variants
from tilescale_net.launch.run import reserve_port

# As tests/conftest.py chooses; a clean environment lacks it.
FLAGS = {name: os.environ[name] for name in ("TSN_SIM_CXXFLAGS",) if name in os.environ}

SUM = """
import torch, tilescale_net as tsn
tsn.init("8M")
x = tsn.zeros(4)
x.fill_(tsn.rank() + 1)
tsn.barrier()
print(f"rank {tsn.rank()} of {tsn.size()}: {x.sum().item():g}\\n", end="", flush=True)
tsn.finalize()
"""


def run(command: list[str], cwd) -> subprocess.CompletedProcess:
    env = clean_environment(PYTHONPATH=ROOT, OMP_NUM_THREADS="1")
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=250)


# A program of torch.distributed that makes groups, one of them in another order, and then this package's worlds of them.
GROUPS = """
import torch, torch.distributed as dist
dist.destroy_process_group()  # which the first init has made
dist.init_process_group("gloo")
groups = [dist.new_group([1, 0]), dist.new_group([0]), dist.new_group([1])]
mine = [groups[0], groups[1 + dist.get_rank()]]
for world in [tsn.init("4M", group=g) for g in mine]:
    y = tsn.zeros(world.size, group=world)
    tsn.barrier(group=world)
    assert world.job_ranks[world.rank] == dist.get_rank() and y.numel() == len(world.job_ranks)
dist.barrier()
tsn.finalize()
dist.destroy_process_group()
"""


# Once a rank has died, the agent starts all again, with the same store.
DIES = """
import os, signal
import tilescale_net as tsn
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    tsn.init("4M")
    tsn.barrier()
    if tsn.rank() == 1:
        os._exit(7)
    tsn.barrier()
"""


@variants(1, "place", ["--standalone", "--master-port"])
def test_torchrun(tmp_path, place):
    (tmp_path / "script.py").write_text(DIES + SUM + GROUPS)
    if place == "--master-port":
        with reserve_port("127.0.0.1") as reserved:
            place = f"--master-port={reserved.getsockname()[1]}"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc-per-node=2",
        "--max-restarts=1",
        place,
        "script.py",
    ]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 4", "rank 1 of 2: 8"]


# A kernel is defined in a cell, whose source tilelang reads; then it is called when its world has ended.
KERNEL = """
import tilelang.language as T, tilescale_net.language as N
tsn.init("8M")
@tsn.jit
def twice(n):
    @T.prim_func
    def main(ctx: N.Context(), x: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                x[i] = x[i] * 2
    return main
x = tsn.zeros(32)
x.fill_(3)
twice(32)(x)
print(x.sum().item())
tsn.finalize()
"""


def test_cells_of_a_notebook(tmp_path):
    """In a kernel of Jupyter's: init again after finalize is a second job, and an error ends its cell, not the kernel."""
    lacking.module("ipykernel", "a kernel of Jupyter's")
    jupyter_client = lacking.module("jupyter_client", "a client of Jupyter's")
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path), env=clean_environment(PYTHONPATH=ROOT, OMP_NUM_THREADS="1", **FLAGS))
    client = manager.blocking_client()
    client.start_channels()
    said: list[str] = []

    def note(message) -> None:
        if message["content"].get("name") == "stdout":
            said.append(message["content"]["text"])

    try:
        client.wait_for_ready(timeout=100)
        for cell in (SUM, SUM, KERNEL):
            reply = client.execute_interactive(cell, output_hook=note, timeout=200)
            assert reply["content"]["status"] == "ok", reply["content"]
        reply = client.execute_interactive("tsn.barrier()", output_hook=note, timeout=100)["content"]
        assert reply["status"] == "error" and "not initialised" in reply["evalue"], reply
        client.execute_interactive("print('end')", output_hook=note, timeout=100)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "".join(said).splitlines() == ["rank 0 of 1: 4"] * 2 + ["192.0", "end"]


def test_a_test_of_pytests(tmp_path):
    (tmp_path / "test_one.py").write_text(
        f"def test_sum(capsys):\n    exec({SUM!r}, {{}})\n    assert 'rank 0 of 1: 4' in capsys.readouterr().out\n"
    )
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_one.py"], tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
