"""The table of docs/states.md against the proxies of a job: every call in every state, as hypothesis walks them at random."""

import builtins
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.proxy.test_native import HEAP, Pe, until
from tilescale_net.errors import FabricError

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
AFTER = {"connect": "connected", "start": "running", "stop": "stopped", "close": "closed"}
# Calls that lead on are drawn by rules of their own, so that each state is looked at from all sides.
LOOKS = sorted(set(TABLE) - set(AFTER))
FORBIDDEN_CPU = 4095


class Walker:
    """One proxy, and its state by the page."""

    def __init__(self, rank: int, size: int, provider: str, cpus: list[int]):
        self.pe = Pe(rank, n_pes=size, provider=provider, cpus=cpus)
        self.pinned, self.state = bool(cpus), "created"
        self.half_connected = False  # a connect has raised: only close is of use

    def call(self, name: str, *arguments):
        rest = {"drain": (10.0,), "apply_adds": (10.0,), "explain": ("a test",), "exclude": ([],)}
        attribute = getattr(self.pe.proxy, name)
        return attribute(*arguments, *rest.get(name, ()))


class Walk(RuleBasedStateMachine):
    """All proxies of a job, each at a place of its own in the table."""

    size, provider = 2, "null"
    seen: set[tuple[str, str]] = set()

    def __init__(self):
        super().__init__()
        self.walkers: list[Walker] = []

    def begin(self, cpus):
        """Made by the first rule, so that hypothesis chooses which proxy is pinned to a CPU that no process may use."""
        if not self.walkers:
            self.walkers = [Walker(r, self.size, self.provider, cpus if r == 0 else []) for r in range(self.size)]
            self.addresses = [w.pe.proxy.address() for w in self.walkers]

    def check(self, walker: Walker, name: str, *arguments) -> bool:
        """Make a call and compare; whether the page accepts it."""
        Walk.seen.add((walker.state, name))
        expected = TABLE[name][walker.state]
        if expected not in ("yes", "no"):
            with pytest.raises(getattr(builtins, expected)):
                walker.call(name, *arguments)
            return False
        answer = walker.call(name, *arguments)
        if name in ("drain", "apply_adds"):
            assert answer is (expected == "yes"), (name, walker.state)
        if name == "error" and walker.state in ("created", "connected", "running"):
            assert answer is None
        return True

    def one_that(self, data, could) -> Walker:
        """Mostly one whose state accepts the call, if there is one."""
        able = [walker for walker in self.walkers if could(walker)]
        anyone = not able or data.draw(st.integers(0, 3)) == 3
        return data.draw(st.sampled_from(self.walkers if anyone else able))

    @rule(data=st.data(), name=st.sampled_from(LOOKS), pinned=st.integers(0, 3))
    def look(self, data, name, pinned):
        self.begin([FORBIDDEN_CPU] if pinned == 3 else [])
        self.check(data.draw(st.sampled_from(self.walkers)), name)

    @precondition(lambda self: self.walkers)
    @rule(data=st.data(), how=st.integers(0, 11))
    def connect(self, data, how):
        walker = self.one_that(data, lambda w: w.state == "created" and not w.half_connected)
        if walker.half_connected:
            return
        damage = {9: "empty", 10: "short", 11: "garbage"}.get(how)
        if not damage or TABLE["connect"][walker.state] != "yes":
            if self.check(walker, "connect", self.addresses):
                walker.state = AFTER["connect"]
            return
        self.connect_raises(walker, damage)

    def connect_raises(self, walker: Walker, damage: str) -> None:
        rank = self.walkers.index(walker)
        bad = self.addresses[(rank + 1) % self.size]
        bad = {"empty": type(bad)(), "short": bad[: len(bad) // 2], "garbage": bad[::-1]}[damage]
        with pytest.raises(FabricError):
            walker.call("connect", [bad if r == (rank + 1) % self.size else a for r, a in enumerate(self.addresses)])
        walker.half_connected = True  # and created
        Walk.seen.add((walker.state, "connect raises"))

    @precondition(lambda self: self.walkers)
    @rule(data=st.data())
    def start(self, data):
        self.start_it(self.one_that(data, lambda w: w.state == "connected"))

    def start_it(self, walker: Walker) -> None:
        if walker.pinned and TABLE["start"][walker.state] == "yes":
            with pytest.raises(Exception, match=str(FORBIDDEN_CPU)):
                walker.call("start")
            Walk.seen.add((walker.state, "start raises"))
            walker.state = "stopped"
        elif self.check(walker, "start"):
            walker.state = AFTER["start"]

    @precondition(lambda self: self.walkers)
    @rule(data=st.data(), name=st.sampled_from(["stop", "close"]), really=st.integers(0, 3))
    def end(self, data, name, really):
        walker = data.draw(st.sampled_from(self.walkers))
        if really < 3:
            return
        closed = walker.state == "closed"
        assert self.check(walker, name)
        walker.state = "closed" if closed else AFTER[name]

    @precondition(lambda self: any(w.state == "running" for w in self.walkers))
    @rule(data=st.data(), how=st.sampled_from(["abort", "descriptor"]))
    def fail(self, data, how):
        walker = data.draw(st.sampled_from([w for w in self.walkers if w.state == "running"]))
        if how == "abort":
            walker.pe.abort.value = 1
        else:
            peer = (self.walkers.index(walker) + 1) % self.size
            walker.pe.push(1, peer, first=HEAP - 8, second=65536, size=16)
            until(lambda: walker.pe.proxy.error() is not None)
        walker.state = "failed"

    def teardown(self):
        for walker in self.walkers:
            walker.pe.proxy.close()


def _walk(size: int, examples: int, steps: int, fixed: bool = False) -> None:
    run_state_machine_as_test(
        type("Walk", (Walk,), {"size": size}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=fixed,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )


def test_the_table_has_every_call():
    calls = {name for name in dir(Pe(0).proxy) if not name.startswith("_")}
    assert calls == set(TABLE) | {"context_flags"}
    assert STATES == ["created", "connected", "running", "failed", "stopped", "closed"]


def test_walks():
    Walk.seen.clear()
    for size in (2, 3):
        _walk(size, 30, 50, fixed=True)  # the same for the same source
    assert {state for state, _ in Walk.seen} == set(STATES) and len(Walk.seen) > 60, len(Walk.seen)


def test_calls_that_raise():
    """Not left to the random walks: hypothesis draws others whenever a constant anywhere in the source changes."""
    for damage in ("empty", "short", "garbage"):
        walk = Walk()
        try:
            walk.begin([FORBIDDEN_CPU])
            pinned, other = walk.walkers
            walk.connect_raises(other, damage)
            walk.check(pinned, "connect", walk.addresses)
            pinned.state = AFTER["connect"]
            walk.start_it(pinned)
            assert (pinned.state, other.state) == ("stopped", "created")
            for walker in walk.walkers:
                for name in [*LOOKS, "start"]:
                    walk.check(walker, name)
        finally:
            walk.teardown()


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 3])
def test_long_walks(size):
    _walk(size, 2000, 80)
