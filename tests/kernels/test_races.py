"""The small runs of all kernels under many seeds and on networks that misbehave: right data, and no report of the race detector.

TSN_CHAOS_SEEDS is the number of networks without the race detector.
"""

import os
import random
import re
import resource
import time

import pytest

import tilescale_net as tsn
import tilescale_net.runtime.settings as settings
from tests import jobs, ranks
from tests.kernels.registry import RUNS
from tests.kernels.support import alive_objects
from tests.tutorials.test_tutorials import PROGRAMS, expected_runs
from tests.variants import variants

in_the_simulator = pytest.mark.skipif(settings.device_kind() == "cuda", reason="checks are made in the simulator")
SEEDS = 50  # of each run with the race detector
NETWORKS = settings.CHAOS_SEEDS.get()
IN_A_ROW = 5  # runs of one test of the ordinary suite
ACROSS_NODES = [name for name, run in RUNS.items() if not run.one_node]


def chaos_of(seed: int) -> str:
    """A network whose faults, and their rates, depend on the seed."""
    pace = random.Random(seed)
    faults = {
        "reorder": f"{pace.uniform(0.1, 0.9):.2f}",
        "split": f"{pace.uniform(0.1, 0.9):.2f}",
        "eagain": f"{pace.uniform(0.05, 0.5):.2f}",
        "delay_us": str(pace.choice((50, 200, 400))),
        "imm_bits": str(pace.choice((8, 16, 20, 32))),
        "depth": str(pace.choice((4, 16, 64))),
        "max_write": str(pace.choice((256, 1000, 4096))),
    }
    chosen = pace.sample(sorted(faults), pace.randrange(2, len(faults) + 1))
    return ",".join([f"seed={seed}", *(f"{name}={faults[name]}" for name in chosen)])


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
                RUNS[name].run(seed)
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


def _check_networks(names, seeds, races, timeout=7000):
    """In a world for each network: starting the ranks, and building and loading the kernels, takes longer than a seed."""
    env = {"TSN_SIM_RACES": str(int(races)), "VIRTUAL_NODES": "2"}
    ranks.run(2, _on_networks, names, seeds, env=env, init=False, timeout=timeout)


@in_the_simulator
@pytest.mark.timeout(300)
@variants(2, "first", range(0, len(RUNS), IN_A_ROW))
def test_nothing_is_accused_under_a_seed(first):
    """Several runs on the same two ranks: starting those takes longer than a run."""
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    _check(list(RUNS)[first : first + IN_A_ROW], [seed], timeout=280)


@pytest.mark.timeout(300)
@variants(1, "first", range(0, len(ACROSS_NODES), IN_A_ROW))
def test_data_are_right_on_some_networks(first):
    seed = random.randrange(1 << 20)
    _check_networks(ACROSS_NODES[first : first + IN_A_ROW], [seed, seed + 1], races=False, timeout=280)


@in_the_simulator
@pytest.mark.nightly
def test_rows_for_a_rank_that_rejects_a_call_are_read_before_they_are_written_again():
    env = {"TSN_SIM_RACES": "1", "VIRTUAL_NODES": "2", "TSN_CHAOS": chaos_of(0)}
    ranks.run(4, run, ("MoE latency, rejected",), [0], env=env, timeout=200)


@in_the_simulator
@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_accused(name, nodes):
    if nodes == 1 or not RUNS[name].one_node:
        _check([name], range(SEEDS), nodes, timeout=3600)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "first, count, races",
    [
        *(pytest.param(first, 5, True, marks=in_the_simulator) for first in range(0, SEEDS, 5)),
        *((first, min(8, NETWORKS - first), False) for first in range(0, NETWORKS, 8)),
    ],
)
def test_networks_that_misbehave(first, count, races):
    _check_networks(ACROSS_NODES, range(first, first + count), races)


@in_the_simulator
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


@in_the_simulator
@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_cost():
    """Prints the table of docs/simulator.md. The kernels are compiled before."""
    names = list(RUNS)
    _check(names, [0], timeout=3600)
    without, checked = ({name: _check([name], range(7), races=r)[0][name] for name in names} for r in (False, True))
    print(
        "\n| kernel | processor time | memory | MiB of the run itself | and with the check |\n| --- | --- | --- | --- | --- |"
    )
    for name in names:
        seconds, mib = (checked[name][i] / without[name][i] for i in (0, 1))
        print(f"| {name} | x {seconds:.1f} | x {mib:.1f} | {without[name][2]:.0f} | {checked[name][2]:.0f} |")
    assert all(checked[n][i] <= 4 * without[n][i] for n in names for i in (0, 1)), (without, checked)
