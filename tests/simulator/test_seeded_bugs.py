"""Which bugs the simulator finds in how many of its schedules, and that it accuses no right kernel."""

import time

import pytest
import torch

from tests import ranks
from tests.simulator import seeded_bugs as bugs

SEEDS = 20


def _compile(cases):
    """The ranks share the work, and nobody waits for another: a kernel is found again by those that run it."""
    import os

    import tilescale_net as tsn

    for name, right in cases[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]:
        tsn.compile(bugs.kernel(getattr(bugs, name)(right)), target="simulator")


def _found(size, cases, seeds, timeout=120):
    ranks.run(2, _compile, cases, init=False, timeout=timeout)
    return _merged(ranks.run(size, _run, cases, seeds, timeout=timeout, env={"TSN_TIMEOUT": "60"}))


def _run(cases, seeds):
    """For each (name, right): in how many of `seeds` some rank received wrong data or was told of a race; and a report."""
    import tilescale_net as tsn
    from tilescale_net.compiler.simulator.kernel import SimulatedFunction
    from tilescale_net.runtime import simulator

    reports = []
    # A job would end here; these kernels have run to their end, and the next one can follow.
    SimulatedFunction._give_up = lambda self, context, error: reports.append(f"{type(error).__name__}: {error}")
    me, n = tsn.rank(), tsn.size()
    x, y = tsn.empty((bugs.ROUNDS, bugs.M)), tsn.empty((bugs.ROUNDS, bugs.M))
    flag = tsn.zeros((8,), torch.uint64)
    found, turn = {}, 0
    for name, right in cases:
        case = getattr(bugs, name)(right)
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
    found = _found(2, [(f.__name__, False) for f in bugs.RULES], range(2))
    for name, (caught, said) in found.items():
        assert caught == 2 and said.startswith("DataRace") and "seeded_bugs.py:" in said, (name, caught, said)


def _ends(name, right, seed):
    import tilescale_net as tsn
    from tilescale_net.runtime import simulator

    x, y, after = (tsn.zeros((bugs.ROUNDS, bugs.M)) for _ in range(3))
    flag, out = tsn.zeros((8,), torch.uint64), torch.zeros((bugs.ROUNDS, bugs.M))
    kernel = tsn.compile(bugs.kernel(getattr(bugs, name)(right)), target="simulator")
    with simulator.schedule(seed):
        kernel(x, y, flag, out, bugs.M)
    tsn.barrier()


@pytest.mark.parametrize("function", bugs.ENDS, ids=lambda f: f.__name__)
def test_reported_where_it_happens(function):
    kind, text = bugs.ENDS[function]
    outcomes = ranks.launch(2, _ends, function.__name__, False, 0, env={"TSN_TIMEOUT": "5"})
    errors = [o.error for o in outcomes if o.error and o.error[0] != "PeerLost"]
    assert errors and all(e[0] == kind and text in e[1] for e in errors), errors or outcomes
    ranks.run(2, _ends, function.__name__, True, 0)


@pytest.mark.nightly
def test_table_of_bugs():
    """All bugs in all schedules. Prints the table of docs/simulator.md."""
    found = _found(2, _both(bugs.GOES_ON), range(SEEDS), timeout=3000)
    found |= _found(3, _both(bugs.THREE_RANKS), range(SEEDS), timeout=1000)
    print("\n| bug | found, of 20 seeds | how |\n| --- | --- | --- |")
    for (name, right), (caught, said) in found.items():
        if not right:
            print(f"| {name.replace('_', ' ')} | {caught} | {said.split(':')[0] or 'wrong data'} |")
    assert not {key: value for key, value in found.items() if key[1] and value[0]}
    few = {key: v for key, v in found.items() if not key[1] and v[0] < 15}
    assert not few, few
