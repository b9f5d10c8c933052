"""docs/primitives.md names every primitive, and its example works."""

import re
from pathlib import Path

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks

PAGE = Path(__file__).parents[2] / "docs" / "primitives.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documents are not installed")


def _rows() -> list[list[str]]:
    """Cells of the table rows whose first cell names primitives."""
    rows = [line.strip().strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def test_every_primitive_is_listed_once():
    named = [name for row in _rows() for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(N.__all__)


def test_rows_say_who_calls_and_which_paths():
    for row in _rows():
        assert len(row) >= 5 and all(row), row


def _block(first: str) -> str:
    return next(text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if first in text)


def _stream(path: str) -> None:
    """Run the page's example from a file, as tilelang reads the source of kernels that it traces."""
    space = {"tsn": tsn, "T": T, "N": N}
    exec(compile(Path(path).read_text(), path, "exec"), space)
    n, width = 7, 200
    x, ring = tsn.empty((n, width)), tsn.empty((2, width))
    arrived, credit = tsn.zeros(1, torch.uint64), tsn.zeros(1, torch.uint64)
    kernel = space["stream"](2, width)
    left = (tsn.rank() - 1) % tsn.size()
    for launch in range(3):
        total = torch.zeros(width, device=tsn.device())
        rows = torch.arange(n * width).view(n, width) + 100 * launch
        x.copy_(rows + tsn.rank())
        tsn.barrier()
        kernel(x, ring, arrived, credit, total, launch * n, n)
        tsn.barrier()
        assert torch.equal(total.cpu(), (rows + left).float().sum(0)), launch


def test_the_kernel_of_a_size_known_late(tmp_path):
    source = tmp_path / "half.py"
    source.write_text(_block("def first_half("))
    space = {"tsn": tsn, "T": T, "N": N}
    exec(compile(source.read_text(), str(source), "exec"), space)
    tsn.compile(space["first_half"].trace(), target="simulator")


def test_the_stream_of_the_page(tmp_path):
    source = tmp_path / "stream.py"
    source.write_text(_block("def stream("))
    ranks.run(2, _stream, str(source), env={"TSN_SIM_RACES": "1"})
    ranks.run(2, _stream, str(source), env={"VIRTUAL_NODES": "2", "TSN_CHAOS": "on"})
