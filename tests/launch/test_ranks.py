"""The environment of ranks: variables, output, addresses."""

import ast
import os
import pty
import runpy
import subprocess
import sys

import pytest

from tests.launch.conftest import LAUNCH, ROOT, clean_environment, launch, start, wait_until
from tests.variants import variants
from tilescale_net.runtime import placement

SHOW = """
names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE', 'MASTER_ADDR',
         'MASTER_PORT']
print({n: os.environ.get(n) for n in names})
"""


def shown(text: str) -> list[dict]:
    return [ast.literal_eval(line[line.index("{") :]) for line in text.splitlines() if "{" in line]


def test_ranks_get_torchruns_variables(script):
    done = launch(script(SHOW), GPUS="3", TSN_OUTPUT="all")
    assert done.returncode == 0, done.stderr
    ranks = shown(done.stdout) + shown(done.stderr)
    assert sorted(r["RANK"] for r in ranks) == ["0", "1", "2"]
    for rank in ranks:
        assert rank["LOCAL_RANK"] == rank["RANK"]
        assert rank["WORLD_SIZE"] == rank["LOCAL_WORLD_SIZE"] == "3"
        assert rank["MASTER_ADDR"] == "127.0.0.1"
    assert len({r["MASTER_PORT"] for r in ranks}) == 1


@pytest.mark.parametrize(
    "output, err", [({}, "err 0\n"), ({"TSN_OUTPUT": "all"}, "err 0\n[rank 1] out 1\n[rank 1] err 1\n")]
)
def test_output(script, output, err):
    done = launch(script("print('out', rank); print('err', rank, file=sys.stderr)"), GPUS="2", **output)
    assert (done.returncode, done.stdout) == (0, "out 0\n")
    assert sorted(done.stderr.splitlines()) == sorted(err.splitlines())


def test_arguments_reach_the_script_unchanged(script):
    done = launch(script("print(sys.argv[1:])"), "a b", "--x=*", "", GPUS="1")
    assert done.stdout == "['a b', '--x=*', '']\n"


def test_ports_differ_between_jobs_and_can_be_given(script):
    path = script(SHOW)
    ports = {shown(launch(path, GPUS="1").stdout)[0]["MASTER_PORT"] for _ in range(3)}
    assert len(ports) > 1
    assert shown(launch(path, GPUS="1", MASTER_PORT="12345").stdout)[0]["MASTER_PORT"] == "12345"


def test_the_port_is_for_rank_zero_alone(script):
    use = """
import errno, socket
port = int(os.environ["MASTER_PORT"])
try:
    socket.socket().bind(("", port))
except OSError as error:
    print("others:", errno.errorcode[error.errno])
from torch.distributed import TCPStore
for libuv in (False, True):
    store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=True, use_libuv=libuv)
    store.set("key", "value")
    print("rank 0:", store.get("key").decode())
    del store
"""
    assert launch(script(use), GPUS="1").stdout == "others: EADDRINUSE\nrank 0: value\nrank 0: value\n"


def test_ranks_of_one_host_meet_on_loopback_alone(script):
    """The store listens before rank 0 starts, and nowhere else; a variable left from a job around this one counts for nothing."""
    use = """
import subprocess
from tilescale_net.runtime import bootstrap, placement
place = placement.launched_rank(5.0)
if rank == 1:
    os.environ["MASTER_PORT"] = "1"
    assert placement.launched_rank(5.0).port == 1
    sys.exit()
store = bootstrap._connect(place, 5.0)
store.set("key", "value")
print(place.address, store.get("key").decode(), bootstrap._prefix() != "tsn", "TSN_STORE_FD" in os.environ)
with open("/proc/net/tcp") as f:
    print([l.split()[1].split(":")[0] for l in f if f":{place.port:04X} " in l.split()[1] + " " and l.split()[3] == "0A"])
with open("/proc/net/tcp6") as f:
    print([l for l in f if f":{place.port:04X} " in l.split()[1] + " " and l.split()[3] == "0A"])
"""
    done = launch(script(use), GPUS="2", timeout=90)
    assert done.stdout == "127.0.0.1 value True False\n['0100007F']\n[]\n", done.stdout + done.stderr


def test_hosts_number_their_ranks_one_after_the_other(script):
    path = script(SHOW)
    common = dict(NODES="2", GPUS="2", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", TSN_OUTPUT="all")
    hosts = [start(path, NODE_RANK=str(node), **common) for node in range(2)]
    ranks = []
    for host in hosts:
        out, err = host.communicate(timeout=30)
        assert host.returncode == 0, err
        ranks += shown(out) + shown(err)
    assert sorted(int(r["RANK"]) for r in ranks) == [0, 1, 2, 3]
    assert all(int(r["RANK"]) == 2 * int(r["GROUP_RANK"]) + int(r["LOCAL_RANK"]) for r in ranks)
    assert {r["WORLD_SIZE"] for r in ranks} == {"4"}
    assert {r["MASTER_ADDR"] for r in ranks} == {"10.0.0.1"}


def test_srun_task_is_a_rank(script):
    done = launch(
        script(SHOW), SLURM_PROCID="3", SLURM_STEP_NUM_TASKS="4", SLURM_LOCALID="1", SLURM_NNODES="2",
        SLURM_NODEID="1", MASTER_ADDR="n0", MASTER_PORT="4000", GPUS="2",
    )  # fmt: skip
    (rank,) = shown(done.stdout)
    assert (rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"], rank["MASTER_ADDR"]) == ("3", "1", "4", "n0")


def test_srun_task_per_host_starts_its_ranks(script, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\necho first\necho second\n")
    (tools / "scontrol").chmod(0o755)
    done = launch(
        script(SHOW), GPUS="2", SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_NNODES="4", SLURM_NODEID="1",
        SLURM_STEP_NUM_NODES="2", SLURM_NTASKS="2", SLURM_JOB_ID="9", SLURM_JOB_NODELIST="whatever[0-1]", TSN_OUTPUT="all", PATH=f"{tools}:{os.environ['PATH']}",
    )  # fmt: skip
    ranks = shown(done.stdout) + shown(done.stderr)
    assert sorted(r["RANK"] for r in ranks) == ["2", "3"]
    assert {(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks} == {("first", "20063")}


# What the shell of `salloc -n 4` has, a batch script, and the shell of `srun --pty -n 1` in a larger allocation.
ALLOCATED = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SHELLS = [
    {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_NAME": "interactive"},
    {},
    {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "1"},
]


@variants(1, "step", SHELLS)
def test_a_shell_in_an_allocation_is_no_task(script, step):
    done = launch(script(SHOW), GPUS="2", TSN_OUTPUT="all", **ALLOCATED, **step)
    ranks = shown(done.stdout) + shown(done.stderr)
    assert sorted((r["RANK"], r["WORLD_SIZE"]) for r in ranks) == [("0", "2"), ("1", "2")], done.stderr
    # Plain Python is one rank, and says so.
    code = "from tilescale_net.runtime import placement; print(placement.launched_rank(1.0), repr(placement.job_identity().name))"
    env = clean_environment(PYTHONPATH=ROOT, **ALLOCATED, **step)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "None ''\n" and "srun did not start this process" in done.stderr, done


def test_a_shell_that_is_one_of_several_tasks_of_srun(monkeypatch):
    """The first process of `srun -n 4 --pty bash` has the terminal; a script of srun with a terminal is a rank."""
    terminal, other = pty.openpty()
    stdin = os.dup(0)
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "1"}
    try:
        os.dup2(other, 0)
        for command, tasks in ((["bash", "-i"], 1), (["bash", "-c", "sleep 100; exit"], 4)):
            with subprocess.Popen(command, stdin=other, stdout=other, stderr=other) as task:
                for name, text in {**ALLOCATED, **step, "SLURM_TASK_PID": str(task.pid)}.items():
                    monkeypatch.setenv(name, text)
                assert wait_until(lambda: placement.slurm_tasks() == tasks, 10)
                task.kill()
        monkeypatch.setenv("SLURM_TASK_PID", str(os.getpid()))
        assert placement.slurm_tasks() == 4
    finally:
        os.dup2(stdin, 0)
        for fd in (terminal, other, stdin):
            os.close(fd)


@pytest.mark.parametrize(
    "env, said",
    [
        ({"GPUS": "2"}, "GPUS=2, but srun started 4 tasks on 1 host, each of which is a rank"),
        ({"SLURM_HET_SIZE": "2"}, "heterogeneous job is; set MASTER_ADDR"),
        ({}, "scontrol did not tell the first host"),
    ],
)
def test_a_step_that_does_not_say_enough(script, env, said):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    done = launch(script(""), **ALLOCATED, **step, **env)
    assert done.returncode == 2 and said in done.stderr and not script.pids(), done


def test_rank_zero_sees_the_terminal(script):
    """A progress bar looks the same with and without the launcher."""
    path = script("print('terminal:', sys.stderr.isatty(), file=sys.stderr); sys.stderr.write('a\\rb\\n')")
    try:
        master, slave = pty.openpty()
    except OSError:
        pytest.skip("lacks pseudo-terminals (a mounted /dev/pts)")
    process = subprocess.Popen(
        ["bash", LAUNCH, path], env=clean_environment(GPUS="2"), stderr=slave, stdout=subprocess.DEVNULL
    )
    os.close(slave)
    process.wait(30)
    assert os.read(master, 4096) == b"terminal: True\r\na\rb\r\n"
    os.close(master)


def test_a_system_without_terminals_has_pipes(monkeypatch):
    """A bare chroot has no /dev/pts: rank 0's output comes all the same."""
    output = runpy.run_path(os.path.join(ROOT, "tilescale_net", "launch", "job.py"))

    def none_left():
        raise OSError("out of pty devices")

    monkeypatch.setattr(output["pty"], "openpty", none_left)
    stream = output["Output"](terminal=True)
    os.write(stream.child_fd, b"hello\n")
    os.close(stream.child_fd)
    assert stream.read() and list(stream.lines) == [b"hello"]
    os.close(stream.fd)
