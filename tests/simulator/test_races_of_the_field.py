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


@pytest.mark.parametrize("right", [True, False])
@ranks.on(TSN_SIM_RACES="1", timeout=200)
def test_kinds(right):
    kernel, of_threads = field.races(right), (field.THREADS,)

    def launch(name, seed):
        data, word, out = torch.zeros(of_threads), torch.zeros(2, dtype=torch.uint64), torch.zeros(4, *of_threads)
        x, y, flag = tsn.zeros(of_threads), tsn.zeros(of_threads), tsn.zeros((2,), torch.uint64)
        yield kernel(field.CASES[name], data, word, x, y, flag, out)

    by_key = first_reports(itertools.product(field.KINDS, SEEDS), launch)
    for name, kind in field.KINDS.items():
        by_seed = [by_key[name, seed] for seed in SEEDS]
        reports = sum(by_seed, [])
        if right or not kind.ours:
            assert not reports, (name, reports)
            continue
        assert any(kind.ours in text for text in reports), (name, kind.ours, reports)
        # Some rank finds it in every schedule, by two lines.
        assert all(by_seed) and all(text.count("races_of_the_field.py:") >= 2 for text in reports), (name, by_seed)


def test_the_page_has_the_table_and_the_rules():
    page = field.PAGE.read_text()
    assert field.of_page(page) == field.table()
    assert coverage.of_page(page) == coverage.section()
