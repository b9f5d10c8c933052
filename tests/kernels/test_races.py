"""The simulator's check for races reports nothing in the kernels that are shipped, and costs little."""

import os
import random
import re
import resource
import time

import pytest

import tilescale_net as tsn
import tilescale_net.runtime.settings as settings
from tests import jobs, ranks
from tests.kernels import small_runs
from tests.kernels.support import alive_objects
from tests.kernels.test_chaos_seeds import chaos_of
from tests.tutorials.test_tutorials import PROGRAMS, expected_runs

pytestmark = pytest.mark.skipif(settings.device_kind() == "cuda", reason="checks are made in the simulator")
SEEDS, AT_ONCE = 50, 5  # seeds, and how many of one test's networks
IN_A_ROW = 5  # runs of one test of the ordinary suite


def run(names, seeds) -> dict:
    """Seconds of this rank's processor that each run takes, but for its first seed, MiB of memory, and MiB more than before
    the first one."""
    cost, before = {}, _resident_mib()
    for name in names:
        seconds, others = 0.0, alive_objects()
        for number, seed in enumerate(seeds):
            os.environ["TSN_SIM_SEED"] = str(seed)
            os.environ["TSN_SIM_VISIBILITY"] = ("random", "late", "random", "eager")[seed % 4]
            began = time.process_time()
            try:
                small_runs.RUNS[name][1](seed)
            except Exception as error:
                raise AssertionError(f"{name}, seed {seed}: {type(error).__name__}: {error}") from error
            seconds += time.process_time() - began if number else 0  # kernels are loaded in the first
            most = _resident_mib()
            left = alive_objects() - others
            assert not left, f"{name}: not collected: {[type(found).__name__ for found in left]}"
            cost[name] = seconds, most, most - before
    return cost


def _resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _on_networks(names, seeds):
    """`run`, with a network of each seed."""
    for seed in seeds:
        os.environ["TSN_CHAOS"] = chaos_of(seed)
        tsn.init("32M")
        try:
            run(names, [seed])
        except Exception as error:
            raise AssertionError(f"on the network {chaos_of(seed)}: {error}") from error
        tsn.finalize()
        print(f"network of seed {seed}: {len(names)} runs", flush=True)


def _check(names, seeds, nodes=1, races=True, timeout=200, **env):
    env |= {"TSN_SIM_RACES": str(int(races)), "VIRTUAL_NODES": str(nodes)}
    return ranks.run(2, run, names, seeds, env=env, timeout=timeout)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, len(small_runs.RUNS), IN_A_ROW))
@pytest.mark.sample(2)
def test_nothing_is_accused_under_a_seed(first):
    """Several runs on the same two ranks: starting those takes longer than a run."""
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    _check(list(small_runs.RUNS)[first : first + IN_A_ROW], [seed], timeout=280)


@pytest.mark.nightly
def test_rows_for_a_rank_that_rejects_a_call_are_read_before_they_are_written_again():
    env = {"TSN_SIM_RACES": "1", "VIRTUAL_NODES": "2", "TSN_CHAOS": chaos_of(0)}
    ranks.run(4, run, ("MoE latency, rejected",), [0], env=env, timeout=200)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", small_runs.RUNS)
def test_nothing_is_accused(name, nodes):
    if nodes > 1 and name in small_runs.ONE_NODE:
        return  # nothing to run: it needs mapped peers
    _check([name], range(SEEDS), nodes, timeout=3600)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_nothing_is_accused_on_networks_that_misbehave(first):
    """In a world for each network: starting the ranks, and building and loading the kernels, takes longer than a seed."""
    names = [name for name in small_runs.RUNS if name not in small_runs.ONE_NODE]
    env = {"TSN_SIM_RACES": "1", "VIRTUAL_NODES": "2"}
    ranks.run(2, _on_networks, names, range(first, first + AT_ONCE), env=env, init=False, timeout=7000)


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_tutorials_are_not_accused(program):
    """But for the kernel that lacks a wait on purpose."""
    for command, output in expected_runs(program):
        variables, _, words = command.partition("bash launch.sh ")
        env = os.environ | dict(pair.split("=", 1) for pair in variables.split())
        done = jobs.launch(*words.split(), env=env | {"TSN_DEVICE": "simulator", "TSN_SIM_RACES": "1"})
        assert done.returncode == 0 and done.stdout.strip() == output, done.stderr
        if "missing_wait" in program.stem:
            # Which of the two accesses comes last, and so reports the other, depends on the schedule.
            load = r"a load of (y|rank \d block 0 thread \d+) \(05_missing_wait\.py:\d+\)"
            assert re.search(load + ".* nothing orders the two: .*a wait .*is missing", done.stderr), done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_cost():
    """Prints the table of docs/simulator.md. The kernels are compiled before."""
    names = list(small_runs.RUNS)
    _check(names, [0], timeout=3600)
    without, checked = ({name: _check([name], range(7), races=r)[0][name] for name in names} for r in (False, True))
    print(
        "\n| kernel | processor time | memory | MiB of the run itself | and with the check |\n| --- | --- | --- | --- | --- |"
    )
    for name in names:
        seconds, mib = (checked[name][i] / without[name][i] for i in (0, 1))
        print(f"| {name} | x {seconds:.1f} | x {mib:.1f} | {without[name][2]:.0f} | {checked[name][2]:.0f} |")
    assert all(checked[n][i] <= 4 * without[n][i] for n in names for i in (0, 1)), (without, checked)
