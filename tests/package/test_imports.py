"""The package imports the standard library and distributions that pyproject.toml depends on."""

import ast
import os
import runpy
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tests.package.conftest import ROOT

# Import names whose distribution does not list them: tilelang brings its own TVM.
BUNDLED = {"tvm": "tilelang"}
# By file: `bench` exists in a checkout alone and reports that; launch.sh calls an interpreter that may be older than
# tomllib; vLLM itself imports its communicator.
ELSEWHERE = {
    ("tilescale_net/cli/__init__.py", "benchmark"),
    ("tilescale_net/launch/set_up.py", "pip"),
    ("tilescale_net/vllm_communicator.py", "vllm"),
}


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of all absolute imports of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]


def undeclared(files: list[Path], declared: set[str]) -> set[tuple[str, str]]:
    """(file, import name) of what neither Python nor a declared distribution has."""
    distributions = metadata.packages_distributions()
    found = set()
    for path in files:
        for name in imported(ast.parse(path.read_text())):
            if name in sys.stdlib_module_names or name == "tilescale_net":
                continue
            owners = {
                owner.lower().replace("_", "-") for owner in (BUNDLED.get(name), *distributions.get(name, ())) if owner
            }
            if not owners & declared:
                found.add((os.path.relpath(path, ROOT), name))
    return found


def test_every_import_is_a_declared_dependency():
    requirements = runpy.run_path(str(ROOT / "tilescale_net" / "launch" / "set_up.py"))
    project = requirements["_project"]()["project"]
    declared = {requirements["name_of"](text).lower() for text in project["dependencies"]}
    files = [p for p in (ROOT / "tilescale_net").rglob("*.py") if "kernels" not in p.parts] + [
        *(ROOT / "kernels").rglob("*.py")
    ]
    assert len(files) > 100
    assert undeclared(files, declared) == ELSEWHERE
    # Without one of them it would be seen.
    assert ("kernels/collective.py", "torch") in undeclared(files, declared - {"torch"})


def test_kernels_and_operators_import_without_the_native_part():
    """Where it is missing, `init` says what to do, and importing says nothing."""
    found = []
    folders = "kernels", "tilescale_net/ops", "tilescale_net/deep_ep"  # what users import
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.parse(path.read_text()).body:
            names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom | ast.Import) else set()
            if {name.rsplit(".")[-1] for name in names} & {"_native", "_simulator"}:
                found.append(os.path.relpath(path, ROOT))
    assert not found
