"""Skips a test for want of a program; the run's last lines say what to install."""

import shutil

import pytest


def program(name: str, package: str, *others: str) -> str:
    """The first of the programs that is there; skips the test when none is.

    Args:
        name, others: programs, the preferred one first.
        package: of Debian and Ubuntu.
    """
    for candidate in (name, *others):
        if shutil.which(candidate):
            return candidate
    pytest.skip(f"lacks {others[-1] if others else name} ({package})")
