"""Groups that callers may pass, their ranks in the job, and objects that ranks have made together."""

from __future__ import annotations

import inspect
import itertools
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist

from tilescale_net.errors import ConfigurationError, TileScaleError

# -- made by ranks -------------------------------------------------------------------------------------------------------

# Objects that ranks have made together, in modules that are copied, pickled or saved whole.

_PROCESS_KEY = secrets.token_hex(8)
_pickle_numbers = itertools.count()
_pickled: weakref.WeakValueDictionary[int, MadeByRanks] = weakref.WeakValueDictionary()


def process_identity() -> str:
    """Identity of this process among all, distinct from its parents'."""
    return f"{_PROCESS_KEY}-{os.getpid()}"


class MadeByRanks:
    """Base of such objects: a copy is the object itself, because all ranks share its state.

    Its arguments are pickled. Loaded in its process while the object is alive, they give the object itself; else a new
    one, in the world of the same group: collective, as the constructor was.

    Attributes:
        factory: makes a new one from the same arguments.
    """

    factory: Callable[..., Any]
    _pickled_as: int | None = None
    _given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **named: Any) -> Any:
        self = super().__new__(cls)
        self.factory, self._given = cls, (args, named)
        return self

    @property
    def alive(self) -> bool:
        """Whether neither `free` nor the end of its world has ended it."""
        raise NotImplementedError

    @property
    def _made_in(self) -> object:
        """The world whose ranks made it."""
        raise NotImplementedError

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[str, Any]) -> Any:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        if not self.alive:
            raise TileScaleError(f"{type(self).__name__}: saved after free() or finalize()")
        if self._pickled_as is None:
            self._pickled_as = next(_pickle_numbers)
            _pickled[self._pickled_as] = self
        args, named = self._given
        signature = inspect.signature(self.factory)
        bound = signature.bind(*args, **named)
        if "group" in signature.parameters:
            bound.arguments["group"] = self._made_in
        return _load, (process_identity(), self._pickled_as, self.factory, bound.args, bound.kwargs)


def _load(saved_by: str, number: int, factory: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    found = _pickled.get(number) if saved_by == process_identity() else None
    return found if found is not None and found.alive else factory(*args, **named)


# -- groups --------------------------------------------------------------------------------------------------------------

# None: all ranks of the job.
Group: TypeAlias = "dist.ProcessGroup | StoreGroup | None"
_KINDS = "a ProcessGroup of torch.distributed, a DeviceMesh of one dimension, the name of a group, or a StoreGroup"


_numbers = itertools.count()
_store_groups: weakref.WeakValueDictionary[str, StoreGroup] = weakref.WeakValueDictionary()  # by name


class StoreGroup:
    """Ranks that meet in a store: processes of any job, with or without torch.distributed's process groups.

    So survivors of a loss and new processes make a world together. Each makes a StoreGroup, with a store that all of
    them reach, and passes it to `tilescale_net.init` as the group; no call of torch.distributed is needed.

    Args:
        store: of torch.distributed, such as a TCPStore client; a PrefixStore for each meeting keeps them apart. No
            other thread may wait in this object.
        rank, size: of this process, of the group.
        kept_by: the rank whose process keeps the store, if one of the group does.

    Raises:
        TypeError, ValueError: not a store, or not a rank of the group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, kept_by: int | None = None):
        if not isinstance(store, dist.Store):
            raise TypeError(f"StoreGroup: store is a {type(store).__name__}; give a store of torch.distributed")
        numbers = (rank, size) if kept_by is None else (rank, size, kept_by)
        if any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
            raise TypeError(f"StoreGroup: rank={rank!r}, size={size!r} and kept_by={kept_by!r} must be whole numbers")
        if not 0 <= rank < size or kept_by is not None and not 0 <= kept_by < size:
            raise ValueError(f"StoreGroup: rank {rank}, or kept_by={kept_by}, is none of a group of {size}")
        self.store, self.kept_by = store, kept_by
        self._rank, self._size = rank, size
        # Its name as a group, for example in operators, in this process only; a saved name is no group elsewhere.
        self.group_name = f"StoreGroup {next(_numbers)} of process {process_identity()}"
        _store_groups[self.group_name] = self

    def rank(self) -> int:
        """Of this process."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size


def resolve(group: object) -> Group:
    """The resolved group; None for all ranks of the job (None, or torch's default group). Raises ConfigurationError: it
    is no group of torch.distributed, or one without this process."""
    if isinstance(group, str):
        group = _store_groups.get(group, group)
    if group is None or isinstance(group, StoreGroup):
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError(
            f"group={_shown(group)}: torch.distributed has no groups yet; call torch.distributed.init_process_group first, "
            "or leave group out"
        )
    if isinstance(group, str):
        group = _named(group)
    elif isinstance(group, dist.device_mesh.DeviceMesh):
        group = _of_mesh(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError("this process is not in the group; make the call on the ranks of the group only")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(f"group={_shown(group)} is a {type(group).__name__}; give {_KINDS}")
    if group is dist.group.WORLD:
        return None
    ranks(group)
    return group


def ranks(group: Group) -> tuple[int, ...]:
    """The job's ranks of a group, in the order of their ranks in the group; None: of the job. A StoreGroup has its own
    ranks. Raises ConfigurationError: torch.distributed does not have the group, or no longer has it."""
    if group is None:
        return tuple(range(dist.get_world_size()))
    if isinstance(group, StoreGroup):
        return tuple(range(group.size()))
    try:
        members = dist.get_process_group_ranks(group)
        return tuple(sorted(members, key=lambda rank: dist.get_group_rank(group, rank)))
    except (KeyError, ValueError):
        raise ConfigurationError(
            "torch.distributed does not know the group: it was destroyed, or made without torch.distributed.new_group, "
            "init_process_group or a DeviceMesh"
        ) from None


def own_number(group: Group) -> tuple[int, int]:
    """Rank and size of this process if no launcher has set them."""
    if isinstance(group, StoreGroup):
        return group.rank(), group.size()
    return dist.get_rank(), dist.get_world_size()


def name_of(group: Group) -> str:
    """The name by which `resolve` finds a group; "" for all ranks of the job."""
    return "" if group is None else group.group_name


def named(members: Sequence[int]) -> str:
    """Ranks as text, such as "2, 3" or "0, 8, 16, … 56 (8 ranks)"."""
    if len(members) <= 8:
        return ", ".join(map(str, members))
    return f"{', '.join(map(str, members[:3]))}, … {members[-1]} ({len(members)} ranks)"


def _named(name: str) -> dist.ProcessGroup:
    known = dist.distributed_c10d._world.pg_names  # torch resolves the names that its operators take by it
    for group, its_name in known.items():
        if its_name == name:
            return group
    raise ConfigurationError(
        f"no group of torch.distributed that this process is in has the name {name!r}; their names are "
        f"{', '.join(sorted(map(repr, known.values())))} (ProcessGroup.group_name)"
    )


def _of_mesh(mesh: dist.device_mesh.DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        choice = f"one of its dimensions {', '.join(names)}, as in mesh[{names[0]!r}]" if names else "a dimension of it"
        raise ConfigurationError(f"group: a DeviceMesh of {mesh.ndim} dimensions is no group; give {choice}")
    if mesh.get_coordinate() is None:
        raise ConfigurationError("this process is not in the DeviceMesh; make the call on the ranks of the mesh only")
    return mesh.get_group()


def _shown(group: object) -> str:
    text = repr(group)
    return text if len(text) <= 80 else f"{text[:77]}…"
