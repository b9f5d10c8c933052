"""What was tuned for this place, by the key of a call: the GPU, how many ranks on how many nodes, and this version.

One file for a place, in a folder of the user. Rank 0 reads it when a world first needs it, and all ranks take what it
has read, so that all choose alike, independent of their own disks. A file that is damaged, of another place or of
another user is left alone, with a warning.
"""

import json
import weakref
from pathlib import Path

import tilescale_net
from tilescale_net.runtime import file_lock, private_folder, settings, tuned_files
from tilescale_net.runtime.tuned_files import Choice

_tables: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def up_to(rows: int) -> int:
    """The power of two up to which calls of so many rows have one choice."""
    return 1 << max(0, rows - 1).bit_length()


def place_of(world) -> dict[str, object]:
    """For what a choice of this world is good."""
    import torch

    simulated = world.device_kind != "cuda"
    gpu = "simulator" if simulated else torch.cuda.get_device_name(world.device)
    version = tilescale_net.__version__
    return {"gpu": gpu, "ranks": world.size, "nodes": world.topology.nodes, "package": version}


def of(world, name: str) -> dict[str, Choice]:
    """What was tuned, by the keys of calls. Collective the first time in a world.

    Args:
        name: of the caller, for messages to ranks that make another call.
    """
    found = _tables.get(world)
    if found is None:
        control = world.control
        reads = not world.size > 1 or world.rank == control.members[0]
        if world.size > 1:
            control.agree(name, "the first in this world that asks for what was tuned")
        mine = tuned_files.read(place_of(world)) if reads and settings.TUNED.get() else {}
        if world.size > 1:
            mine = json.loads(control.broadcast(f"{name}: what was tuned", json.dumps(mine)))
        found = _tables[world] = mine
    return found


def keep(world, name: str, key: str, choice: Choice, us: float) -> Path | None:
    """Keep a choice for this world and for later ones of its place; collective, with the same on all ranks.

    Returns:
        Where rank 0 has written it; None on other ranks, and where it could not: that is a warning.
    """
    of(world, name)[key] = choice
    if world.size > 1 and world.rank != world.control.members[0]:
        return None
    place = place_of(world)
    path = tuned_files.path_of(place)
    try:
        if not private_folder.make(path.parent):
            raise OSError(f"{path.parent} belongs to another user or may be written by others")
        # Another job of this user may keep something at the same time.
        with file_lock.acquire(path.with_suffix(".lock")):
            choices = tuned_files.entries(path, place) | {key: {"choice": choice, "us": us}}
            tuned_files.write(path, {"schema": tuned_files.SCHEMA, "place": place, "choices": choices})
    except OSError as err:
        settings.log.warning("what was tuned is not kept in %s: %s", path, err)
        return None
    return path


def ignore(world, key: str, error: Exception) -> None:
    """Warn once that a choice is not used, and forget it."""
    _tables[world].pop(key, None)
    if world.rank == world.control.members[0]:
        settings.log.warning("what was tuned for %s is not used: %s", key, error)
