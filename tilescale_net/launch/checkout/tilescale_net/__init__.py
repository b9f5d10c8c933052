"""Stands for the package on the PYTHONPATH of scripts that a checkout launches.

With the checkout's root there instead, its folders `kernels`, `benchmark`, `docs` and `tests` would hide installed packages of
these names from users' scripts. The package itself takes this module's place, with its own file names.
"""

import importlib.util
import sys
from pathlib import Path

_folder = Path(__file__).resolve().parents[3]
_spec = importlib.util.spec_from_file_location(
    "tilescale_net", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
)
_package = sys.modules["tilescale_net"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_package)
