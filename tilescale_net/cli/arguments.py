"""Parsers and types of command-line arguments, of the command and of the benchmarks, with clear errors."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, TypeVar

from tilescale_net.runtime import settings

Number = TypeVar("Number", int, float)


def _number(text: str, kind: type[Number], minimum: float, strict: bool, description: str) -> Number:
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {description}") from None
    if value < minimum or (strict and value == minimum) or value != value or value == float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not {description}")
    return value


def positive_int(text: str) -> int:
    """argparse type: a whole number of 1 or more."""
    return _number(text, int, 1, False, "a whole number of 1 or more")


def non_negative_int(text: str) -> int:
    """argparse type: a whole number of 0 or more."""
    return _number(text, int, 0, False, "a whole number of 0 or more")


def positive_float(text: str) -> float:
    """argparse type: a finite number above 0."""
    return _number(text, float, 0, True, "a number above 0")


def writable_file(text: str) -> str:
    """argparse type: a file that can be created; checked before the run, not after it."""
    if not settings.can_be_written(text):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; its folder must exist and be writable")
    return text


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose subcommands report unknown options themselves, with the probably intended one."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse, without unknown arguments."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            near = [
                found for name in names for found in difflib.get_close_matches(name, self._option_string_actions, n=1)
            ]
            advice = f"; did you mean {' '.join(near)}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        return parsed, unknown
