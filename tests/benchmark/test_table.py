import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.common import Column, Table
from benchmark.common.report import Layout


def table() -> Table:
    made = Table(
        "t", [Column("bytes", "Size", ",d", unit="Bytes")], [Column("bw", "BW", unit="GB/s"), Column("how", "How")]
    )
    made.add({"bytes": 2048, "bw": 3.14159, "how": "ldst"})
    made.add({"bytes": 4194304, "bw": None, "how": "bulk copy"})
    return made


def lines_of(t: Table) -> list[str]:
    return list(Layout([*t.keys, *t.columns], t.rows).lines(t.rows))


def test_lines():
    assert lines_of(table()) == [
        "| Size (Bytes) | BW (GB/s) | How       |",
        "|-------------:|----------:|:----------|",
        "|        2,048 |     3.142 | ldst      |",
        "|    4,194,304 |         - | bulk copy |",
    ]


def test_rows_need_their_keys():
    with pytest.raises(ValueError, match="'bytes'"):
        table().add({"bw": 1.0})


def test_direction_is_checked():
    with pytest.raises(ValueError, match="better"):
        Column("a", "A", better="more")


@settings(deadline=None)  # a machine may have other work
@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(0, 1e9)), min_size=1, max_size=8))
def test_lines_are_as_wide_as_each_other_and_hold_every_value(rows):
    made = Table("t", [Column("n", "N", ",d")], [Column("x", "X", ".3f")])
    for n, x in rows:
        made.add({"n": n, "x": x})
    lines = lines_of(made)
    assert len(lines) == len(rows) + 2
    assert len({len(line) for line in lines}) == 1
    for (n, x), line in zip(rows, lines[2:]):
        assert re.findall(r"[\d,.]+", line) == [f"{n:,d}", f"{x:.3f}"]


@pytest.mark.parametrize(
    "value, shown",
    [
        (0.0, "0"),
        (0.00123456, "0.001235"),
        (1.0, "1.000"),
        (12.3456, "12.35"),
        (123456.7, "123,457"),
        (-3.14159, "-3.142"),
    ],
)
def test_significant_digits(value, shown):
    assert Column("a", "A").show(value) == shown


def test_whole_numbers_and_formats_are_shown_as_they_are():
    assert Column("a", "A").show(12345) == "12345"
    assert Column("a", "A", ".1%").show(0.5) == "50.0%"
    assert Column("a", "A", unit="us").heading == "A (us)"
