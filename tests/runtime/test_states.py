"""A random walk through the table of docs/states.md, section World: live ranks, every answer compared with the table."""

import multiprocessing
import os
import signal
import threading

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import tilescale_net as tsn
from tests import ranks

_SETTLED = 1.0  # seconds in which every rank's watchdog has noticed


class Puppet:
    """What a rank does on command; `tensors` are those that are live, in the order in which they were made."""

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
        self.freed.append(self.tensors.pop(index))
        tsn.free(self.freed[-1])

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

    def __init__(self, size):
        pairs = [multiprocessing.get_context("forkserver").Pipe() for _ in range(size)]
        self.pipes, started = [mine for mine, _ in pairs], threading.Event()

        def on_start(procs):
            self.procs = procs
            started.set()

        env = {"TSN_TIMEOUT": "5", "TSN_HEARTBEAT_TIMEOUT": "3", "TSN_HEAP_LIMIT": "0"}
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
    """`size` ranks; `state` is what the table says."""

    size, kills = 2, False
    job = None

    def __init__(self):
        super().__init__()
        if Walk.job is None:
            Walk.job = Job(self.size)
        self.state, self.live, self.freed, self.broken = "none", [], 0, None

    def tell(self, name, *args):
        return Walk.job.tell(name, *args)

    def expect(self, answers, kind, words=""):
        for rank, (found, said) in answers.items():
            assert found == kind and words in str(said), (rank, found, said, kind, words)

    def refused(self, answers):
        """The answers of a call that needs a running world, in another state."""
        if self.state == "none":
            self.expect(answers, "TileScaleError", "not initialised")
            return
        for rank, (found, said) in answers.items():
            assert found == ("FabricError" if rank == self.broken else "PeerLost"), (rank, found, said)
            assert f"rank {self.broken}" in said and "the link broke" in said, (rank, said)

    def collective(self, name, *args):
        answers = self.tell(name, *args)
        if self.state == "running":
            self.expect(answers, "ok")
        else:
            self.refused(answers)
        return self.state == "running"

    @rule()
    def init(self):
        answers = self.tell("init")
        if self.state == "none":
            self.expect(answers, "ok")
            self.state, self.live, self.freed, self.broken = "running", [], 0, None
        else:
            self.expect(answers, "TileScaleError", "initialised already")

    @rule()
    def finalize(self):
        answers = self.tell("finalize")
        if self.state == "failed":
            self.refused(answers)
        else:
            self.expect(answers, "ok")
        self.state, self.live, self.freed = "none", [], 0

    @rule(size=st.sampled_from([0, 1, 1000, 5000]))
    def make(self, size):
        if self.collective("make", size):
            self.live.append(size)

    @rule()
    def exhaust(self):
        for size, words in ((1 << 30, "exhausted"), (1 << 63, "more elements than any heap")):
            answers = self.tell("make", size)
            self.expect(answers, "HeapError", words) if self.state == "running" else self.refused(answers)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.collective("free", index)
        self.freed = self.live.pop(index)

    @precondition(lambda self: self.freed)
    @rule()
    def free_again(self):
        answers = self.tell("free_again")
        self.expect(answers, "HeapError", "freed already") if self.state == "running" else self.refused(answers)

    @rule()
    def mismatch(self):
        answers = self.tell("mismatch")
        if self.state == "running":
            self.expect(answers, "RankMismatch", "tilescale_net.zeros")
        else:
            self.refused(answers)

    @rule(
        what=st.sampled_from([(4, "float32", "dtype"), ([2, -1], None, "negative size"), ("4", None, "whole number")])
    )
    def no_shape(self, what):
        """On one rank alone: the others are not told, so they must not have to wait."""
        answers = Walk.job.tell("no_shape", *what[:2], without=range(1, self.size))
        self.expect(answers, "TypeError", what[2]) if self.state == "running" else self.refused(answers)

    @rule(name=st.sampled_from(["barrier", "look"]))
    def call(self, name):
        self.collective(name)

    @rule(step=st.integers(0, 5))
    def shrink(self, step):
        answers = self.tell("shrink", step)
        if self.state == "none":
            self.refused(answers)
            return
        everyone = list(range(self.size))
        assert answers == {r: ("ok", (everyone, [step + r for r in everyone])) for r in everyone}
        self.state = "running"

    @rule()
    def ask(self):
        answers = self.tell("ask")
        if self.state == "none":
            self.refused(answers)
        else:
            team = list(range(self.size))
            assert answers == {r: ("ok", (r, self.size, team, {})) for r in team}

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
        Walk.job, self.state, self.live, self.freed = Job(self.size), "none", [], 0

    def teardown(self):
        if self.state != "none":
            self.finalize()


def _walk(size, examples, steps, kills):
    machine = type("Walk", (Walk,), {"size": size, "kills": kills})
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


@pytest.mark.parametrize("size", [2, 3])
def test_a_short_walk(size):
    _walk(size, 4, 20, kills=False)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("size", [2, 3])
def test_a_long_walk(size, turn):
    _walk(size, 30, 40, kills=True)
