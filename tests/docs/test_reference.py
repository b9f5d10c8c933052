"""The reference has every public name, with every parameter and an example of each primitive; the menu has every page."""

import ast
import functools
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilescale_net.language as N

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Base classes; a user makes objects of their subclasses.
BASES = {"Collective", "DistributedMatmul", "Exchange", "FusedMatmul", "Parted", "Participant", "PreparedMatmul"}


def source(module: str) -> Path | None:
    """The file of a module; kernels stand at the top of the checkout."""
    parts = module.removeprefix("tilescale_net.") if module.startswith("tilescale_net.kernels") else module
    path = ROOT / parts.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


@functools.cache
def names(module: str) -> dict[str, str]:
    """Names at the top of a module -> where they are defined, one step further."""
    found = {}
    path = source(module)
    assert path, module
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            package = module if path.stem == "__init__" else module.rpartition(".")[0]
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {a.asname or a.name: f"{origin}.{a.name}" for a in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.col_offset == 0:
            found[node.name] = f"{module}.{node.name}"
    return found


def defined(name: str) -> str:
    """Where something is defined that has this name, imports followed."""
    module, _, last = name.rpartition(".")
    if not module.startswith("tilescale_net") or source(name) or not source(module):
        return name
    place = names(module).get(last, name)
    return place if place == name else defined(place)


@functools.cache
def parameters():
    """docs/parameters.py, by which the site is made."""
    spec = importlib.util.spec_from_file_location("parameters", DOCS / "parameters.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown() -> Iterator[str]:
    """Paths of all callables that the pages of the reference show, with the methods that they name."""
    index = parameters().index()
    for page in sorted((DOCS / "reference").glob("*.md")):
        entry = re.compile(
            r"^::: (\S+)\n(?:    options:\n(?:      .*\n)*?      members: \[(.*)\]\n(?:      .*\n)*)?", re.M
        )
        for match in entry.finditer(page.read_text() + "\n"):
            name, members = match.groups()
            found = [defined(f"{name}.{last}") for last in all_of(source(name))] if source(name) else [defined(name)]
            for path in found:
                if "show_signature: false" not in match[0]:
                    yield path
                if "." in path and path.rpartition(".")[2][0].isupper():
                    methods = [p.rpartition(".")[2] for p in index if p.rpartition(".")[0] == path]
                    public = [m for m in methods if m == "__call__" or not m.startswith("_")]
                    yield from (f"{path}.{m}" for m in (public if members is None else members.split(", ")))


def documented() -> set[str]:
    """Entries of the reference's pages, by the place of their definition."""
    found = set()
    for page in sorted((DOCS / "reference").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
            found.add(defined(name))
            if source(name):  # of a module, the names of its `__all__`, wherever they are defined
                found |= {defined(f"{name}.{last}") for last in all_of(source(name)) or names(name)}
    return found


def all_of(path: Path) -> list[str]:
    """Names in the `__all__` of a file."""
    text = path.read_text()
    for node in ast.parse(text).body if "__all__ = [" in text else ():
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == ["__all__"]:
            return ast.literal_eval(node.value)
    return []


def exported() -> list[str]:
    """`module.name` of every `__all__` that is spelt out, of modules without a leading underscore."""
    found = []
    for path in [*(ROOT / "tilescale_net").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if any(p.startswith("_") for p in parts if p != "__init__") or "kernels" in parts[1:]:
            continue
        module = ".".join(p for p in parts if p != "__init__")
        module = f"tilescale_net.{module}" if parts[0] == "kernels" else module
        found += [f"{module}.{name}" for name in all_of(path)]
    return found


def collectives() -> list[str]:
    """Classes of kernels that users make, by their module."""
    found, derived = [], set(BASES)
    files = sorted((ROOT / "kernels").rglob("*.py"))
    files = [p for p in files if re.search(r"^class \w+\(", p.read_text(), re.M)]
    classes = [(p, n) for p in files for n in ast.parse(p.read_text()).body if isinstance(n, ast.ClassDef)]
    for _ in range(3):  # a class may derive from one that is found later
        derived |= {n.name for _, n in classes if any(getattr(b, "id", "") in derived for b in n.bases)}
    for path, node in classes:
        if node.name in derived - BASES and not node.name.startswith("_"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append(f"tilescale_net.{module}.{node.name}")
    return found


def test_every_public_name_is_in_the_reference():
    public, shown = [*exported(), *collectives()], documented()
    assert len(public) > 100 and "tilescale_net.ops.collectives.all_reduce" in shown
    missing = [name for name in public if defined(name) not in shown and is_no_constant(name)]
    assert not missing, f"docs/reference shows no {', '.join(missing)}"


def is_no_constant(name: str) -> bool:
    """Functions and classes; a constant stands in the text of what uses it."""
    place = defined(name)
    return place in names(place.rpartition(".")[0]).values()


def test_every_page_is_in_the_menu():
    nav = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]))
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    pages |= {f"tutorials/{p.stem}.md" for p in (DOCS / "tutorials").glob("[0-9]*.py")}
    top = re.findall(r'"(\w+\.md)": "', (DOCS / "site.py").read_text())
    assert len(top) == 4 and nav == pages | set(top)


def test_every_parameter_of_the_reference_has_a_text():
    index, paths = parameters().index(), set(shown())
    missing, count = [], 0
    for path in sorted(paths & set(index)):
        for name in index[path].parameters:
            count += 1
            if not parameters().meaning(name, index[path]):
                missing.append(f"{path}: {name}")
    assert count > 700, count
    assert not missing, "no docstring says what these parameters are:\n" + "\n".join(missing)


def test_a_parameter_without_a_text_is_noticed():
    documented = parameters().Documented
    at = documented(
        "m.f", "Do it.\n\nArgs:\n    x, y: as in `wait`.\n    n: rows. k: columns.", ("x", "n", "k", "z"), "m"
    )
    assert parameters().rows(at.doc) == {"x": "as in `wait`.", "y": "as in `wait`.", "n": "rows.", "k": "columns."}
    assert parameters().meaning("z", at) is None


EXAMPLES = {
    name: (m[1] or m[2].replace("\n    ", "\n        ").strip()).split("  #")[0]
    for name in sorted(N.__all__)
    if (m := re.search(r"^Example:(?: (.*)|\n((?:    .*\n?)+))", inspect.getdoc(getattr(N, name)) or "", re.M))
}
KERNEL = """
import tilelang.language as T
import tilescale_net.language as N


@T.prim_func
def example(
    ctx: N.Context(), x: T.Tensor((8, 64), "float32"), y: T.Tensor((8, 64), "float32"), flag: T.Tensor((1,), "uint64"),
    counter: T.Tensor((1,), "int32"), pe: T.int32, call: T.int64, row: T.int32, n: T.int32,
):
    with T.Kernel(1, threads=32):
        tx = T.get_thread_binding()
        shared = T.alloc_shared((64,), "float32")
"""


def test_every_primitive_has_an_example():
    assert sorted(EXAMPLES) == sorted(N.__all__)


@pytest.mark.parametrize("part", range(4))
def test_examples_of_primitives_compile(part, tmp_path):
    from tilescale_net.compiler import inspect as generated

    mine = [text for name, text in EXAMPLES.items() if name != "Context"][part::4]
    path = tmp_path / "example.py"
    path.write_text(KERNEL + "".join(f"        {text}\n" for text in mine))
    spec = importlib.util.spec_from_file_location("example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "tsn::" in generated.cuda_source(module.example)
