"""The extension modules of C++, which a checkout has once they are built."""

import importlib
import importlib.util
import sys
from types import ModuleType

import tilescale_net

MODULES = ("_native", "_simulator")


def lacking() -> str | None:
    """What to do where an extension module is not there for this Python; None where all are. Loads none of them."""
    if all(importlib.util.find_spec(f"tilescale_net.{name}") for name in MODULES):
        return None
    # Where the import system looks; files of a checkout may be links into another one.
    folder = tilescale_net.__path__[0]
    return (
        f"the native part of tilescale_net is not built for Python {sys.version_info[0]}.{sys.version_info[1]} in {folder}; "
        "run `bash launch.sh --setup-only` or `pip install -e .` in the checkout"
    )


def load(name: str) -> ModuleType:
    """An extension module. Raises ImportError with the remedy where it is not built."""
    if missing := lacking():
        raise ImportError(missing)
    return importlib.import_module(f"tilescale_net.{name}")
