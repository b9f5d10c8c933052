"""The ranks of a Buffer: its world, its nodes, the groups of mpi4py's communicators, and masked ranks."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import tilescale_net as tsn
from tilescale_net.errors import ConfigurationError, FabricError, PeerLost, TileScaleError, WaitTimeout
from tilescale_net.runtime import groups, placement, settings, this_host, worlds
from tilescale_net.runtime.groups import StoreGroup
from tilescale_net.runtime.world import World

# Worlds created by buffers, and the number of buffers that use each.
_users: dict[World, int] = {}


def join(group: tsn.Group, nbytes: int) -> World:
    """The world of a group; created, with a heap of at least `nbytes` bytes, unless it exists."""
    try:
        world = tsn.world(group)
    except tsn.ConfigurationError:
        raise
    except tsn.TileScaleError:
        on_gpu = settings.device_kind() == "cuda"
        assert not isinstance(group, World)
        world = tsn.init(max(settings.heap_bytes(None, on_gpu), nbytes), group=group)
        _users[world] = 0
    if world in _users:
        _users[world] += 1
    return world


def leave(world: World) -> None:
    """Release a world; the last buffer ends a world that a buffer has created."""
    if world in _users:
        _users[world] -= 1
        if not _users[world]:
            del _users[world]
            if world in worlds.alive():
                tsn.finalize(world)


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Nodes of a group, and its ranks on one. Collective if the group has no world yet.

    Args:
        group: a ProcessGroup.
    """
    try:
        topology = tsn.world(group).topology
    except tsn.ConfigurationError:
        raise
    except tsn.TileScaleError:
        location = placement.host_identity(), placement.virtual_node(*groups.own_number(group))
        locations: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(locations, location, group)
        topology = placement.group_topology(dist.get_rank(group), len(locations), *map(list, zip(*locations)))
    return topology.nodes, topology.node_size


def get_logical_domain_size(group: dist.ProcessGroup, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """As `get_physical_domain_size`: rows always cross the network once per node.

    Args:
        allow_hybrid_mode: changes nothing.
    """
    return get_physical_domain_size(group)


_NOBODY = ("192.0.2.1", "2001:db8::1")  # addresses of no host, reached by the default route

_known: list[tuple[object, StoreGroup]] = []  # communicators and their groups; both live as long as the process


def group_of(comm: Any) -> StoreGroup:
    """The group of a communicator, the same at every call. Collective over its ranks.

    Args:
        comm: with mpi4py's Get_rank, Get_size, bcast and allgather.

    Raises:
        ConfigurationError: the ranks are on several hosts, and the first of them has no address by which the others
            reach it; on all ranks.
    """
    for known, group in _known:
        if known is comm:
            return group
    rank, size = comm.Get_rank(), comm.Get_size()
    hosts = [tuple(host) for host in comm.allgather([this_host.identity("net"), socket.gethostname()])]
    store = None
    if rank == 0:
        try:
            address = _meeting_place({name for host, name in hosts if host != hosts[0][0]})
            with this_host.listen(address) as listener:
                port, fd = listener.getsockname()[1], os.dup(listener.fileno())
        except (ConfigurationError, OSError) as error:
            comm.bcast(("", str(error)), root=0)
            raise
        store = dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=fd)
        comm.bcast((address, port), root=0)
    else:
        address, port = comm.bcast(None, root=0)
        if not address:
            raise ConfigurationError(port)
        store = dist.TCPStore(address, port, None, False, wait_for_workers=False)
    _known.append((comm, StoreGroup(store, rank, size, kept_by=0)))
    return _known[-1][1]


def _meeting_place(others: Iterable[str]) -> str:
    """Address of this host for ranks on hosts of other names; else loopback."""
    others = sorted(others)
    if not others:
        return "127.0.0.1"
    if address := this_host.address_reaching([*others, socket.gethostname(), *_NOBODY]):
        return address
    raise ConfigurationError(
        f"deep_ep.Buffer(comm=): ranks are on other hosts ({', '.join(others)}), whose names are not known on this one, and its "
        f"own name {socket.gethostname()} stands for loopback or for nothing, nor is there a default route; write the hosts' addresses into /etc/hosts, or "
        "make a group of torch.distributed and give group="
    )


LOST = (PeerLost, WaitTimeout, FabricError)


@dataclass
class _Dispatches:
    """Low-latency dispatches of this rank in a world, by all of its Buffers: the number of begun ones, and the last
    void one."""

    begun: int = 0
    void: int = 0


_dispatches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by world


def _for_good(ranks: list[int]) -> str:
    return f"ranks {ranks} cannot come back; make a Buffer of a new group"


class Masks:
    """The masked ranks of a Buffer.

    Args:
        world: of the Buffer.
        shrinks: whether calls continue when ranks are lost, instead of raising.

    Attributes:
        shrinks: the same.
        losses: errors of lost ranks, after which the others `go_on`; none if calls raise them.
    """

    def __init__(self, world: World, shrinks: bool):
        self._world, self.shrinks = world, shrinks
        self.losses: tuple[type[Exception], ...] = LOST if shrinks else ()
        self._asked: set[int] = set()  # to be left out from the next call on
        self._warned_of: list[int] = []
        self._dispatches = _dispatches.setdefault(world, _Dispatches())

    @property
    def members(self) -> list[int]:
        """The active ranks; a new list whenever they change."""
        return self._world.control.members

    def update(self, rank: int, masked: bool) -> None:
        """Mask a rank from the next call on, on all remaining ranks; or withdraw that before then."""
        self._world.control.refuse()
        if not 0 <= rank < self._world.size:
            raise ValueError(f"low_latency_update_mask_buffer: there is no rank {rank} among {self._world.size}")
        if masked and rank == self._world.rank:
            self._world.control.leave([r for r in self.members if r != rank and r not in self._asked])
        elif masked and rank in self.members:
            self._asked.add(rank)
        elif not masked and rank in self._asked:
            self._asked.remove(rank)
        elif not masked and rank not in self.members:
            raise TileScaleError(f"deep_ep.Buffer.low_latency_update_mask_buffer: {_for_good([rank])}")

    def query(self, status: torch.Tensor) -> None:
        """Fill `status` [ranks] with 1 for ranks that are masked and 0 for others."""
        self.learn()
        masked = [int(r in self._asked or r not in self.members) for r in range(self._world.size)]
        status.copy_(torch.tensor(masked, dtype=status.dtype, device="cpu"))

    def clean(self) -> None:
        """Mask only the ranks that have been left out, which cannot come back: a warning names them."""
        self.learn()
        self._asked.clear()
        gone = sorted(set(range(self._world.size)) - set(self.members))
        if gone and gone != self._warned_of:
            self._warned_of = gone
            settings.log.warning("deep_ep.Buffer.low_latency_clean_mask_buffer: %s; they stay masked", _for_good(gone))

    def learn(self) -> None:
        """Continue without ranks whose loss the host knows."""
        self._world.control.refuse()
        if self.shrinks:
            try:
                self._world.check()
            except self.losses:
                self.go_on()

    def begin_dispatch(self) -> bool:
        """Count a dispatch; returns whether it is void, because another rank had begun it when a rank was lost."""
        self._dispatches.begun += 1
        return self._dispatches.begun <= self._dispatches.void

    def leave_out(self) -> None:
        """Exclude newly masked ranks before a call begins; a call in flight still receives their data."""
        if self._asked:
            remaining = [r for r in self.members if r not in self._asked]
            self._world.control.shrink_to(remaining, "low_latency_update_mask_buffer")
            self._asked.clear()

    def go_on(self) -> None:
        """After one of `losses`: the remaining ranks continue without the lost ones."""
        for attempt in range(self._world.size):
            try:
                self._dispatches.void = max(self._dispatches.void, *self._world.shrink(self._dispatches.begun).steps)
                return
            except PeerLost:  # another one is lost meanwhile; or this one was
                if attempt == self._world.size - 1:
                    raise
