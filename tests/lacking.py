"""Skips a test for want of a program or a module; the run's last lines say what to install."""

import importlib
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


def module(name: str, label: str):
    """A Python module; skips the test when it is not installed.

    Args:
        name: of the module and of its package.
        what: it is there for.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.skip(f"lacks {label} ({name} with pip)")
