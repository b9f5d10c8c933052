"""The whole suite runs some variants of tests that are marked so, the same ones on every machine."""

from types import SimpleNamespace

import pytest

from tests.conftest import left_to_a_thorough_run


def _items(count: int, **marks) -> list:
    found = {name: SimpleNamespace(args=args) for name, args in marks.items()}
    return [
        SimpleNamespace(path="a.py", originalname="test_a", number=i, get_closest_marker=found.get)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "n, kept", [(0, []), (1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, range(10)), (12, range(10))]
)
def test_variants_from_the_first_to_the_last_are_kept(n, kept):
    left = [item.number for item in left_to_a_thorough_run(_items(10, sample=(n,)))]
    assert sorted({*range(10)} - {*left}) == list(kept)


def test_others_are_kept():
    assert not left_to_a_thorough_run(_items(10)) and not left_to_a_thorough_run(_items(10, sample=(0,), nightly=()))
