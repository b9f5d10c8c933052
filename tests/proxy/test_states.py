"""The table of docs/states.md against the proxy: every call in every state, along random walks."""

import builtins
import random
from pathlib import Path

import pytest

from tests.proxy.test_native import HEAP, Pe, until

ROOT = Path(__file__).resolve().parents[2]


def table() -> dict[str, dict[str, str]]:
    """call -> state -> "yes", "no" or an error's name, as the page has it."""
    section = (ROOT / "docs/states.md").read_text().split("\n## Proxy\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    at = next(i for i, row in enumerate(rows) if row[0] == "call")
    states = rows[at][1:]
    return {row[0]: dict(zip(states, row[1:])) for row in rows[at + 2 :]}


TABLE = table()
STATES = list(TABLE["connect"])
AFTER = {"connect": "connected", "start": "running", "close": "closed"}


class Walk:
    """A pair of proxies of which the first is walked through its states."""

    def __init__(self):
        self.pe, self.other = Pe(0), Pe(1)
        self.addresses = [self.pe.proxy.address(), self.other.proxy.address()]
        self.state = "created"

    def call(self, name: str):
        arguments = {"connect": (self.addresses,), "drain": (10.0,), "apply_adds": (10.0,), "explain": ("a test",)}
        if name == "excuse":
            return self.pe.proxy.excuse([])
        if name == "properties":
            return self.pe.proxy.properties()
        return getattr(self.pe.proxy, name)(*arguments.get(name, ()))

    def step(self, name: str) -> None:
        expected = TABLE[name][self.state]
        if expected in ("yes", "no"):
            answer = self.call(name)
            if name in ("drain", "apply_adds"):
                assert answer is (expected == "yes"), (name, self.state)
            self.state = AFTER.get(name, self.state)
            if name == "stop" and self.state != "closed":
                self.state = "stopped"
        else:
            with pytest.raises(getattr(builtins, expected)):
                self.call(name)

    def fail(self, how: str) -> None:
        assert self.state == "running"
        if how == "abort":
            self.pe.abort.value = 1
        else:
            self.pe.push(1, 1, first=HEAP - 8, second=65536, size=16)
            until(lambda: self.pe.proxy.error() is not None)
        self.state = "failed"


def test_the_table_has_every_call():
    calls = {name for name in dir(Pe(0).proxy) if not name.startswith("_")}
    assert calls == set(TABLE) | {"context_flags"}
    assert STATES == ["created", "connected", "running", "failed", "stopped", "closed"]


def test_random_walks():
    seen = set()
    for seed in range(40):
        rng = random.Random(seed)
        walk = Walk()
        for _ in range(40):
            if walk.state == "running" and rng.random() < 0.15:
                walk.fail(rng.choice(["abort", "descriptor"]))
            name = rng.choice(list(TABLE))
            # Calls that lead on are rarer, so that each state is looked at from all sides.
            if name in ("stop", "close") and rng.random() < 0.7:
                continue
            seen.add((walk.state, name))
            walk.step(name)
    assert {state for state, _ in seen} == set(STATES) and len(seen) > 60, len(seen)
