"""A random walk through the table of docs/states.md, section World: live ranks, every answer compared with the table."""

import multiprocessing
import os
import re
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import tilescale_net as tsn
from tests import ranks

_SETTLED = 1.0  # seconds in which every rank's watchdog has noticed
STATES = ("none", "running", "failed")


def _tables() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The page's two tables: call -> state -> its cell, and misuse -> its error."""
    page = (Path(__file__).resolve().parents[2] / "docs/states.md").read_text()
    section = page.split("\n## World\n")[1].split("\n### ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    heads = {row[0]: n for n, row in enumerate(rows)}
    assert rows[heads["call"]] == ["call", *STATES]
    calls = {}
    for names, *cells in rows[heads["call"] + 2 : heads["misuse"]]:
        calls.update({name: dict(zip(STATES, cells)) for name in re.findall(r"`(\w+)\(", names)})
    return calls, dict(rows[heads["misuse"] + 2 :])


CALLS, MISUSES = _tables()


def expected(call: str, state: str) -> tuple[str, str]:
    """The page's row of a call: ("ok", ""), ("reason", "") for the reason of the failure, or an error and its words."""
    cell = CALLS[call][state]
    if error := re.match(r'(\w+Error) "([^"]+)"', cell):
        return error[1], error[2]
    return (
        ("reason", "")
        if re.match(r"raises? the reason|releases everything, then raises the reason", cell)
        else ("ok", "")
    )


def raised_by(misuse: str) -> str:
    """The error of the one row of misuses with that text."""
    (cell,) = [cell for text, cell in MISUSES.items() if misuse in text]
    found = re.match(r"`(\w+)`", cell)
    assert found, cell
    return found[1]


class Puppet:
    """A rank's actions on command; `tensors` are the live ones, in the order of allocation."""

    def __init__(self):
        self.tensors, self.freed = [], []

    def init(self):
        tsn.init("4M")
        self.tensors, self.freed = [], []

    def finalize(self):
        tsn.finalize()

    def barrier(self):
        tsn.barrier()

    def make(self, size):
        self.tensors.append(tsn.zeros(size))

    def free(self, index):
        tsn.free(self.tensors[index])
        self.freed.append(self.tensors.pop(index))

    def free_again(self):
        tsn.free(self.freed[-1])

    def mismatch(self):
        tsn.barrier() if tsn.rank() == 0 else tsn.zeros(4)

    def no_shape(self, shape, dtype):
        tsn.zeros(shape, dtype)

    def shrink(self, step):
        done = tsn.shrink(step + tsn.rank())
        return done.ranks, done.steps

    def look(self):
        tsn.check()
        tsn.synchronize()

    def ask(self):
        return tsn.rank(), tsn.size(), list(tsn.team()), tsn.stats()

    def use_old(self):
        for tensor in self.tensors + self.freed:
            tensor.add_(1)

    def break_link(self, rank):
        if int(os.environ["RANK"]) == rank:
            tsn.world().fail(tsn.FabricError(f"rank {rank}: the link broke"))


def _serve(pipes):
    puppet, pipe = Puppet(), pipes[int(os.environ["RANK"])]
    while True:
        name, args = pipe.recv()
        if name == "end":
            return
        try:
            pipe.send(("ok", getattr(puppet, name)(*args)))
        except Exception as err:
            pipe.send((type(err).__name__, str(err)))


class Job:
    """Ranks that wait for commands."""

    def __init__(self, size, nodes):
        pairs = [multiprocessing.get_context("forkserver").Pipe() for _ in range(size)]
        self.pipes, started = [mine for mine, _ in pairs], threading.Event()

        def on_start(procs):
            self.procs = procs
            started.set()

        env = {"TSN_TIMEOUT": "5", "TSN_HEARTBEAT_TIMEOUT": "3", "TSN_HEAP_LIMIT": "0"}
        env["VIRTUAL_NODES"] = str(nodes)
        theirs = [pipe for _, pipe in pairs]
        self.thread = threading.Thread(
            target=lambda: ranks.launch(size, _serve, theirs, env=env, init=False, timeout=3600, on_start=on_start)
        )
        self.thread.start()
        assert started.wait(60)

    def tell(self, name, *args, without=()):
        """Every rank's answer."""
        told = [r for r in range(len(self.pipes)) if r not in without]
        for rank in told:
            self.pipes[rank].send((name, args))
        answers = {}
        for rank in told:
            assert self.pipes[rank].poll(60), f"rank {rank} hangs in {name}{args}"
            answers[rank] = self.pipes[rank].recv()
        return answers

    def end(self):
        for pipe in self.pipes:
            try:
                pipe.send(("end", ()))
            except OSError:  # it was killed
                pass
        self.thread.join(60)


class Walk(RuleBasedStateMachine):
    """`size` ranks; `state` is a state of the table."""

    size, kills, nodes = 2, False, 1
    job = None

    def __init__(self):
        super().__init__()
        if Walk.job is None:
            Walk.job = Job(self.size, self.nodes)
        self.state, self.live, self.freed, self.broken = "none", [], False, None

    def tell(self, name, *args):
        return Walk.job.tell(name, *args)

    def expect(self, answers, kind, words=""):
        for rank, (found, said) in answers.items():
            assert found == kind and words in str(said), (rank, found, said, kind, words)

    def compare(self, call, answers) -> bool:
        """Compare the answers with the page; whether it accepts the call in this state."""
        kind, words = expected(call, self.state)
        if kind == "reason":
            self.gives_the_reason(answers)
        else:
            self.expect(answers, kind, words)
        return kind == "ok"

    def misused(self, call, answers, misuse, words):
        """The same of a call that is misused: where the state accepts it, the other table counts."""
        if expected(call, self.state)[0] == "ok":
            self.expect(answers, raised_by(misuse), words)
        else:
            self.compare(call, answers)

    def gives_the_reason(self, answers):
        for rank, (found, said) in answers.items():
            assert found == ("FabricError" if rank == self.broken else "PeerLost"), (rank, found, said)
            assert f"rank {self.broken}" in said and "the link broke" in said, (rank, said)

    @rule()
    def init(self):
        if self.compare("init", self.tell("init")):
            self.state, self.live, self.freed, self.broken = "running", [], False, None

    @rule()
    def finalize(self):
        self.compare("finalize", self.tell("finalize"))
        self.state, self.live, self.freed = "none", [], False

    @rule(size=st.sampled_from([0, 1, 1000, 5000]))
    def make(self, size):
        if self.compare("zeros", self.tell("make", size)):
            self.live.append(size)

    @rule(size=st.sampled_from([1 << 30, 1 << 63]))
    def exhaust(self, size):
        words = "exhausted" if size == 1 << 30 else "more elements than any heap"
        self.misused("zeros", self.tell("make", size), "beyond `TSN_HEAP_LIMIT`", words)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        index = data.draw(st.integers(0, len(self.live) - 1))
        if self.compare("free", self.tell("free", index)):
            self.freed = self.live.pop(index) > 0  # an empty tensor may be freed again

    @precondition(lambda self: self.freed)
    @rule()
    def free_again(self):
        self.misused("free", self.tell("free_again"), "`free()` of a tensor that is not live", "freed already")

    @rule()
    def mismatch(self):
        self.misused("barrier", self.tell("mismatch"), "ranks make different calls", "tilescale_net.zeros")

    @rule(
        case=st.sampled_from([(4, "float32", "dtype"), ([2, -1], None, "negative size"), ("4", None, "whole number")])
    )
    def no_shape(self, case):
        """On one rank alone: the others do not learn of it, so they must not have to wait."""
        answers = Walk.job.tell("no_shape", *case[:2], without=range(1, self.size))
        self.misused("zeros", answers, "an invalid shape or dtype", case[2])

    @rule(call=st.sampled_from(["barrier", "check"]))
    def call(self, call):
        self.compare(call, self.tell("look" if call == "check" else call))

    @rule(step=st.integers(0, 5))
    def shrink(self, step):
        answers = self.tell("shrink", step)
        if not expected("shrink", self.state)[0] == "ok":
            self.compare("shrink", answers)
            return
        everyone = list(range(self.size))
        assert answers == {r: ("ok", (everyone, [step + r for r in everyone])) for r in everyone}
        self.state = "running"

    @rule()
    def ask(self):
        answers = self.tell("ask")
        if self.compare("rank", answers):
            for rank, (_, (mine, size, team, stats)) in answers.items():
                assert (mine, size, team) == (rank, self.size, list(range(self.size)))
                assert bool(stats) == (self.nodes > 1)  # of the proxy

    @rule()
    def use_old(self):
        self.expect(self.tell("use_old"), "ok")

    @precondition(lambda self: self.state == "running")
    @rule(data=st.data())
    def break_link(self, data):
        self.broken = data.draw(st.integers(0, self.size - 1))
        answers = self.tell("break_link", self.broken)
        assert answers[self.broken][0] == "FabricError"
        self.state = "failed"
        threading.Event().wait(_SETTLED)

    @precondition(lambda self: self.state == "running" and self.kills)
    @rule(data=st.data(), how=st.sampled_from([signal.SIGKILL, signal.SIGSTOP]))
    def lose_a_rank(self, data, how):
        lost = data.draw(st.integers(0, self.size - 1))
        os.kill(Walk.job.procs[lost].pid, how)
        for name, args in (("barrier", ()), ("make", (4,)), ("finalize", ())):
            for rank, (kind, said) in Walk.job.tell(name, *args, without=[lost]).items():
                assert kind == "PeerLost" and f"rank {lost}" in said.partition(": ")[2], (rank, name, kind, said)
        Walk.job.procs[lost].kill()
        Walk.job.end()
        Walk.job, self.state, self.live, self.freed = Job(self.size, self.nodes), "none", [], False

    def teardown(self):
        if self.state != "none":
            self.finalize()


def _walk(size, examples, steps, kills, nodes=1):
    machine = type("Walk", (Walk,), {"size": size, "kills": kills, "nodes": nodes})
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )
    finally:
        if Walk.job is not None:
            Walk.job.end()
        Walk.job = None


def test_the_page_documents_every_call():
    assert {expected(call, "none")[0] for call in ("init", "finalize")} == {"ok"}
    assert {expected(call, "none") for call in set(CALLS) - {"init", "finalize"} - {"exit"}} == {
        ("TileScaleError", "not initialised")
    }
    assert expected("init", "running") == expected("init", "failed") == ("TileScaleError", "initialised already")
    refused = {call for call in CALLS if expected(call, "failed")[0] == "reason"}
    assert refused == {"finalize", "barrier", "empty", "zeros", "free", "synchronize", "check"}


@pytest.mark.parametrize("size, nodes, examples", [(2, 1, 4), (3, 1, 4), (2, 2, 5)])
def test_a_short_walk(size, nodes, examples):
    _walk(size, examples, 20, kills=False, nodes=nodes)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_long_walk(size, nodes, turn):
    _walk(size, 30, 40, kills=True, nodes=size if nodes else 1)
