"""Tuned choices by the key of a call, for a place: the GPU, the ranks per node, and this version.

One file per place, in a folder of the user. Rank 0 reads it when a world first needs it and sends it to all ranks, so
all choose alike, independent of their own disks. A damaged file, or one of another place or user, is ignored with a
warning.
"""

import hashlib
import json
import os
import re
import tempfile
import weakref
from pathlib import Path
from typing import Any

import tilescale_net
from tilescale_net.runtime import job_store, private_folder, settings, this_host
from tilescale_net.runtime.world import World

# -- tuned files ---------------------------------------------------------------------------------------------------------

# Files of tuned choices: one per place, in a folder of the user, read only if trusted.

SCHEMA = 1
_LARGEST = 1 << 20  # bytes of a file

# The choice for a call: numbers and text by name.
Choice = dict[str, Any]


def path_of(place: dict[str, object]) -> Path:
    """The file of a place."""
    digest = hashlib.sha256(json.dumps(place, sort_keys=True).encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", f"{place['gpu']}".lower()).strip("-")
    return private_folder.of_user("tuned") / f"{words}-{place['ranks']}x{place['nodes']}-{digest}.json"


def write_file(path: Path, data: dict[str, Any]) -> None:
    """Write a file, all of it or nothing. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(data, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_choices(place: dict[str, object]) -> dict[str, Choice]:
    """The choices for a place, by the keys of calls."""
    return {key: entry["choice"] for key, entry in read_entries(path_of(place), place).items()}


def read_entries(path: Path, place: dict[str, object]) -> dict[str, dict[str, Any]]:
    """The contents of a place's file; nothing if it does not exist or is not trusted."""
    try:
        if not private_folder.is_ours(path):
            raise ValueError("it belongs to another user or may be written by others")
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        return _parsed(path.read_text(), place)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        settings.log.warning("%s is not used: %s; remove it, or tune again", path, err)
        return {}


def _parsed(text: str, place: dict[str, object]) -> dict[str, dict[str, Any]]:
    """The contents of a file for its place. Raises ValueError if it is damaged, or of another place."""
    data = job_store.parse_json(text)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or data.get("place") != place:
        raise ValueError("it is of another place or version")
    choices = data.get("choices")
    if not isinstance(choices, dict):
        raise ValueError("it has no choices")
    for key, entry in choices.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("choice"), dict):
            raise ValueError(f"{key} has no choice")
        if not isinstance(entry.get("us"), int | float):
            raise ValueError(f"{key} has no time")
    return choices


# -- tuned ---------------------------------------------------------------------------------------------------------------

_tables: weakref.WeakKeyDictionary[World, dict[str, Choice]] = weakref.WeakKeyDictionary()


def up_to(rows: int) -> int:
    """The next power of two of rows; calls up to it share one choice."""
    return 1 << max(0, rows - 1).bit_length()


def place_of(world: World) -> dict[str, object]:
    """The place of this world's choices."""
    import torch

    simulated = world.device_kind != "cuda"
    gpu = "simulator" if simulated else torch.cuda.get_device_name(world.device)
    version = tilescale_net.__version__
    return {"gpu": gpu, "ranks": world.size, "nodes": world.topology.nodes, "package": version}


def of(world: World, name: str) -> dict[str, Choice]:
    """Tuned choices by the keys of calls. Collective the first time in a world. `name`: of the caller, for messages to
    ranks that make another call."""
    found = _tables.get(world)
    if found is None:
        control = world.control
        reads = not world.size > 1 or world.rank == control.members[0]
        if world.size > 1:
            control.agree(name, "the first in this world that needs tuned choices")
        mine = read_choices(place_of(world)) if reads and settings.TUNED.get() else {}
        if world.size > 1:
            mine = json.loads(control.broadcast(f"{name}: what was tuned", json.dumps(mine)))
        found = _tables[world] = mine
    return found


def keep(world: World, name: str, key: str, choice: Choice, us: float) -> Path | None:
    """Keep a choice for this world and for later ones of its place; collective, with the same on all ranks. Returns the
    path on rank 0; None on other ranks, and, with a warning, if it could not be written."""
    of(world, name)[key] = choice
    if world.size > 1 and world.rank != world.control.members[0]:
        return None
    place = place_of(world)
    path = path_of(place)
    try:
        if not private_folder.make(path.parent):
            raise OSError(f"{path.parent} belongs to another user or may be written by others")
        # Another job of this user may keep something at the same time.
        with this_host.lock_file(path.with_suffix(".lock")):
            choices = read_entries(path, place) | {key: {"choice": choice, "us": us}}
            write_file(path, {"schema": SCHEMA, "place": place, "choices": choices})
    except OSError as err:
        settings.log.warning("the tuning results cannot be stored in %s: %s", path, err)
        return None
    return path


def ignore(world: World, key: str, error: Exception) -> None:
    """Warn once about an unusable choice, and drop it."""
    _tables[world].pop(key, None)
    if world.rank == world.control.members[0]:
        settings.log.warning("the tuned choice for %s is not used: %s", key, error)
