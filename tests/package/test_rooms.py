"""Every folder's files are imported only by those that its README names, and no module uses another's private names."""

import ast
import functools
import graphlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The folders of the package and the checkout that have a README, by the first names of their modules.
ROOMS = {
    "tilescale_net.compiler": ROOT / "tilescale_net" / "compiler",
    "tilescale_net.runtime": ROOT / "tilescale_net" / "runtime",
    "tilescale_net.language": ROOT / "tilescale_net" / "language",
    "tilescale_net.launch": ROOT / "tilescale_net" / "launch",
    "tilescale_net.cli": ROOT / "tilescale_net" / "cli",
    "tilescale_net.kernels": ROOT / "kernels",
    "tilescale_net.ops": ROOT / "tilescale_net" / "ops",
    "benchmark": ROOT / "benchmark",
}


@functools.cache
def modules() -> list[tuple[str, Path, ast.Module]]:
    """Name, path and syntax tree of every module of the package, its kernels and its benchmarks."""
    found = []
    for name, folder in (
        ("tilescale_net", ROOT / "tilescale_net"),
        ("tilescale_net.kernels", ROOT / "kernels"),
        ("benchmark", ROOT / "benchmark"),
    ):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if (name, parts[0]) != ("tilescale_net", "kernels"):
                full = ".".join((name, *(p for p in parts if p != "__init__")))
                found.append((full, path, absolute(ast.parse(path.read_text()), ".".join((name, *parts[:-1])))))
    return found


def absolute(tree: ast.Module, package: str) -> ast.Module:
    """The tree with its relative imports made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            node.module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    return tree


@functools.cache
def imported(tree: ast.Module) -> list[tuple[str, str | None]]:
    """Names of the modules that a module imports, wherever it does so; and the names it imports from them."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(a.name, None) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module, a.name) for a in node.names]
    return found


def runs(tree: ast.Module) -> ast.Module:
    """The tree without `if TYPE_CHECKING:` of the module."""
    body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    return ast.Module(body, [])


def importers(readme: Path) -> set[str]:
    """The modules that may import a folder: what stands in backticks between "Imported by" and the end of the line."""
    (line,) = re.findall(r"Imported by ([^\n]*)", readme.read_text())
    return {name.removesuffix(".py") for name in re.findall(r"`([^`]+)`", line)}


@pytest.mark.parametrize("room", ROOMS)
def test_folders_are_imported_by_those_that_they_name(room):
    allowed = importers(ROOMS[room] / "README.md")
    for name, path, tree in modules():
        if name == room or name.startswith(room + "."):
            continue
        user = name.removeprefix("tilescale_net.").partition(".")[0]
        for module, attribute in imported(tree):
            if f"{module}.{attribute}.".startswith(room + "."):
                # The package's __init__ imports its public names.
                assert user in allowed or name == "tilescale_net", f"{path} imports {module}"


def test_no_imports_go_in_circles():
    """Nor do those inside of functions; the package's face alone shows what imports it.

    Imports for type checkers alone, which never run, may point back.
    """
    found = {name: tree for name, _, tree in modules() if name != "tilescale_net"}
    uses = {
        name: {
            module if f"{module}.{attribute}" not in found else f"{module}.{attribute}"
            for module, attribute in imported(runs(tree))
        }
        for name, tree in found.items()
    }
    graphlib.TopologicalSorter({name: all_ & (found.keys() - {name}) for name, all_ in uses.items()}).prepare()


def test_no_two_folders_import_each_other():
    """Folders have floors, subfolders too; one may share its own with what lies below it.

    A folder's face (__init__.py) may show what imports it.
    """
    found = {name: (path.name == "__init__.py", tree) for name, path, tree in modules()}

    def floor(name: str) -> str:
        """The folder of a module; each file of the package's root is a floor of its own."""
        folder = name if found[name][0] else name.rpartition(".")[0]
        return name if folder == "tilescale_net" else folder

    edges = set()
    for name, (is_face, tree) in found.items():
        for module, attribute in imported(tree):
            used = f"{module}.{attribute}" if f"{module}.{attribute}" in found else module
            if used in found and not is_face and floor(used) != floor(name):
                edges.add((floor(name), floor(used)))
    mutual = {(a, b) for a, b in edges if a < b and (b, a) in edges and not b.startswith(f"{a}.")}
    assert not mutual


def test_native_folders_are_included_by_those_that_they_name():
    csrc = ROOT / "tilescale_net" / "csrc"
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", (csrc / "README.md").read_text(), re.M)
    allowed = {folder: set(re.findall(r"`(\w+)`", users)) for folder, users in rows}
    assert set(allowed) == {p.name for p in csrc.iterdir() if p.is_dir()}
    device = set(
        re.findall(
            r"`([\w/]+\.h)`",
            (ROOT / "tilescale_net/device/README.md").read_text().partition("Included by")[2].partition("\n")[0],
        )
    )
    for path in [*csrc.rglob("*.h"), *csrc.rglob("*.cpp")]:
        user = path.relative_to(csrc).parts[0]
        for included in re.findall(r'^#include "tilescale_net/([^"]+)"', path.read_text(), re.M):
            room, _, rest = included.partition("/")
            if room == "device":
                assert rest in device and user in ("proxy", "simulator", "explore"), f"{path} includes {included}"
            elif rest.partition("/")[0] != user:
                # bindings.cpp in csrc itself declares the functions by which folders add to the modules.
                assert user in allowed[rest.partition("/")[0]] | {"bindings.cpp"}, f"{path} includes {included}"


# Extension modules, and modules of `language` that authors do not import.
PRIVATE_MODULES = re.compile(r"tilescale_net\._(native|simulator)$|tilescale_net\.language\._\w+$")


# torch itself, loaded when it is first used.
TORCH = {f"benchmark.common.modules.{name}" for name in ("torch", "dist", "symmetric_memory")}


def test_private_names_stay_where_they_are():
    for name, path, tree in modules():
        aliases = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in (
                "tilescale_net",
                "benchmark",
            ):
                for a in node.names:
                    full = f"{node.module}.{a.name}"
                    if full in TORCH:
                        continue
                    aliases[a.asname or a.name] = full
                    private = a.name.startswith("_") and not a.name.startswith("__")
                    assert not private or PRIVATE_MODULES.match(full), f"{path}:{node.lineno} imports {full}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
                owner = ast.unparse(node.value)
                known = owner in aliases or re.search(r"(^|\.)world$", owner)
                assert not known or aliases.get(owner, "").startswith(name), (
                    f"{path}:{node.lineno} uses {owner}.{node.attr}"
                )


# Of torch, where an expression does not begin with its name.
OF_TORCH = ("_schema", "_sleep", "_devices", "_timeout", "_threads", "_get_backend")


def test_private_names_are_used_by_the_modules_that_have_them():
    """Private names of objects, too: a module uses only its own, those that it defines, and those of other packages."""
    for name, path, tree in modules():
        foreign, has = set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                foreign |= {(a.asname or a.name).partition(".")[0] for a in node.names if "tilescale" not in a.name}
            elif isinstance(node, ast.ImportFrom):
                foreign |= {a.name for a in node.names if f"{node.module}.{a.name}" in TORCH}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                has.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                has.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                has.add(node.attr)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr) and node.attr not in has:
                owner = re.match(r"\w*", ast.unparse(node.value))[0]
                known = owner in foreign or owner == "super" or node.attr in OF_TORCH
                assert known, f"{path}:{node.lineno} uses {ast.unparse(node)}"
