"""Files of what was tuned: one for a place, in a folder of the user, read only where it may be trusted."""

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

from tilescale_net.runtime import encoding, private_folder, settings

SCHEMA = 1
_LARGEST = 1 << 20  # bytes of a file

# What was chosen for a call: numbers and text by name.
Choice = dict[str, object]


def path_of(place: dict[str, object]) -> Path:
    """The file of a place."""
    digest = hashlib.sha256(json.dumps(place, sort_keys=True).encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", f"{place['gpu']}".lower()).strip("-")
    return private_folder.of_user("tuned") / f"{words}-{place['ranks']}x{place['nodes']}-{digest}.json"


def write(path: Path, data: dict) -> None:
    """Write a file, all of it or nothing. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(data, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(place: dict[str, object]) -> dict[str, Choice]:
    """The choices for a place, by the keys of calls."""
    return {key: entry["choice"] for key, entry in entries(path_of(place), place).items()}


def entries(path: Path, place: dict[str, object]) -> dict[str, dict]:
    """What the file of a place holds; nothing if it does not exist or may not be trusted."""
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


def _parsed(text: str, place: dict[str, object]) -> dict[str, dict]:
    """What a file holds for its place. Raises ValueError for one that is damaged, or of another place."""
    data = encoding.parsed(text)
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
