"""Which bugs the simulator finds in how many of its schedules, and that it accuses no right kernel."""

import os
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.simulator import seeded_bugs as bugs
from tests.simulator import seeded_errors, seeded_lanes
from tests.simulator.recorded import recorded_errors
from tests.variants import variants
from tilescale_net.runtime import simulator

SEEDS = 20
ENOUGH = 15


def _case(name, right):
    return next(getattr(m, name) for m in (bugs, seeded_lanes, seeded_errors) if hasattr(m, name))(right)


def _compile(cases):
    """The ranks share the work, and none waits for another: a kernel is found again by the ranks that run it."""
    for name, right in cases[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]:
        tsn.compile(bugs.kernel(_case(name, right)), target="simulator")


def _found(size, cases, seeds, timeout=120):
    ranks.run(2, _compile, cases, init=False, timeout=timeout)
    return _merged(ranks.run(size, _run, cases, seeds, timeout=timeout, env={"TSN_TIMEOUT": "60"}))


def _run(cases, seeds):
    """For each (name, right): in how many of `seeds` a rank received wrong data or a report of a race; and a report."""
    reports = recorded_errors()
    me, n = tsn.rank(), tsn.size()
    x, y = tsn.empty((bugs.ROUNDS, bugs.M)), tsn.empty((bugs.ROUNDS, bugs.M))
    flag = tsn.zeros((8,), torch.uint64)
    found, turn = {}, 0
    for name, right in cases:
        case = _case(name, right)
        kernel = tsn.compile(bugs.kernel(case), target="simulator")
        caught, said, began = 0, "", time.process_time()
        for seed in seeds:
            turn += 1
            sent = [
                torch.arange(bugs.ROUNDS * bugs.M).reshape(bugs.ROUNDS, bugs.M) + 1e4 * turn + 4e6 * pe
                for pe in range(n)
            ]
            x.copy_(sent[me])
            y.fill_(float("nan"))
            flag.zero_()
            out = torch.zeros((bugs.ROUNDS, bugs.M))
            reports.clear()
            tsn.barrier()
            with simulator.schedule(seed, races=True):
                kernel(x, y, flag, out, bugs.M)
            tsn.barrier()
            if n == 2:
                expected = sent[me if case.own else 1 - me]
                wrong = any(not torch.equal(out[r], expected[r]) for r in case.rows)
            else:
                wrong = any(not torch.equal(out[r], sent[r][0]) for r in case.rows if r != me)
            told = torch.tensor([wrong, bool(reports)], dtype=torch.int32)
            torch.distributed.all_reduce(told)
            caught += bool(told.any())
            said = said or (reports[0] if reports else "")
        found[name, right] = caught, said, time.process_time() - began
    return found


def _merged(outcomes):
    """Counts are the same on every rank; a report may have been made by one only."""
    return {key: (outcomes[0][key][0], next((o[key][1] for o in outcomes if o[key][1]), "")) for key in outcomes[0]}


def _both(functions):
    return [(f.__name__, right) for f in functions for right in (False, True)]


def test_rules():
    """Reported in every schedule, with the lines of the primitives."""
    rules = [(f.__name__, False) for f in (*bugs.RULES, *seeded_lanes.RULES)]
    found = _found(2, [*rules, (bugs.declared_race.__name__, True)], range(2))
    _, said = found.pop((bugs.declared_race.__name__, True))
    assert not said, said
    for (name, _), (caught, said) in found.items():
        assert caught == 2 and said.startswith("DataRace"), (name, caught, said)
        assert "seeded_" in said and ".py:" in said, (name, said)


def _ends(name, right, seeds):
    x, y, after = (tsn.zeros((bugs.ROUNDS, bugs.M)) for _ in range(3))
    flag, out = tsn.zeros((8,), torch.uint64), torch.zeros((bugs.ROUNDS, bugs.M))
    kernel = tsn.compile(bugs.kernel(_case(name, right)), target="simulator")
    for seed in seeds:
        flag.zero_()
        tsn.barrier()
        with simulator.schedule(seed, races=True):
            kernel(x, y, flag, out, bugs.M)
        tsn.barrier()


def _report_of(function, seed: int) -> str:
    """The kind of error that a job of two ranks ends with, where it is the one that it should be; else ""."""
    _, kinds = seeded_errors.ENDS[function]
    # A loop of loads runs until it is noticed, at the latest after two time-outs; where ranks wait in order, a busy machine
    # may keep one from its turn.
    timeout, stall = ("1.5", "1.5") if function is seeded_errors.loop_of_plain_loads else ("5", "4")
    env = {"TSN_TIMEOUT": timeout, "TSN_SIM_STALL": stall}
    outcomes = ranks.launch(2, _ends, function.__name__, False, [seed], env=env)
    errors = [o.error for o in outcomes if o.error and o.error[0] != "PeerLost"]
    told = [kind for kind, text, _ in errors if kinds.get(kind, "\0") in text]
    return told[0] if told else ""


@variants(3, "function", seeded_errors.ENDS, ids=lambda f: f.__name__)
def test_reported_where_it_happens(function):
    assert _report_of(function, 0), ranks.launch(2, _ends, function.__name__, False, [0], env={"TSN_TIMEOUT": "2"})


def test_their_right_forms_pass():
    ranks.run(2, _right_forms, [f.__name__ for f in seeded_errors.ENDS], range(1))


def _right_forms(names, seeds):
    for name in names:
        _ends(name, True, seeds)


# Rows of the table of docs/simulator.md, each printed by a test; `ranks` of a job run several kernels.
GOES_ON = [(2, bugs.GOES_ON), (2, seeded_lanes.GOES_ON), (3, bugs.THREE_RANKS)]


def _tell(row: str, name: str, found: int, how: str) -> None:
    print(f"| {row} | {name.replace('_', ' ')} | {found} | {how} |", flush=True)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("size, functions", GOES_ON, ids=["two", "lanes", "three"])
def test_bugs_that_do_not_end_a_job(size, functions):
    """All in all schedules, and none in the right forms."""
    rows = {f.__name__: row for f, row in functions.items()}
    found = _found(size, _both(functions), range(SEEDS), timeout=2900)
    for (name, right), (caught, said) in found.items():
        if not right:
            _tell(rows[name], name, caught, f"`{said.split(':')[0]}`" if said else "wrong data")
    assert not {name: how for (name, right), how in found.items() if right and how[0]}
    few = {name: how for (name, right), how in found.items() if not right and how[0] < ENOUGH}
    assert not few, few


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("function", seeded_errors.ENDS, ids=lambda f: f.__name__)
def test_bugs_that_end_a_job(function):
    told = [_report_of(function, seed) for seed in range(SEEDS)]
    kinds = " or ".join(f"`{kind}`" for kind in sorted({t for t in told if t}))
    _tell(seeded_errors.ENDS[function][0], function.__name__, sum(map(bool, told)), kinds)
    assert sum(map(bool, told)) >= ENOUGH, told


@pytest.mark.nightly
@pytest.mark.timeout(1100)
def test_right_forms_of_those_that_end_a_job():
    ranks.run(2, _right_forms, [f.__name__ for f in seeded_errors.ENDS], range(SEEDS), timeout=1000)
