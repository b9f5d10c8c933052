"""What each parameter of a public callable means, from the docstrings alone: for the reference and for the test of it.

A row of `Args:` may name several parameters (`threads, blocks: launch geometry`) and may point elsewhere (`as in
`wait``). A parameter without a row of its own has that of the callable that the docstring names (`As `wait`, …`), of the
class, of its bases, or of the module, in this order.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Sections whose rows are parameters; those of a dataclass are its attributes.
SECTIONS = ("Args", "Keyword-only options", "Attributes", "Args of methods")
NAMES = r"\*{0,2}\w+(?:,\s+\*{0,2}\w+)*"
NAMED = re.compile(r"\b(?:as|as (?:in|for|that of|those of)|are those of|see|phase of|its)\s+`([\w.]+)`", re.I)


@dataclass(frozen=True)
class Documented:
    """A function, method, class or module: its path, docstring, parameters, and where it is defined."""

    path: str
    doc: str
    parameters: tuple[str, ...] = ()
    owner: str = ""  # the class or module around it
    bases: tuple[str, ...] = ()


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return tuple(a.arg for a in every if a is not None and a.arg not in ("self", "cls"))


def _fields(node: ast.ClassDef) -> tuple[str, ...]:
    """Parameters that a dataclass makes of its fields."""
    found = [n for n in node.body if isinstance(n, ast.AnnAssign) and "init=False" not in ast.unparse(n)]
    return tuple(n.target.id for n in found if isinstance(n.target, ast.Name) and not n.target.id.startswith("_"))


def _of(body: list[ast.stmt], around: str, extra: dict[str, str]) -> Iterator[Documented]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            doc = ast.get_docstring(node) or ""
            for decorator in node.decorator_list:
                doc += extra.get(ast.unparse(decorator), "")
            yield Documented(f"{around}.{node.name}", doc, _parameters(node.args), around)
        elif isinstance(node, ast.ClassDef):
            path = f"{around}.{node.name}"
            init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
            is_dataclass = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
            own = _parameters(init.args) if init else _fields(node) if is_dataclass else ()
            bases = tuple(ast.unparse(b).rpartition(".")[2] for b in node.bases)
            yield Documented(path, ast.get_docstring(node) or "", own, around, bases)
            yield from _of(node.body, path, extra)


@functools.cache
def index() -> dict[str, Documented]:
    """Everything that has a docstring, by path; kernels stand at the top of the checkout."""
    found: dict[str, Documented] = {}
    for folder, prefix in ((ROOT / "tilescale_net", "tilescale_net"), (ROOT / "kernels", "tilescale_net.kernels")):
        for file in sorted(folder.rglob("*.py")):
            parts = [p for p in file.relative_to(folder).with_suffix("").parts if p != "__init__"]
            if prefix == "tilescale_net" and parts[:1] == ["kernels"]:
                continue
            module = ".".join([prefix, *parts])
            tree = ast.parse(file.read_text())
            # What a decorator adds to docstrings: `_copy_primitive` adds the text `_OPTIONS`.
            texts = {n.targets[0].id: n.value.value for n in tree.body if isinstance(n, ast.Assign)
                     and isinstance(n.targets[0], ast.Name) and isinstance(n.value, ast.Constant)
                     and isinstance(n.value.value, str)}  # fmt: skip
            extra = {"_copy_primitive": "\n\n" + _dedented(texts["_OPTIONS"])} if "_OPTIONS" in texts else {}
            found[module] = Documented(module, ast.get_docstring(tree) or "")
            for each in _of(tree.body, module, extra):
                if each.doc or each.path not in found:  # overloads have no docstring
                    found[each.path] = each
    return found


def _dedented(text: str) -> str:
    return re.sub(r"^    ", "", text.strip("\n"), flags=re.M)


def section(doc: str, name: str) -> re.Match[str] | None:
    """A section of a Google docstring with its rows."""
    return re.search(rf"^{name}:\n((?:(?:    .*)?\n)*(?:    .*)?)", doc, re.M)


def rows(doc: str) -> dict[str, str]:
    """The text of each parameter that a docstring has rows for."""
    found: dict[str, str] = {}
    for name in SECTIONS:
        block = section(doc, name)
        parts = re.split(rf"^    ({NAMES}): ", block[1], flags=re.M) if block else []
        for names, text in zip(parts[1::2], parts[2::2]):
            text = " ".join(text.split())
            # A second one in the line: `rows: of a tile. words: uint64 [tiles]`.
            first, *more = re.split(r"(?<=[.;]) (?=[a-z_]+: )", text)
            for each in re.split(r",\s+", names):
                found.setdefault(each.lstrip("*"), first.rstrip(";"))
            for each in more:
                found.setdefault(*each.split(": ", 1))
    return found


@functools.cache
def _by_name() -> dict[str, list[Documented]]:
    found: dict[str, list[Documented]] = {}
    for each in index().values():
        found.setdefault(each.path.rpartition(".")[2], []).append(each)
    return found


def named(name: str, at: Documented) -> Documented | None:
    """What a docstring means by a name: of the same class, the same module, the nearest package, or anywhere."""
    if name in index():
        return index()[name]
    parts = name.split(".")
    choices = [c for c in _by_name().get(parts[-1], []) if c is not at]
    choices = [c for c in choices if set(parts) <= set(c.path.split("."))] or choices

    def common(other: Documented) -> int:
        pairs = zip(at.path.split("."), other.path.split("."))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), 99)

    return max(choices, key=common, default=None)


def meaning(parameter: str, at: Documented, seen: frozenset[str] = frozenset(), rows_alone: bool = False) -> str | None:
    """What a parameter means; None where no docstring says it. Of what is around a callable only rows count."""
    if at.path in seen:
        return None
    seen |= {at.path}
    own = rows(at.doc).get(parameter)
    if own:
        for name in NAMED.findall(own):
            other = named(name, at)
            text = other and meaning(parameter, other, seen)
            if text:
                own = re.sub(rf"(?:the same )?{NAMED.pattern}", text.rstrip("."), own, count=1, flags=re.I)
        return own
    around = [(named(name, at), True) for name in (*at.bases, at.owner)]
    others = around if rows_alone else [*((named(name, at), False) for name in NAMED.findall(at.doc)), *around]
    return next((text for other, alone in others if other and (text := meaning(parameter, other, seen, alone))), None)


def complete(at: Documented) -> str:
    """The docstring with one row for each parameter, in the order of the signature, and its example as code."""
    doc = re.sub(r"^Example: (.*)$", r"Example:\n    \1", at.doc, flags=re.M)
    doc = re.sub(r"^Example:\n((?:    .*\n?)+)", r"Example:\n    ```python\n\1\n    ```\n", doc, flags=re.M)
    if not at.parameters:
        return doc
    attributes = section(at.doc, "Attributes")
    texts = {p: meaning(p, at) for p in at.parameters if not (attributes and re.search(rf"\b{p}\b.*: ", attributes[1]))}
    table = "Args:\n" + "".join(f"    {p}: {text}\n" for p, text in texts.items() if text)
    table = "" if not any(texts.values()) else table
    for name in ("Args", "Keyword-only options", "Args of methods"):
        block = section(doc, name)
        if block:
            doc = doc[: block.start()] + ("" if table in doc else table + "\n") + doc[block.end() :].lstrip("\n")
    return doc if table in doc else f"{doc}\n\n{table}"
