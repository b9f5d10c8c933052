"""The extension modules of C++, which a checkout has once they are built."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

MODULES = ("_native", "_simulator")
_FOLDER = Path(__file__).resolve().parents[1]


def lacking() -> str | None:
    """What to do where an extension module is not there for this Python; None where all are. Loads none of them."""
    if all(importlib.util.find_spec(f"tilescale_net.{name}") for name in MODULES):
        return None
    return (
        f"the native part of tilescale_net is not built for Python {sys.version_info[0]}.{sys.version_info[1]} in {_FOLDER}; "
        "run `bash launch.sh --setup-only` or `pip install -e .` in the checkout"
    )


def load(name: str) -> ModuleType:
    """An extension module. Raises ImportError with the remedy where it is not built."""
    if missing := lacking():
        raise ImportError(missing)
    return importlib.import_module(f"tilescale_net.{name}")
