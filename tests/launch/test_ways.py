"""Other ways than launch.sh to start ranks: torchrun, cells of a notebook, a test of pytest's."""

import subprocess
import sys

from tests.launch.conftest import ROOT, clean_environment

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


def test_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SUM + GROUPS)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc-per-node=2",
        "--standalone",
        "script.py",
    ]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 4", "rank 1 of 2: 8"]


def test_cells_of_a_notebook_and_a_test(tmp_path):
    """One process: cells are executed one by one in one namespace, and init again after finalize is a second job."""
    cells = [
        SUM,
        SUM,
        "import tilescale_net as tsn; tsn.init(); assert tsn.size() == 1",
        "tsn.finalize(); print('end')",
    ]
    program = f"names = {{}}\nfor cell in {cells!r}:\n    exec(compile(cell, '<cell>', 'exec'), names)\n"
    (tmp_path / "notebook.py").write_text(program)
    (tmp_path / "test_one.py").write_text(
        f"def test_sum(capsys):\n    exec({SUM!r}, {{}})\n    assert 'rank 0 of 1: 4' in capsys.readouterr().out\n"
    )
    done = run([sys.executable, "notebook.py"], tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["rank 0 of 1: 4"] * 2 + ["end"]), done.stderr
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_one.py"], tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
