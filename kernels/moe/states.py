"""The states of an AllToAll on a rank, and the calls that it accepts in each; docs/states.md shows the same table."""

import enum

from tilescale_net.errors import TileScaleError


class State(enum.Enum):
    """What an AllToAll is doing on this rank."""

    IDLE = "idle"
    DISPATCHING = "dispatching"
    COMBINING = "combining"
    BOTH = "both"
    OUTDATED = "outdated"
    LEFT_OUT = "left out"
    FREED = "freed"


_LIVE = {State.IDLE, State.DISPATCHING, State.COMBINING, State.BOTH}

# The states in which a call is accepted; in all others it raises, and changes nothing.
ALLOWED: dict[str, set[State]] = {
    "dispatch": {State.IDLE, State.COMBINING},
    "dispatch_send": {State.IDLE, State.COMBINING},
    "dispatch_recv": {State.DISPATCHING, State.BOTH},
    "combine": {State.IDLE, State.DISPATCHING},
    "combine_values": {State.IDLE, State.DISPATCHING},
    "combine_send": {State.IDLE, State.DISPATCHING},
    "combine_recv": {State.COMBINING, State.BOTH},
    "set_active": {State.IDLE, State.OUTDATED},
    "empty_output": _LIVE,
    "check": {*_LIVE, State.OUTDATED, State.LEFT_OUT},
    "free": {State.IDLE, State.OUTDATED, State.LEFT_OUT},
}


class Machine:
    """The state of one AllToAll, and the halves that are under way.

    Attributes:
        pending: what was sent and not yet received, by "dispatch" and "combine".
        outdated, left_out, freed: see docs/states.md.
    """

    def __init__(self):
        self.pending: dict[str, object] = {}
        self.outdated = self.left_out = self.freed = False

    @property
    def state(self) -> State:
        """The state now; what ends more comes first."""
        if self.freed:
            return State.FREED
        if self.left_out:
            return State.LEFT_OUT
        if self.outdated:
            return State.OUTDATED
        if not self.pending:
            return State.IDLE
        if len(self.pending) == 2:
            return State.BOTH
        return State.DISPATCHING if "dispatch" in self.pending else State.COMBINING

    def check(self, call: str) -> None:
        """Raise unless the table accepts `call` now.

        Raises:
            TileScaleError: the object or this rank has left, or the ranks of the job are others than the object's.
            ValueError: a half is missing.
        """
        # The usual case costs a look at four fields.
        if not (self.pending or self.outdated or self.left_out or self.freed) and not call.endswith("_recv"):
            return
        state = self.state
        if state not in ALLOWED[call]:
            raise self._error(call, state)

    def _error(self, call: str, state: State) -> Exception:
        name = f"AllToAll.{call}"
        if state is State.FREED:
            return TileScaleError(f"{name}: used after free() or finalize()")
        if state is State.LEFT_OUT:
            return TileScaleError(f"{name}: set_active has left this rank out; it makes no calls but check and free")
        if state is State.OUTDATED:
            return TileScaleError(
                f"{name}: ranks have left the job, by another object's set_active or tilescale_net.shrink; call set_active with "
                "the ranks that stay, or free"
            )
        if call.endswith("_recv"):
            kind = call.removesuffix("_recv")
            return ValueError(f"{name}: this is not the {kind} that was sent last and not yet received")
        kind = call.split("_")[0]
        kind = kind if kind in self.pending else next(iter(self.pending))
        return ValueError(f"{name}: the {kind} sent before has not been received; call {kind}_recv first")

    def received(self, kind: str, pending) -> None:
        """Take note that a half is received. Raises ValueError for one that is not under way."""
        if self.pending.get(kind) is not pending:
            raise self._error(f"{kind}_recv", State.IDLE)
        del self.pending[kind]
