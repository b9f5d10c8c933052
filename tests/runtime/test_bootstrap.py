"""Ranks that find each other, or do not: the missing ones are named, in time, wherever they are lost."""

import datetime
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

import tilescale_net as tsn
from tests import ranks
from tests.variants import variants
from tilescale_net.errors import PeerLost
from tilescale_net.runtime import bootstrap, placement, settings
from tilescale_net.runtime.bootstrap import ArrivalTracker, Rendezvous
from tilescale_net.runtime.job_store import SignedStore


class Store:
    """A JobStore, until the rank that keeps it ends."""

    kept_by = 0

    def __init__(self):
        self.keys, self.ended, self.name = SignedStore(dist.HashStore()), threading.Event(), ""

    def within(self, name):
        self.name = name
        return self

    def close(self):
        pass

    def ask(self, question):
        if self.ended.is_set():
            raise PeerLost("rank 0, which keeps the store of the job, is gone")
        return question(self.keys)


def _cannot_connect(seconds):
    time.sleep(seconds)
    raise RuntimeError("Connection closed by peer")


def test_rank_0_stays_until_a_slow_rank_knows_who_is_lost():
    store = Store()

    def rank_0():
        with pytest.raises(PeerLost, match="Missing: rank 1"):
            Rendezvous(store, 0, 3, 5.0).run_collectively(lambda: _cannot_connect(0))
        store.ended.set()

    first = threading.Thread(target=rank_0)
    first.start()
    try:
        with pytest.raises(PeerLost, match="Missing: rank 1 "):
            Rendezvous(store, 2, 3, 5.0).run_collectively(lambda: _cannot_connect(2.5))
    finally:
        first.join()


def _come(keys, size, ranks, timeout=20.0):
    """Results of the ranks that arrive at a meeting: its name and the words of all, or the error."""
    said = {}

    def come(rank):
        store = Store()
        store.keys = keys
        try:
            found, words = ArrivalTracker(store, rank, size, timeout).meet(f"rank {rank} of {size}", "did not come")
            said[rank] = found.name, words
        except PeerLost as err:
            said[rank] = str(err)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    return said


def test_a_store_that_outlives_attempts():
    """As torchrun's agent keeps it: other processes with the same ranks have met there, or have timed out."""
    keys, names = SignedStore(dist.HashStore(), "job", b"secret"), set()
    for size in (3, 3, 2, 4, 3):
        said = _come(keys, size, reversed(range(size)))
        assert len({name for name, _ in said.values()}) == 1
        assert all(words == [f"rank {rank} of {size}" for rank in range(size)] for _, words in said.values())
        names.add(said[0][0])
        if size == 2:
            said = _come(keys, 3, (0, 1), timeout=0.3)  # rank 2 is one of an earlier attempt
            assert all("Missing: rank 2 (did not come)" in error for error in said.values()), said
            said = _come(keys, 3, (2, 1), timeout=0.3)
            assert all("Missing: rank 0 (did not come)" in error for error in said.values()), said
    assert len(names) == 5


def test_a_host_that_starts_another_number_of_ranks_is_named():
    keys = SignedStore(dist.HashStore())
    assert "rank 2 came as one of 4 ranks" not in _come(keys, 4, (2,), timeout=0.1)[2]
    assert "Missing: rank 1 (did not come)" in (said := _come(keys, 2, (0,), timeout=0.1)[0])
    assert "; rank 2 came as one of 4 ranks: all hosts must start the same job" in said


def test_a_rank_without_open_files_blames_no_other():
    def fail():
        raise RuntimeError("rv != -1. Too many open files")

    with pytest.raises(tsn.ConfigurationError, match="rank 0: .*Too many open files; raise the limit"):
        Rendezvous(Store(), 0, 2, 5.0).run_collectively(fail)


QUICK = {"TSN_TIMEOUT": "1"}  # and 5 s more for collective calls


def _one_is_lost(lost, step):
    """Rank `lost` ends before it comes, or where it would make the default group or the package's own."""
    if int(os.environ["RANK"]) == lost:
        if step is None:
            os._exit(9)
        setattr(bootstrap if step == "connect_gloo" else dist, step, lambda *_, **__: os._exit(9))
    tsn.init("4M")


@pytest.mark.parametrize("lost", [0, 1])
@variants(3, "step", [None, "init_process_group", "connect_gloo"])
def test_missing_ranks_are_named(step, lost):
    begin = time.monotonic()
    outcomes = ranks.launch(3, _one_is_lost, lost, step, env=QUICK, init=False, timeout=40)
    assert outcomes[lost].error[0] == "Died"
    for o in outcomes:
        if o.rank != lost:
            kind, text, _ = o.error
            assert kind == "PeerLost" and f"rank {o.rank}: " in text and f"rank {lost}" in text.partition(": ")[2], (
                o.error
            )
    assert time.monotonic() - begin < 60  # QUICK, and a busy machine


def _of_another_job():
    os.environ["TSN_JOB"] = f"job {os.environ['RANK']}"
    tsn.init("4M")


def test_ranks_of_two_jobs_at_one_port_do_not_meet():
    first, second = ranks.launch(2, _of_another_job, env=QUICK, init=False)
    assert first.error[0] == "PeerLost" and "Missing: rank 1 (did not come)" in first.error[1], first.error
    # Rank 0 of its own job never came; rank 0 of the other job may have taken the store with it.
    assert second.error[0] == "PeerLost" and "rank 0" in second.error[1].partition(": ")[2], second.error


def test_the_name_of_a_job(monkeypatch):
    def named(**env):
        for name in ("RANK", "WORLD_SIZE", "SLURM_HET_SIZE", "TORCHELASTIC_RUN_ID", "TSN_JOB", "TSN_STORE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**step, **env}.items():
            monkeypatch.setenv(name, value)
        return placement.job_identity()

    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    assert named() == named(RANK="1", WORLD_SIZE="4") == placement.JobIdentity("7.2")
    # What another launcher has started inside of a step sees it on some hosts, or with other numbers.
    assert named(RANK="1", WORLD_SIZE="8").name == named(RANK="0", WORLD_SIZE="4").name == ""
    assert named(SLURM_HET_SIZE="2").name == named(SLURM_STEP_ID="").name == ""
    assert named(TORCHELASTIC_RUN_ID="run").name == "run" and named(TORCHELASTIC_RUN_ID="run").secret is None
    job = named(TSN_JOB="hidden", TORCHELASTIC_RUN_ID="run")
    store = {"TSN_STORE": "5/hidden/localhost:9", "MASTER_ADDR": "localhost", "MASTER_PORT": "9"}
    assert job == named(**store) and "hidden" not in job.name and job != named(TSN_JOB="other")
    assert job.secret not in (None, bytes.fromhex(job.name)) and len(job.secret) == 32


def _foreign():
    """Another user of the host, or at least another client of the store: reads the keys, and speaks for a rank."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    port, limit, base = int(os.environ["MASTER_PORT"]), datetime.timedelta(seconds=30), None
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, None, False, limit, wait_for_workers=False)
    while base is None:
        time.sleep(0.1)
        keys = store.list_keys()
        base = next((key.partition("beat/")[0] for key in keys if "/beat/" in key), None)
    assert not any(os.environ["TSN_JOB"] in key for key in keys)
    store.set(f"{base}failed", '[1, "failed: a foreign process says so"]')
    store.set(f"{base}ended/1", "1")
    store.set(f"{base}alarms", "much")  # no number: torch ends the connection of a client that counts it up
    store.set(f"{base}foreign process", "1")


@ranks.on(init=False)
def test_a_foreign_process_does_not_speak_for_a_rank():
    os.environ["TSN_JOB"] = "0123456789abcdef"
    child = os.fork() if os.environ["RANK"] == "1" else None
    if child == 0:
        code = 1
        try:
            _foreign()
            code = 0
        finally:
            os._exit(code)
    tsn.init("4M")
    store = tsn.world().control.store
    end = time.monotonic() + 30
    while not store.raw.check(["foreign process"]) and time.monotonic() < end:
        time.sleep(0.05)
    for _ in range(4):  # watchdogs have looked
        time.sleep(0.25)
        tsn.check()
    assert store.raw.check(["failed"]) and not store.ask(lambda s: s.check(["failed"]))
    tsn.barrier()
    tsn.finalize()
    assert child is None or os.waitpid(child, 0)[1] == 0


@ranks.fails("ConfigurationError", "cannot listen at 127.0.0.1:", "MASTER_PORT", size=1, init=False)
def test_a_port_that_is_taken():
    if os.environ["RANK"] == "0":
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
            os.environ["MASTER_PORT"] = str(s.getsockname()[1])
            tsn.init("4M")


def _init_with(env):
    os.environ.update(env)
    tsn.init("4M")


@ranks.fails("ConfigurationError", "nonesuch0", "GLOO_SOCKET_IFNAME", init=False, **QUICK)
def test_an_interface_that_does_not_exist():
    _init_with({"GLOO_SOCKET_IFNAME": "nonesuch0"})


OF_SRUN = {"RANK": None, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": None}


@pytest.mark.parametrize(
    "env, said",
    [
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "RANK=0 is set but MASTER_ADDR is not"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number"),
        ({"RANK": "1"}, "RANK=1 is not below WORLD_SIZE=1"),
        ({"RANK": "-1"}, "RANK='-1' is not a number"),
        ({"WORLD_SIZE": "20000"}, "WORLD_SIZE=20000: a job has at most"),
        (OF_SRUN, "SLURM_PROCID=0 of SLURM_STEP_NUM_TASKS=2, but MASTER_ADDR is not set: several ranks were started"),
    ],
)
def test_an_environment_that_is_wrong(monkeypatch, env, said):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **env}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(tsn.ConfigurationError, match=said):
        placement.launched_rank(1.0)


@ranks.on(init=False, **QUICK)
def test_a_rank_that_is_late_is_waited_for():
    if os.environ["RANK"] == "1":
        time.sleep(3)
    tsn.init("4M")
    tsn.barrier()
    tsn.finalize()


@ranks.on(init=False)
def test_sruns_variables():
    rank = int(os.environ["RANK"])
    for name, by_srun in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
        os.environ[by_srun] = os.environ.pop(name)
    tsn.init("4M")
    assert (tsn.rank(), tsn.size()) == (rank, 2)
    tsn.finalize()


@pytest.mark.parametrize(
    "mpi",
    [
        ("PMI_RANK", "PMI_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ],
)
def test_mpis_variables_with_an_address(monkeypatch, mpi):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(mpi[0], "1")
    monkeypatch.setenv(mpi[1], "2")
    with pytest.raises(tsn.ConfigurationError, match="but MASTER_ADDR is not set: several ranks"):
        placement.launched_rank(1.0)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert placement.launched_rank(1.0) == placement.LaunchedRank(1, 2, "node0", settings.MASTER_PORT.default)
    monkeypatch.setenv("MASTER_ADDR", "[fd00::1]")
    monkeypatch.setenv("MASTER_PORT", "4000")
    # One daemon for each host, which srun has started, and which starts the ranks.
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert (
        placement.launched_rank(1.0) == placement.LaunchedRank(1, 2, "fd00::1", 4000)
        and placement.job_identity().name == ""
    )


def test_mpirun_starts_one_job():
    """The wheel mpich brings mpirun along."""
    mpirun = os.path.join(os.path.dirname(sys.executable), "mpirun")
    if not os.path.exists(mpirun):
        pytest.skip("lacks mpirun (mpich with pip)")
    drop = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "PMI", "MPI_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    env.update(TSN_DEVICE="simulator", PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    program = "import tilescale_net as t; t.init('4M'); t.barrier(); print(f'{t.rank()} of {t.size()}\\n', end='')"
    done = subprocess.run(
        [mpirun, "-n", "2", "bash", "-c", f'{sys.executable} -c "{program}"; exit $?'],
        env=env, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0 and sorted(done.stdout.split("\n")) == ["", "0 of 2", "1 of 2"], done


def test_an_unknown_host_is_reported_at_once(capfd):
    begin = time.monotonic()
    for o in ranks.launch(2, _init_with, {"MASTER_ADDR": "no-such-host.invalid"}, init=False):
        kind, text, _ = o.error
        assert kind == "ConfigurationError" and "MASTER_ADDR='no-such-host.invalid' is not known" in text, o.error
    assert time.monotonic() - begin < 20 and "frame #" not in capfd.readouterr().err


@ranks.on(init=False, **QUICK)
def test_a_second_try_finds_the_others():
    """A rank whose patience ends before the others come meets them the second time."""
    if os.environ["RANK"] == "0":
        os.environ["TSN_TIMEOUT"] = "20"
        tsn.init("4M")
        tsn.finalize()
        time.sleep(8)
    else:
        tsn.init("4M")
        tsn.finalize()
        with pytest.raises(tsn.PeerLost, match="rank 0 .*has not called tilescale_net.init"):
            tsn.init("4M")
    tsn.init("4M")
    tsn.barrier()
    tsn.finalize()
