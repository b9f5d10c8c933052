"""Ranks that do not find each other: who is missing is named, in time, wherever they are lost."""

import os
import socket
import time

import pytest
import torch.distributed as dist

import tilescale_net as tsn
from tests import ranks

QUICK = {"TSN_TIMEOUT": "1"}  # and 5 s more for collective calls


def _one_is_lost(lost, step):
    """Rank `lost` ends before it comes, or where it would call `step` of torch.distributed."""
    if int(os.environ["RANK"]) == lost:
        if step is None:
            os._exit(9)
        setattr(dist, step, lambda *_, **__: os._exit(9))
    tsn.init("4M")


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("step", [None, "init_process_group", "new_group"])
def test_whoever_is_missing_is_named(step, lost):
    begin = time.monotonic()
    outcomes = ranks.launch(3, _one_is_lost, lost, step, env=QUICK, init=False, timeout=40)
    assert outcomes[lost].error[0] == "Died"
    for o in outcomes:
        if o.rank != lost:
            kind, text, _ = o.error
            assert kind == "PeerLost" and f"rank {o.rank}: " in text and f"rank {lost}" in text.partition(": ")[2], (
                o.error
            )
    assert time.monotonic() - begin < 20


def _take_the_port():
    if os.environ["RANK"] == "0":
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
            os.environ["MASTER_PORT"] = str(s.getsockname()[1])
            tsn.init("4M")


def test_a_port_that_is_taken():
    (outcome,) = ranks.launch(1, _take_the_port, init=False)
    kind, text, _ = outcome.error
    assert kind == "ConfigurationError" and "cannot listen at 127.0.0.1:" in text and "MASTER_PORT" in text


def _wrong_interface():
    os.environ["GLOO_SOCKET_IFNAME"] = "nonesuch0"
    tsn.init("4M")


def test_an_interface_that_does_not_exist():
    for o in ranks.launch(2, _wrong_interface, env=QUICK, init=False):
        kind, text, _ = o.error
        assert kind == "ConfigurationError" and "nonesuch0" in text and "GLOO_SOCKET_IFNAME" in text, o.error


def _init_with(env):
    for name, value in env.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    tsn.init("4M")


@pytest.mark.parametrize(
    "env, said",
    [
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "RANK=0 is set but MASTER_ADDR and MASTER_PORT is not"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number"),
        ({"RANK": "1"}, "RANK=1 is not below WORLD_SIZE=1"),
        ({"RANK": "-1"}, "RANK='-1' is not a number"),
        ({"RANK": None, "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "MASTER_ADDR": None}, "several ranks were started"),
    ],
)
def test_an_environment_that_makes_no_sense(env, said):
    (outcome,) = ranks.launch(1, _init_with, env, init=False)
    kind, text, _ = outcome.error
    assert kind == "ConfigurationError" and said in text, outcome.error


def _late(seconds):
    if os.environ["RANK"] == "1":
        time.sleep(seconds)
    tsn.init("4M")
    tsn.barrier()
    tsn.finalize()


def test_a_rank_that_is_late_is_waited_for():
    assert all(o.ok for o in ranks.launch(2, _late, 3.0, env=QUICK, init=False))


def _srun():
    for name, by_srun in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
        os.environ[by_srun] = os.environ.pop(name)
    tsn.init("4M")
    seen = tsn.rank(), tsn.size()
    tsn.finalize()
    return seen


def test_sruns_variables():
    outcomes = ranks.launch(2, _srun, init=False)
    assert [o.value for o in outcomes] == [(0, 2), (1, 2)], [o.error for o in outcomes]


def _own_group():
    dist.init_process_group("gloo")
    tsn.init("4M")
    tsn.barrier()
    tsn.finalize()
    dist.destroy_process_group()


def test_a_group_of_the_users_own_is_used():
    assert all(o.ok for o in ranks.launch(2, _own_group, init=False))
