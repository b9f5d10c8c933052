"""Mutants that one run with the check for races does not show, and why."""

KNOWN: dict[str, dict[tuple[str, int], str]] = {}
