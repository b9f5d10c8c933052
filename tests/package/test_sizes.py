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
# A traced kernel is one text for the compiler: what its parts share are registers and shared memory.
MOST_LINES_OF_A_KERNEL = 120
# Files that are longer; they may shrink, and no other joins them.
LONGER: dict[str, int] = {}
# Kernels that are longer, with their lines and the reason; they may shrink, and no other joins them.
SIGNATURE = "a third are parameters, shared memory and names for both; the steps are macros, one after the other"
TWO_ROLES = "senders and receivers are two halves of one launch, which share its opening and its shared memory"
LONGER_KERNELS = {
    "dispatch_throughput": (140, TWO_ROLES),
    "combine_throughput": (140, TWO_ROLES),
    "dispatch_nodes": (160, TWO_ROLES),
    "combine_nodes": (160, TWO_ROLES),
    "dispatch_latency": (130, SIGNATURE),
    "combine_latency": (130, SIGNATURE),
}
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


def long_functions(tree: ast.Module):
    """Name and lines of every function that is too long, without its signature and docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            code = node.body[1:] if ast.get_docstring(node) else node.body
            lines = node.end_lineno - code[0].lineno + 1 if code else 0
            longer, _ = LONGER_KERNELS.get(node.name, (MOST_LINES_OF_A_KERNEL, ""))
            if lines > (longer if is_traced(node) else MOST_LINES_OF_A_FUNCTION):
                yield node.name, lines


def test_files_are_short():
    found = files("*.py", "*.h", "*.cpp", "*.cu")
    assert len(found) > 300
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in found}
    assert not {name: n for name, n in lines.items() if n > LONGER.get(name, MOST_LINES_OF_A_FILE)}
    assert all(lines[name] > MOST_LINES_OF_A_FILE for name in LONGER), "a file of LONGER is short enough now"


def test_functions_are_short():
    assert [*long_functions(ast.parse("def f():\n" + "    pass\n" * 61))] == [("f", 61)]
    long = {
        f"{p.relative_to(ROOT)}:{name}": lines
        for p in files("*.py")
        for name, lines in long_functions(ast.parse(p.read_text()))
    }
    assert not long
