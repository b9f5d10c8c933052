"""Variants of tests: which of them the whole suite runs, and which the nightly run alone."""

from collections.abc import Callable
from typing import Any

import pytest


def nightly(*values: Any, id: str | None = None, when: bool = True) -> Any:
    """The values of a variant that the nightly run alone has; of an ordinary one unless `when` holds."""
    return pytest.param(*values, marks=[pytest.mark.nightly] * when, id=id)


def variants(sample: int, names: str, values: Any, **options: Any) -> Callable[[Callable], Callable]:
    """`pytest.mark.parametrize` of a test marked `sample(n)`: the whole suite runs n of its variants, a thorough run all."""
    return lambda test: pytest.mark.sample(sample)(pytest.mark.parametrize(names, values, **options)(test))
