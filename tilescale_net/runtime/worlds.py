"""The worlds of this process: made by init, found by their group, by a tensor, or as the only one.

A world is a group of ranks that communicate: their heap, their context, their failures. docs/groups.md says which
arguments may be left out if there is only one.
"""

import atexit
import bisect
import contextlib
import copyreg
import ctypes
import gc
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

from tilescale_net.errors import KernelError, TileScaleError
from tilescale_net.runtime import groups, profiling, simulator
from tilescale_net.runtime.world import World, WorldHooks

# -- process end ---------------------------------------------------------------------------------------------------------

# Reports the end of this process to the other ranks if its rank is in a job, with the reason: uncaught exceptions,
# SystemExit, the end of the program, `finalize`. The other ranks' watchdogs find ends outside of Python (a signal,
# os._exit). Children made by fork are no ranks.

# Seconds that other ranks may take to come to a `finalize` that handles an exception, before the exception is reported
# to them.
report_patience = 10.0

_installed = False
_exit_code: object = None  # code of the SystemExit that ends the program


def watch_process_end() -> None:
    """Watch for the end of this process, and for children made by fork, which are no ranks; the second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    owner = os.getpid()
    os.register_at_fork(after_in_child=_forget)
    atexit.register(lambda: _at_exit(_take_all()) if os.getpid() == owner else None)
    previous = sys.excepthook

    def hook(kind: Any, value: Any, trace: Any) -> None:
        for world in alive():
            world.announce(TileScaleError(_words(value)))
        previous(kind, value, trace)

    sys.excepthook = hook
    _follow_exits()


def finish_world(world: World) -> None:
    """Close a world in good order, as `finalize` does. In a `finally` or `except` the rank may be failing alone: the
    others would wait for it in a kernel until they notice its silence. If they do not come, the exception is reported
    to them."""
    raised = sys.exc_info()[1]
    if raised is None or (isinstance(raised, SystemExit) and not _status(raised.code)):
        world.close()
        return
    tell = threading.Timer(report_patience, world.announce, [TileScaleError(_words(raised))])
    tell.daemon = True
    tell.start()
    try:
        world.close(described_as=f"called tilescale_net.finalize() while it handled {_words(raised)}")
    finally:
        tell.cancel()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _at_exit(worlds: list[Any]) -> None:
    # First worlds whose ranks must learn of a failure: the end of another one may take long.
    ended = [_end(world) for world in sorted(worlds, key=lambda world: world.failure is None)]
    if not all(ended):
        # atexit cannot change the exit status otherwise, and a failed job must not look like a good one.
        sys.stdout.flush()
        os._exit(1)


def _end(world: World) -> bool:
    """End a world at the end of the process; returns whether the exit status may stay."""
    code = _status(_exit_code)
    # The uncaught exception; Python records it even if another excepthook has replaced the one above.
    uncaught = getattr(sys, "last_value", None)
    if world.failure is None and uncaught is not None:
        world.give_up(_words(uncaught))
    elif world.failure is not None or code:
        world.give_up(f"it ended (exit code {code})" if code else "it ended before finalize")
    else:
        try:
            world.close(described_as="ended (exit code 0)")
        except TileScaleError as err:
            print(f"tilescale_net: {type(err).__name__}: {err}", file=sys.stderr, flush=True)
            return False
    return True


def _status(code: object) -> int:
    """Python's exit status for the code of a SystemExit."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _follow_exits() -> None:
    """Record the code of the SystemExit that ends the program, however it was raised. Python does not report its exit
    status: it reads `code` of the exception when no Python frame is left, and drops it. All code that raises or catches
    the exception uses this one class, so its attribute can be watched."""
    replace_exit()
    stored = SystemExit.__dict__["code"]

    def read(error: SystemExit) -> object:
        global _exit_code
        code = stored.__get__(error)
        try:
            sys._getframe(1)
        except ValueError:
            _exit_code = code
        return code

    (attributes,) = gc.get_referents(SystemExit.__dict__)
    attributes["code"] = property(read, stored.__set__, stored.__delete__, stored.__doc__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def replace_exit() -> None:
    """Replace sys.exit under each of its names; modules that are imported later find the new one. The second call does nothing.

    The process that simulated ranks fork from calls it for all of them: the names of all modules are 12,000 pages,
    which each rank would otherwise copy.
    """
    if sys.version_info >= (3, 12) or sys.exit is _exit:  # 3.12 creates the exception lazily
        return
    built_in = sys.exit
    for module in [m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)]:
        for name in [name for name, value in list(vars(module).items()) if value is built_in]:
            vars(module)[name] = _exit


def _exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status); see Python's documentation of sys.exit."""
    raise SystemExit(status)


# -- worlds --------------------------------------------------------------------------------------------------------------

# Validity token of a kernel's cached launch: a weak reference to the only world, else an object (or None, at first)
# that is replaced whenever a world comes or goes.
# another one whenever a world comes or goes.
launch_generation: object = None

_alive: list[World] = []  # in the order in which they were made
_beside: list[World] = []  # siblings: worlds beside another one of the same group
# Begin and end addresses of their heaps, ascending, with the world of each: for `world_of_tensors`, at each launch.
_bases: list[int] = []
_ends: list[int] = []
_by_base: list[World] = []
_forked_from: list[Any] = []  # in a child made by fork: the worlds of its parent, which must not be taken down here

_FORKED = "this process was forked from a rank and is none itself"


def init(heap_bytes: int | str | None, group: object, hooks: WorldHooks) -> World:
    """See `tilescale_net.init`."""
    resolved = groups.resolve(group)
    if any(world.group is resolved for world in _alive):
        members = "tilescale_net" if resolved is None else f"the group of ranks {groups.named(groups.ranks(resolved))}"
        raise TileScaleError(f"{members} is initialised already; call finalize() before another init()")
    return _make(heap_bytes, resolved, hooks)


def make_sibling(world: World, heap_bytes: int) -> World:
    """Another world of the ranks of `world`, with its own heap. Collective over them. `finalize` with this world as the
    group ends it. Calls that name the group, or none, mean the first world."""
    made = _make(heap_bytes, world.group, world.hooks)
    _beside.append(made)
    return made


def _make(heap_bytes: int | str | None, group: groups.Group, hooks: WorldHooks) -> World:
    refuse_child()
    with profiling.long_step("meeting the other ranks of the job"):
        world = World(heap_bytes, group, _alive[0].device if _alive else None, hooks)
    _alive.append(world)
    _rebind()
    hooks.report_on_signal(lambda: [world.reporter for world in alive()])
    watch_process_end()
    return world


@contextlib.contextmanager
def only(world: World) -> Iterator[None]:
    """Inside the block `world`, known to this process or not, is its only world."""
    saved = _alive[:], _beside[:]
    _alive[:], _beside[:] = [world], []
    _rebind()
    try:
        yield
    finally:
        _alive[:], _beside[:] = saved
        _rebind()


def finalize(group: object = None) -> None:
    """See `tilescale_net.finalize`."""
    if group is not None:
        return finish_world(_take(get(group)))
    error = None
    # The newest first: ranks make shared worlds in one order, so no two wait for each other.
    while _alive:
        try:
            finish_world(_take(_alive[-1]))
        except TileScaleError as err:
            error = error or err
    if error is not None:
        raise error


def get(group: object = None) -> World:
    """The world of a group: of a World, a ProcessGroup, a DeviceMesh or a group's name; None: see `default`. Raises
    TileScaleError: `init` has not made one. ConfigurationError: it is no group, or several worlds were made of other
    groups with its ranks."""
    if group is None:
        return default()
    if isinstance(group, World):
        if group.closed:
            group.check()  # which raises
        return group
    resolved = groups.resolve(group)
    first = _first()
    for world in first:
        if world.group is resolved:
            return world
    members = groups.ranks(resolved)
    same = [world for world in first if world.job_ranks == members and not _is_of_store(world.group, resolved)]
    if len(same) == 1:
        return same[0]
    who = "all ranks" if resolved is None else f"ranks {groups.named(members)}"
    if same:
        raise TileScaleError(f"there are {len(same)} worlds of {who}; give the group that one of them was made with")
    raise TileScaleError(
        f"tilescale_net is not initialised for the group of {who}; call tilescale_net.init(group=…) first, on its ranks"
    )


def _is_of_store(*found: object) -> bool:
    """Whether one of these groups has its own ranks, unrelated to the job's."""
    return any(isinstance(group, groups.StoreGroup) for group in found)


def of_ranks(members: tuple[int, ...], name: str) -> World:
    """The world of a group that was saved, by its ranks in the job and its name ("" for all of the job). Raises
    TileScaleError: this process has none."""
    for world in _first():
        if tuple(world.job_ranks) == members and groups.name_of(world.group) == name:
            return world
    who = f"{'group ' + name + ' of ' if name else ''}ranks {groups.named(members)}"
    raise TileScaleError(
        f"the file was saved with objects of the {who}, for which tilescale_net is not initialised in this process; "
        "call tilescale_net.init on these ranks first"
    )


copyreg.pickle(World, lambda world: (of_ranks, (tuple(world.job_ranks), groups.name_of(world.group))))


def default() -> World:
    """The world of calls without a group: of all ranks of the job, or else the only one. Raises
    TileScaleError: no world exists, or several do."""
    first = _first()
    for world in first:
        if len(first) == 1 or world.group is None:
            return world
    if first:
        raise TileScaleError(
            f"this process is in {len(first)} worlds, of ranks "
            f"{' and of ranks '.join(groups.named(world.job_ranks) for world in first)}; say with group= which one is meant"
        )
    refuse_child()
    raise TileScaleError("tilescale_net is not initialised; call tilescale_net.init() first, on every rank")


def refuse_child() -> None:
    """Raise TileScaleError in a child that was made by fork while this process was in a world."""
    if _forked_from:
        raise TileScaleError(f"{_FORKED}; call tilescale_net in the rank, or start processes before init()")


def _first() -> list[World]:
    """The worlds that a group, or None, may mean."""
    return [world for world in _alive if world not in _beside] if _beside else _alive


def alive() -> list[World]:
    """All of them, in the order in which they were made."""
    return list(_alive)


def are_several() -> bool:
    """Whether this process is in more than one."""
    return len(_alive) > 1


def device_kind() -> str | None:
    """Device of this process's kernels, "cuda" or "simulator"; None before init."""
    return _alive[0].device_kind if _alive else None


def world_at(address: int) -> World | None:
    """The world whose heap holds an address of this process."""
    index = bisect.bisect_right(_bases, address) - 1
    return _by_base[index] if index >= 0 and address < _ends[index] else None


def _fail_at(address: int, error: TileScaleError) -> None:
    """Raise an error as the world whose heap holds an address."""
    world = world_at(address)
    if world is None:
        raise error
    world.fail(error)


simulator.on_race = _fail_at


def of_tensor(tensor: object) -> World:
    """The world whose heap holds a tensor; the default one for everything else."""
    found = world_at(tensor.data_ptr()) if isinstance(tensor, torch.Tensor) and len(_alive) > 1 else None
    return found or default()


def world_of_tensors(name: str, arguments: Iterable[object]) -> World:
    """The world whose heap holds the symmetric tensors among a kernel's arguments; without any the default one. Raises
    KernelError: they lie in several; or in none, and there is no default."""
    found = None
    for value in arguments:
        if isinstance(value, torch.Tensor):
            address = value.data_ptr()
            index = bisect.bisect_right(_bases, address) - 1
            if index >= 0 and address < _ends[index] and (world := _by_base[index]) is not found:
                if found is not None:
                    raise KernelError(
                        f"kernel {name}: its tensors are in the symmetric heaps of two worlds, of ranks "
                        f"{groups.named(found.job_ranks)} and of ranks {groups.named(world.job_ranks)}; a kernel communicates within one"
                    )
                found = world
    if found is not None:
        return found
    try:
        return default()
    except TileScaleError as err:
        raise KernelError(
            f"kernel {name}: {err}: give the kernel a symmetric tensor of that world, or its context_tensor as "
            "the context"
        ) from None


def _rebind() -> None:
    global launch_generation, _bases, _ends, _by_base
    launch_generation = weakref.ref(_alive[0]) if len(_alive) == 1 else object() if _alive else None
    _by_base = sorted(_alive, key=lambda world: world.heap.base)
    _bases = [world.heap.base for world in _by_base]
    _ends = [world.heap.base + world.heap.limit for world in _by_base]


def _take(world: World) -> World:
    _alive.remove(world)
    if world in _beside:
        _beside.remove(world)
    _rebind()
    return world


def _take_all() -> list[World]:
    """The worlds, the newest first; none are left afterwards."""
    taken = _alive[::-1]
    _alive.clear()
    _beside.clear()
    _rebind()
    return taken


def _forget() -> None:
    """In a child made by fork: keep the parent's objects for ever, so nothing here takes them down."""
    for world in _take_all():
        _forked_from.append(world)
        world.end_in_child(refuse_child)
        for kept in (world, torch.distributed.group.WORLD):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
