"""Files and functions stay short enough to be read at once."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests import lacking

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
# A traced kernel is one text for the compiler: what its parts share are registers and shared memory. One that is longer
# than the first of these states why.
LONG_KERNEL, MOST_LINES_OF_A_KERNEL = 120, 160
REASON = f"# Longer than {LONG_KERNEL} lines: "
# Files that are longer; they may shrink, and no other joins them.
LONGER: dict[str, int] = {}
TRACED = ("prim_func", "jit", "macro")


def files(*patterns: str) -> list[Path]:
    """The checkout's files of these names, tracked or not, that git does not ignore."""
    command = [
        lacking.program("git", "git"),
        "-C",
        str(ROOT),
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        *patterns,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("lacks a git checkout, which tells sources from what was built (git clone)")
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).exists()]


def is_traced(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function holds a kernel: it is traced itself, or makes functions that are."""
    names = [re.split(r"[.(]", ast.unparse(d).partition("(")[0])[-1] for f in ast.walk(function)
             if isinstance(f, ast.FunctionDef) for d in f.decorator_list]  # fmt: skip
    return any(name in TRACED for name in names)


def long_functions(text: str):
    """Name and lines of every function that is too long, without its signature and docstring."""
    tree, source = ast.parse(text), text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            code = node.body[1:] if ast.get_docstring(node) else node.body
            lines = node.end_lineno - code[0].lineno + 1 if code else 0
            reason = any(REASON in line for line in source[node.lineno - 1 : node.end_lineno])
            of_a_kernel = MOST_LINES_OF_A_KERNEL if reason else LONG_KERNEL
            if lines > (of_a_kernel if is_traced(node) else MOST_LINES_OF_A_FUNCTION):
                yield node.name, lines


def long_native_functions(text: str):
    """First line and lines of every function of C++ that is too long; clang-format has indented it by 0 or 2."""
    source = text.splitlines()
    for first, line in enumerate(source):
        indent = len(line) - len(line.lstrip())
        if indent > 2 or not line.strip() or line.lstrip().startswith(("{", "}", "//", "#")):
            continue
        opened = first
        while opened + 1 < len(source) and not source[opened].endswith((";", "{", "}")) and "(" in line:
            opened += 1
        is_lambda = any("](" in part for part in source[first : opened + 1])
        if re.search(r"\)[^;=()]*\{$", source[opened]) and not is_lambda:
            end = " " * indent + "}"
            last = next((i for i in range(opened + 1, len(source)) if source[i].startswith(end)), opened + 1)
            if last - opened - 1 > MOST_LINES_OF_A_FUNCTION:
                yield line.strip(), last - opened - 1


def test_files_are_short():
    found = files("*.py", "*.h", "*.cpp", "*.cu")
    assert len(found) > 300
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in found}
    assert not {name: n for name, n in lines.items() if n > LONGER.get(name, MOST_LINES_OF_A_FILE)}
    assert all(lines[name] > MOST_LINES_OF_A_FILE for name in LONGER), "a file of LONGER is short enough now"


def test_functions_are_short():
    assert [*long_functions("def f():\n" + "    pass\n" * 61)] == [("f", 61)]
    long = {
        f"{p.relative_to(ROOT)}:{name}": lines for p in files("*.py") for name, lines in long_functions(p.read_text())
    }
    assert not long


def test_native_functions_are_short():
    body = "\n".join(["  f();"] * 61)
    assert [*long_native_functions(f"void f(int a,\n       int b) const {{\n{body}\n}}\n")] == [("void f(int a,", 61)]
    assert not [*long_native_functions(f"namespace a {{\nvoid f() {{\n  f();\n}}\n{body}\n}}\n")]
    assert not {
        f"{p.relative_to(ROOT)}: {name}": lines
        for p in files("*.h", "*.cpp", "*.cu")
        for name, lines in long_native_functions(p.read_text())
    }
