"""The examples of the memory model compile as they stand: PEs side by side become branches of one kernel."""

import importlib.util
import re

import pytest

from tests.docs.test_blocks import SIDE_BY_SIDE, blocks_of
from tilescale_net.compiler import inspect

EXAMPLES = [b for b in blocks_of(SIDE_BY_SIDE) if b.language == "python"]
HEAD = re.compile(r"# (?:every )?([ABC])\b")
PROGRAM = '''
import tilelang.language as T
import tilescale_net.language as N


def next_value(i):
    return T.cast(i, "float32")


value = next_value


@T.macro
def use(what):
    T.evaluate(0)


@T.prim_func
def example(
    ctx: N.Context(), x: T.Tensor({x}, "float32"), y: T.Tensor({y}, "float32"), big: T.Tensor((8,), "float32"),
    src: T.Tensor((8,), "float32"), flag: T.Tensor((1,), "uint64"), done: T.Tensor((1,), "uint64"),
    counter: T.Tensor((1,), "int32"), i: T.int64, peer: T.int32, b: T.int32, c: T.int32, n: T.int32,
):
    n_blocks = 4
    with T.Kernel(n_blocks, threads=64) as block:
        tx = T.get_thread_binding()
        me = N.my_pe()
{body}
'''  # fmt: skip


def columns(text: str) -> list[str]:
    """The program of each PE: the columns under the heads `# A`, `# B`, …, or the whole text without such a line."""
    first, *rest = text.splitlines()
    starts = [m.start() for m in HEAD.finditer(first)]
    if not starts:
        return [text]
    ends = [*starts[1:], None]
    return ["\n".join(line[s:e].rstrip() for line in rest) for s, e in zip(starts, ends)]


def program(text: str) -> str:
    body = ""
    for pe, part in enumerate(columns(text)):
        lines = [line for line in part.splitlines() if line.strip()]
        body += f"        if me == {pe}:\n" + "".join(f"            {line}\n" for line in lines)
    two = "(4, 8)"
    return PROGRAM.format(
        x=two if "x[pe, :]" in text or "x[block" in text else "(8,)",
        y=two if "y[me, :]" in text or "y[block" in text else "(8,)",
        body=body,
    )


def test_there_are_examples():
    assert len(EXAMPLES) >= 11
    assert sum(len(columns(b.text)) > 1 for b in EXAMPLES) >= 6


@pytest.mark.parametrize("block", EXAMPLES, ids=[b.where for b in EXAMPLES])
def test_example_compiles(tmp_path, block):
    path = tmp_path / "example.py"
    path.write_text(program(block.text))
    spec = importlib.util.spec_from_file_location("example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = inspect.cuda_source(module.example)
    for name in set(re.findall(r"\bN\.(put|get|wait|signal|fence|quiet|barrier_all)", block.text)):
        assert f"tsn::{name}" in source
