"""Races of the kinds that other tools know: the wrong form is reported, with lines, and the right one is silent."""

import itertools

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.simulator import races_of_the_field as field
from tests.simulator.recorded import first_reports
from tilescale_net.explore import coverage

SEEDS = range(3)


def _reports(right):
    """What this rank reports of each kind under each seed."""
    kernel, of_threads = field.races(right), (field.THREADS,)

    def launch(name, seed):
        data, word, out = torch.zeros(of_threads), torch.zeros(2, dtype=torch.uint64), torch.zeros(4, *of_threads)
        x, y, flag = tsn.zeros(of_threads), tsn.zeros(of_threads), tsn.zeros((2,), torch.uint64)
        yield kernel(field.CASES[name], data, word, x, y, flag, out)

    return first_reports(itertools.product(field.KINDS, SEEDS), launch)


@pytest.mark.parametrize("right", [True, False])
def test_kinds(right):
    told = ranks.run(2, _reports, right, env={"TSN_SIM_RACES": "1"}, timeout=200)
    for name, kind in field.KINDS.items():
        said = [of_rank[name, seed] for of_rank in told for seed in SEEDS]
        if right or not kind.ours:
            assert not any(said), (name, said)
            continue
        assert any(kind.ours in text for text in said), (name, kind.ours, said)
        # Some rank or other finds it in every schedule, by two lines.
        assert all(any(of_rank[name, seed] for of_rank in told) for seed in SEEDS), (name, said)
        assert all(text.count("races_of_the_field.py:") >= 2 for text in said if text), (name, said)


def test_the_page_has_the_table_and_the_rules():
    page = field.PAGE.read_text()
    assert field.of_page(page) == field.table()
    assert coverage.of_page(page) == coverage.section()
