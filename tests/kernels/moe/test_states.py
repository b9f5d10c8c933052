"""Which calls an AllToAll accepts in which state: the table of docs/states.md, walked at random by all ranks together."""

import functools
import os
import random
import signal
import traceback
from pathlib import Path

import hypothesis
import hypothesis.stateful as stateful
import hypothesis.strategies as st
import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.moe.support import check_compiled_ahead
from tests.kernels.support import unsettle
from tests.variants import nightly
from tilescale_net.errors import TileScaleError
from tilescale_net.kernels.moe import AllToAll
from tilescale_net.kernels.moe.all_to_all import ALLOWED, State

SHAPE = dict(num_experts=6, max_tokens=5, hidden=32, top_k=3)
TOKENS = 4
CALLS = sorted(ALLOWED)


def _documented() -> dict[tuple[str, str], str]:
    text = (Path(__file__).parents[3] / "docs" / "states.md").read_text()
    section = text[text.index("## AllToAll") :].split("\n## ")[0]
    rows = [[c.strip() for c in line.strip("| ").split("|")] for line in section.splitlines() if line.startswith("| ")]
    head = next(row for row in rows if row[0] == "call")
    return {(row[0], state): word for row in rows if row[0] in ALLOWED for state, word in zip(head[1:], row[1:])}


def test_the_table_is_documented():
    table = _documented()
    assert set(table) == {(call, state.value) for call in ALLOWED for state in State}
    for (call, state), word in table.items():
        assert (word == "yes") == (State(state) in ALLOWED[call]), (call, state)


class Object:
    """An AllToAll and what the table says of it; `left`: this rank was left out of the job."""

    def __init__(self, mode: str, layout: str):
        self.mode, self.layout = mode, layout
        self.op = AllToAll(**SHAPE, mode=mode, layout=layout)
        self.state = State.IDLE
        self.pending: dict[str, object] = {}
        self.received = None  # (dispatched, its rows, tokens) not combined yet

    def inputs(self):
        pace = random.Random(tsn.rank())
        device = tsn.device()
        x = torch.tensor([[t + 1.0 + tsn.rank()] * 32 for t in range(TOKENS)], dtype=torch.bfloat16, device=device)
        rows = [pace.sample(range(-1, 6), 3) for _ in range(TOKENS)]
        return x, torch.tensor(rows, device=device)

    def expected(self) -> torch.Tensor:
        """Each token as often as it has choices (layout "rank": ranks) that take part."""
        x, idx = self.inputs()
        local = 6 // tsn.size()
        counts = []
        for row in idx.tolist():
            hosts = [e // local for e in row if e >= 0 and self.op.active_mask[e // local]]
            counts.append(len(set(hosts) if self.layout == "rank" else hosts))
        return x * torch.tensor(counts, dtype=torch.bfloat16, device=x.device)[:, None]

    def arrived(self, dispatched) -> None:
        tsn.synchronize()
        self.received = dispatched, dispatched.x.clone()

    def right(self, call: str):
        """Make a call with right arguments; None where there is nothing to call it with."""
        op = self.op
        if call in ("dispatch", "dispatch_send"):
            done = getattr(op, call)(*self.inputs())
            if call == "dispatch":
                self.arrived(done)
            else:
                self.pending["dispatch"] = done
        elif call == "dispatch_recv":
            self.arrived(op.dispatch_recv(self.pending.pop("dispatch", None)))
        elif call == "combine_recv":
            self._compare(op.combine_recv(self.pending.pop("combine", None)))
        elif call in ("combine", "combine_send", "combine_values"):
            (dispatched, y), self.received = self.received, None
            if call == "combine_values":
                self._compare(op.combine_values(y, dispatched.row_weight, dispatched.handle)[0])
            elif call == "combine":
                self._compare(op.combine(y, dispatched.handle, weighted=False))
            else:
                self.pending["combine"] = op.combine_send(y, dispatched.handle, weighted=False)
        elif call == "empty_output":
            op.empty_output()
        else:
            getattr(op, call)()

    def _compare(self, out) -> None:
        self.op.check()
        wanted = self.expected()
        assert torch.equal(out, wanted), (self.mode, self.layout, out[:, 0].tolist(), wanted[:, 0].tolist())

    def wrong_arguments(self, call: str):
        """Make a call with a wrong argument."""
        x, idx = self.inputs()
        if call in ("dispatch", "dispatch_send"):
            getattr(self.op, call)(x.float(), idx)
        elif call == "dispatch with handle":
            self.op.dispatch(x[:1], handle=self.received[0].handle)
        elif call == "combine_values":
            self.op.combine_values(self.received[1], None, self.received[0].handle)
        else:
            getattr(self.op, call)(self.received[1].float(), self.received[0].handle)


def _noted(step):
    """A step whose first failure is kept: hypothesis repeats a walk that failed, which goes wrong elsewhere then."""

    @functools.wraps(step)
    def run(self, **values):
        try:
            step(self, **values)
        except Exception:
            Walk.failure = Walk.failure or "\n".join([*self.steps, traceback.format_exc()])
            raise

    return run


class Walk(stateful.RuleBasedStateMachine):
    """Two objects of each rank; all ranks draw the same steps, because they have the same seed."""

    left = False  # this rank was left out, in this walk or one before
    failure = ""  # what went wrong first, after which steps

    def __init__(self):
        super().__init__()
        self.objects: list[Object] = []
        self.steps: list[str] = []

    def _note(self, *words) -> None:
        self.steps.append(" ".join(map(str, words)))

    @stateful.rule(
        mode=st.sampled_from(["throughput", "throughput", "latency"]), layout=st.sampled_from(["expert", "rank"])
    )
    @stateful.precondition(lambda self: len(self.objects) < 2)
    @_noted
    def construct(self, mode, layout):
        layout = "expert" if mode == "latency" else layout
        self._note("construct", mode, layout)
        if Walk.left:
            with pytest.raises(TileScaleError, match="left out"):
                Object(mode, layout)
        else:
            self.objects.append(Object(mode, layout))

    @stateful.rule(which=st.integers(0, 1), call=st.sampled_from(CALLS), only=st.integers(-1, 2), pace=st.integers())
    @stateful.precondition(lambda self: self.objects)
    @_noted
    def call(self, which, call, only, pace):
        """A call of all ranks; one that the table does not accept, of all or of one."""
        thing = self.objects[which % len(self.objects)]
        self._note(which, thing.state.value, call)
        unsettle(random.Random(pace + tsn.rank()), 0.1, 0.002)
        if thing.state not in ALLOWED[call]:
            if call != "set_active" and (only < 0 or only == tsn.rank()):
                kind = ValueError if _documented()[call, thing.state.value] == "ValueError" else TileScaleError
                with pytest.raises(kind):
                    self._misplaced(thing, call)
            return
        if call == "set_active":
            return  # a rule of its own
        if call.startswith("combine") and not call.endswith("recv"):
            if thing.received is None or (call == "combine_values" and thing.mode == "latency"):
                return
        thing.right(call)
        self._follow(thing, call)

    @staticmethod
    def _misplaced(thing: Object, call: str) -> None:
        """A call that the table refuses, with arguments that would be right."""
        x, idx = thing.inputs()
        dispatched = thing.received[0] if thing.received else None
        arguments = {
            "dispatch": (x, idx),
            "dispatch_send": (x, idx),
            "dispatch_recv": (thing.pending.get("dispatch"),),
            "combine_recv": (thing.pending.get("combine"),),
        }
        handle = dispatched.handle if dispatched else None
        arguments.update({call: (x, handle) for call in ("combine", "combine_send")}, combine_values=(x, x, handle))
        getattr(thing.op, call)(*arguments.get(call, ()))

    def _follow(self, thing: Object, call: str) -> None:
        if call == "free":
            thing.state = State.FREED
            return
        if thing.state in (State.OUTDATED, State.LEFT_OUT):
            return
        names = {(): State.IDLE, ("dispatch",): State.DISPATCHING, ("combine",): State.COMBINING}
        thing.state = names.get(tuple(thing.pending), State.BOTH)
        assert thing.op._machine.state is thing.state, (self.steps, thing.op._machine.state)

    @stateful.rule(which=st.integers(0, 1))
    @stateful.precondition(lambda self: any(o.state is State.FREED for o in self.objects))
    @_noted
    def forget(self, which):
        self.objects = [o for o in self.objects if o.state is not State.FREED]

    @stateful.rule(
        which=st.integers(0, 1),
        call=st.sampled_from(
            ["dispatch", "dispatch_send", "dispatch with handle", "combine", "combine_send", "combine_values"]
        ),
        culprit=st.integers(0, 2),
    )
    @stateful.precondition(lambda self: self.objects and not Walk.left)
    @_noted
    def mistake(self, which, call, culprit):
        """A wrong argument of one rank is an error on all."""
        thing = self.objects[which % len(self.objects)]
        members = tsn.world().control.members
        culprit = members[culprit % len(members)]
        name = call.split()[0]
        if thing.state not in ALLOWED[name] or (
            thing.mode == "latency" and call in ("dispatch with handle", "combine_values")
        ):
            return
        if thing.received is None and call not in ("dispatch", "dispatch_send"):
            return
        self._note(which, "mistake of", culprit, call)
        with pytest.raises((ValueError, TypeError), match=f"rank {culprit}"):
            if tsn.rank() == culprit:
                thing.wrong_arguments(call)
            elif call == "dispatch with handle":
                thing.op.dispatch(thing.inputs()[0], handle=thing.received[0].handle)
            else:
                before = dict(thing.pending)
                try:
                    thing.right(call)
                    kind = name.split("_")[0]
                    if kind in thing.pending and kind not in before:
                        thing.right(f"{kind}_recv")
                finally:
                    thing.pending = before
            thing.op.check()
        thing.received = None  # its handle may be combined, and the rows of a refused dispatch are nobody's
        self._follow(thing, "mistake")

    @stateful.rule(which=st.integers(0, 1), gone=st.integers(0, 2), often=st.integers(0, 3))
    @stateful.precondition(lambda self: self.objects and tsn.size() > 2 and not Walk.left)
    @_noted
    def leave(self, which, gone, often):
        thing = self.objects[which % len(self.objects)]
        members = tsn.world().control.members
        if thing.state is State.OUTDATED:
            kept = members
        elif len(members) == 3 and often == 0 and not any(o.pending for o in self.objects if o is not thing):
            kept = [r for r in members if r != gone]
        else:
            return
        active = [r in kept for r in range(tsn.size())]
        self._note(which, "set_active", active)
        if thing.state not in ALLOWED["set_active"]:
            with pytest.raises(TileScaleError if thing.state is State.FREED else ValueError):
                thing.op.set_active(active)
            return
        thing.op.set_active(active)
        thing.state = State.IDLE
        for other in self.objects:
            if not active[tsn.rank()]:
                other.state = State.FREED if other.state is State.FREED else State.LEFT_OUT
            elif (
                other is not thing
                and other.state is not State.FREED
                and other.op._members is not tsn.world().control.members
            ):
                other.state = State.OUTDATED
        if not active[tsn.rank()]:
            Walk.left, thing.state = True, State.LEFT_OUT
        if thing.received is not None and not Walk.left:
            dispatched, y = thing.received
            with pytest.raises(ValueError, match="from before set_active or a loss"):
                thing.op.combine(y, dispatched.handle)
        for other in self.objects:
            other.received = None
            if other.state is State.OUTDATED:
                other.pending = {}

    @stateful.rule(often=st.integers(0, 3))
    @stateful.precondition(lambda self: self.objects and not Walk.left)
    @_noted
    def shrink(self, often):
        """Calls in flight are void, although no rank is lost."""
        if often:
            return
        self._note("shrink")
        assert tsn.shrink().ranks == tsn.world().control.members
        for thing in self.objects:
            if thing.state is not State.FREED:
                thing.state, thing.pending, thing.received = State.OUTDATED, {}, None

    def teardown(self):
        for thing in self.objects:
            for kind in list(thing.pending):
                thing.right(f"{kind}_recv")
            if thing.state is not State.FREED:
                check_compiled_ahead(thing.op)
                thing.op.free()


def _walk(seed: int, walks: int, steps: int) -> None:
    """Walks one after the other. Each is a run of its own for hypothesis, whose first example is the shortest there is:
    ranks that left stay away in the walks that follow, so that hypothesis could not repeat one."""
    options = hypothesis.settings(
        max_examples=2, stateful_step_count=steps, deadline=None, database=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=False, print_blob=False,
    )  # fmt: skip
    for turn in range(walks):
        try:
            stateful.run_state_machine_as_test(hypothesis.seed(seed + turn)(Walk), settings=options)
        except Exception:
            assert not Walk.failure, Walk.failure
            raise


def _walk_and_lose(seed: int) -> None:
    """At the end rank 1 dies: whatever is called then raises PeerLost."""
    _walk(seed, 2, 15)
    thing = Object("throughput", "expert")
    if tsn.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TileScaleError, match="rank 1"):
        thing.right("dispatch")
        thing.op.check()
    for call in ("dispatch", "combine", "empty_output", "dispatch_send", "set_active"):
        with pytest.raises(TileScaleError, match="rank 1"):
            thing.op.combine(None, None) if call == "combine" else Walk._misplaced(
                thing, call
            ) if call != "set_active" else (thing.op.set_active([True] * tsn.size()))


# With three ranks one can leave, and everything else happens too.
@pytest.mark.parametrize("size", [nightly(2), 3])
@ranks.on(timeout=280)
def test_walk(size, seed):
    _walk(seed, 5, 25)


@ranks.on(3, timeout=100)
def test_ranks_go_on_while_one_that_is_left_out_keeps_the_store():
    thing = Object("throughput", "expert")
    thing.op.set_active([False, True, True])
    if tsn.rank():
        assert tsn.shrink().ranks == [1, 2]
    thing.op.free()


def test_walk_that_ends_with_a_loss():
    outcomes = ranks.launch(2, _walk_and_lose, random.randrange(1 << 30), timeout=100)
    assert outcomes[1].exitcode == -signal.SIGKILL
    # finalize raises the loss again, which is right
    assert outcomes[0].ok or outcomes[0].error[0] == "PeerLost", outcomes[0]


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("turn", range(10))
@pytest.mark.timeout(1100)
@ranks.on(timeout=1000)
def test_long_walk(size, turn, seed):
    _walk(seed, 40, 60)
