"""The part of an AllToAll that is the same for every mode: its ranks, its state, and what its kernels refuse."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

import tilescale_net as tsn
from tilescale_net.kernels.collective import BufferSpecs, Collective
from tilescale_net.kernels.moe.arena import Arena, divide
from tilescale_net.kernels.moe.handle import Pending
from tilescale_net.kernels.moe.states import Machine
from tilescale_net.kernels.moe.status import ArgumentError, Status
from tilescale_net.kernels.moe.tiles import Tiles

if TYPE_CHECKING:
    from tilescale_net.runtime.world import World

_NO_TILES = {"dispatch": "the object was made without tile_rows", "combine": "combine_send got no tiles"}


class Participant(Collective):
    """Base of AllToAll.

    Attributes:
        mask: for each rank whether it takes part. active: the same as int32, for kernels.
        membership: the mask, and how often lost ranks were given up before; handles of another one are refused.
        status: where kernels report what they refuse.
        identity: its arguments and group as text. key: see tilescale_net.ops.
    """

    works_with_some = True
    _arena: Arena | None = None

    def allocate(self, specs: BufferSpecs) -> dict[str, torch.Tensor]:
        """All of it, zeroed where it is not rows of an arena, or HeapError before anything is allocated."""
        if self._arena is None:
            return super().allocate(specs)
        shared, own = divide(specs)
        placed = self._arena.place(shared)
        return super().allocate(own) | placed

    @property
    def all_blocks(self) -> int:
        """As many blocks as run at once."""
        return self._block_limit if self.device.type == "cuda" else self.blocks

    def _take_part(self, identity: str) -> None:
        """Begin, with the ranks that take part in the job."""
        self.identity, self._machine = identity, Machine()
        self.products: dict = {}  # of the operators, see ops/experts.py
        with torch.inference_mode(False):
            self._name_members(tuple(r in self._members for r in range(self.n_pes)))
            self.active = torch.tensor(self.mask, dtype=torch.int32, device=self.device)
            self.status = Status(self._world)

    def _release(self) -> None:
        super()._release()
        self.status.close()
        self.__dict__.pop("_mode", None)  # refers to this object, and holds all of its tensors

    @property
    def world(self) -> "World":
        """In which its kernels run."""
        return self._world

    @property
    def under_way(self) -> tuple[str, ...]:
        """What this rank has sent and not yet received: "dispatch", "combine", both or none."""
        return tuple(self._machine.pending)

    @property
    def meets_first(self) -> bool:
        """Whether a call sends nothing before all ranks have begun it."""
        return self._mode.meets_first

    @property
    def outdated(self) -> bool:
        """Whether ranks have left the job since, so that `set_active` must come before any other call."""
        return self._members is not self._world.control.members

    def _name_members(self, mask: tuple[bool, ...]) -> None:
        """From now on these ranks take part."""
        self.mask, self._members, self._era = mask, self._world.control.members, self._world.control.generation
        self.membership = (self._era, mask)
        # Operators take tensors, numbers and text.
        self.key = f"{self.identity} {self._era} {''.join('01'[m] for m in mask)}"

    @staticmethod
    def checked_list(active: Iterable[bool], ranks: int) -> tuple[bool, ...]:
        active = tuple(bool(a) for a in active)
        if len(active) != ranks:
            raise ValueError(f"AllToAll: active has {len(active)} entries; there are {ranks} ranks")
        if not any(active):
            raise ValueError("AllToAll: active leaves out every rank")
        return active

    def set_active(self, active: list[bool] | None = None) -> None:
        """Leave ranks out of the job from the next call on: they get nothing, and no rank waits for them.

        Collective over the ranks that stay, with the same list (default: those that take part in the job, see
        `tilescale_net.shrink`); nothing may be under way, unless ranks were lost. From then on they make the
        host's collective calls (memory, barriers, new objects, `free`) without the others, and handles from before are
        refused. Objects made before accept no calls until their `set_active` is called too. A rank that is left out
        need not call; it may then only `check`, `free` and finalize, and cannot come back.

        Raises:
            ValueError: a list of another length, or one that brings a rank back.
            RankMismatch: another rank gave another list.
            PeerLost: a rank that shall stay did not call.
        """
        self._machine_check("set_active")
        control = self._world.control
        void = self._era != control.generation  # what was under way when ranks were lost
        if void:
            self._forget_own_refusal()
        self._begin("set_active")
        active = [r in control.members for r in range(self.n_pes)] if active is None else active
        active = self.checked_list(active, self.n_pes)
        if self._machine.pending and not void:
            raise ValueError("AllToAll.set_active: a half was under way here when ranks left; free this object")
        back = [r for r in range(self.n_pes) if active[r] and not (self.mask[r] and r in control.members)]
        if back:
            raise ValueError(f"AllToAll: active brings back ranks {back}; make a new job instead")
        if not active[self.rank]:
            control.leave()
            return
        self._world.synchronize()
        control.shrink_to([r for r in range(self.n_pes) if active[r]], "AllToAll.set_active")
        if void:
            self._reset()
        self._machine.outdated = False
        self._name_members(active)
        self._mode.regroup(self.mask)
        self.active.copy_(torch.tensor(active, dtype=torch.int32, device="cpu"), non_blocking=True)

    def _reset(self) -> None:
        """Begin anew after calls were given up in the middle. All ranks are here, and their kernels have ended."""
        with torch.inference_mode(False):
            for counter in self._counters:
                counter.view(torch.uint8).zero_()
            self._mode.reset()
            if self._arena is not None:
                self._arena.reset()
        self._machine.pending.clear()
        self._world.memory.synchronize()
        self._world.control.agree("AllToAll.set_active", "begins anew")

    def _compile(self, everything: bool) -> None:
        """Compile on all ranks before any of them goes on; an error of one is an error of all.

        Each rank of a node begins elsewhere in the list, so that they compile at the same time what all of them find in the
        cache afterwards.
        """
        error, place = None, self._world.topology
        try:
            variants = self._mode.variants(everything)
            first = len(variants) * place.local_rank // place.node_size
            for compiled in variants[first:] + variants[:first]:
                compiled()
        except Exception as found:
            error = found
        said = self._world.control.gather("AllToAll: kernels compiled", str(error or ""))
        failed = [i for i, text in enumerate(said) if text]
        if failed:
            self._release()
            raise error or tsn.KernelError(f"AllToAll: rank {self._members[failed[0]]} has failed: {said[failed[0]]}")

    # -- tiles ------------------------------------------------------------------------------------------------------

    def alongside(self, pending: Pending) -> Tiles:
        """Let what is launched next on the current stream run beside a half that is under way and has tiles.

        That is a dispatch of an object with `tile_rows`, or a combine that got `tiles`. Kernels that follow may wait for
        tiles of the dispatch (`Dispatched.x` is `pending.result.x`), or finish those that the combine waits for: the half
        has its multiprocessors.

        Returns:
            The tiles. Tile t is there when a wait for `words[t]`, "ge", `calls[0] * growth` ends; TMA copies of its rows want
            `proxy="async"`.

        Raises:
            ValueError: no half that is under way, or one without tiles.
        """
        self._world.check()
        if not isinstance(pending, Pending) or self._machine.pending.get(pending.kind) is not pending:
            raise ValueError(
                "AllToAll.alongside: this half is not under way; give what dispatch_send or combine_send has returned"
            )
        if pending.tiles is None:
            raise ValueError(f"AllToAll.alongside: {_NO_TILES[pending.kind]}")
        self._mode.start(pending)
        return pending.tiles

    def _check_tiles(self, tiles: Tiles) -> None:
        """Raise TypeError or ValueError for tiles of `y` that this object's combine cannot wait for."""
        if not isinstance(tiles, Tiles):
            raise TypeError(f"AllToAll.combine_send: tiles must be Tiles, not {type(tiles).__name__}")
        mine = self.config.tile_rows, self.config.tiles, self.blocks
        if (tiles.rows, tiles.count, tiles.begins) != mine:
            raise ValueError(
                f"AllToAll.combine_send: tiles are {tiles.count} of {tiles.rows} rows, begun by {tiles.begins} blocks; those of "
                f"this object are {mine[1]} of {mine[0]} rows, begun by {mine[2]} blocks"
            )

    # -- states and refusals ----------------------------------------------------------------------------------------

    def _machine_check(self, call: str) -> None:
        machine = self._machine
        machine.freed = not self.alive
        if machine.freed:
            self._world.check()
        machine.outdated = self.outdated
        machine.left_out = self._world.control.excluded
        machine.check(call)

    def _begin(self, call: str = "", after: torch.Event | None = None) -> None:
        """How every call that sends begins: the state is checked, then what has failed meanwhile.

        Raises:
            TypeError: `after` is no event; the other ranks wait until this one makes the right call.
        """
        if after is not None and not isinstance(after, torch.Event | torch.cuda.Event):
            raise TypeError(f"AllToAll.{call}: after must be an event of torch, not {type(after).__name__}")
        world, machine = self._world, self._machine
        control = world.control
        if (
            machine.pending
            or not self._owned
            or world.closed
            or control.excluded
            or self._members is not control.members
        ):
            self._machine_check(call)
        world.check()
        if self.status.written:
            self._raise_refusal()
        self._order.follow()
        if after is not None and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(after)
        if self._arena is not None and call not in ("set_active", "empty_output"):
            self._arena.enter(self, call)

    def _named(self, call: str, error: ArgumentError) -> Exception:
        return type(error.error)(f"AllToAll.{call} on rank {self.rank}: {error.error}")

    def _refusal(self) -> Exception | None:
        """What kernels refused since the last look."""
        return self.status.error("AllToAll", self.config.num_experts, self.config.capacity)

    def _raise_refusal(self) -> None:
        error = self._refusal()
        if error is not None:
            raise error

    def _raise_refusal_if_simulated(self) -> None:
        """Where kernels have ended when their launch returns, a refusal is known at once."""
        if self.device.type == "cpu":
            self._raise_refusal()

    def _forget_own_refusal(self) -> None:
        """What this rank's kernels report is not raised: another error says it, or they were given up."""
        self._world.synchronize()
        self.status.take()
