"""A reader pastes the code of README and docs: every block runs, and prints the text below it.

A `python` block is saved as the file that the `text` block below it runs (`$ GPUS=2 bash launch.sh NAME.py`, then the
output). A block that is no program is marked in the line above it, `<!-- part of a program: WHY -->`; it is parsed.
Commands are looked at in test_commands.py.
"""

import ast
import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import jobs, ranks
from tests.variants import variants

ROOT = Path(__file__).resolve().parents[2]
# Its examples are two PEs side by side; test_memory_model.py makes kernels of them and runs those.
SIDE_BY_SIDE = ROOT / "docs" / "memory-model.md"
LANGUAGES = ("python", "bash", "text", "yaml", "cpp")  # YAML: see test_commands.py; C++: other libraries
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(
    r"(?P<note><!-- part of a program: [^\n]+ -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
RUN = re.compile(r"\$ (?P<env>(?:[A-Z_]+=\S+ )*)bash launch\.sh (?P<name>\w+\.py)\n(?P<output>.*)", re.S)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    is_part: bool

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text[: m.start("language")].count("\n") + 1, m["language"], m["text"], bool(m["note"]))
        for m in BLOCK.finditer(text)
    ]


BLOCKS = [b for page in PAGES for b in blocks_of(page)]


def programs() -> list[tuple[Block, str, str, str]]:
    """(block, environment, file name, expected output) of every Python block that is a whole program."""
    found = []
    for block, below in zip(BLOCKS, [*BLOCKS[1:], None]):
        if block.language != "python" or block.is_part or block.page == SIDE_BY_SIDE:
            continue
        run = RUN.fullmatch(below.text) if below and below.page == block.page and below.language == "text" else None
        assert run, f"{block.where}: a program is followed by a text block with its command and its output"
        found.append((block, run["env"], run["name"], run["output"].strip()))
    return found


PROGRAMS = programs()


def kernels_launched_once(text: str) -> list[str]:
    """Kernels of a program that are launched at one place outside of a loop: stale signals show in the second launch only."""
    tree = ast.parse(text)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    factories = {n.name for n in functions if any("jit" in ast.dump(d) for d in n.decorator_list)}

    def makes(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in factories

    once = [ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call) and makes(n.func)]
    # A kernel of another function is launched as often as that is called.
    main = [n for f in functions if f.name == "main" for n in f.body]
    kernels = [n.targets[0] for n in [*tree.body, *main] if isinstance(n, ast.Assign) and makes(n.value)]
    looped = {id(inner) for n in ast.walk(tree) if isinstance(n, (ast.For, ast.While)) for inner in ast.walk(n)}
    for kernel in kernels:
        name = ast.unparse(kernel)
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == name]
        if isinstance(kernel, ast.Name) and len(calls) < 2 and not any(id(n) in looped for n in calls):
            once.append(name)
    return once


RUN_AS_FILES = sorted([*(ROOT / "docs" / "tutorials").glob("[0-9]*.py"), *(ROOT / "examples").glob("*.py")])


def test_every_kernel_of_the_documents_is_launched_twice():
    programs = {b.where: b.text for b, *_ in PROGRAMS} | {p.name: p.read_text() for p in RUN_AS_FILES}
    assert {where: once for where, text in programs.items() if (once := kernels_launched_once(text))} == {}


def test_a_kernel_that_is_launched_once_is_noticed():
    head = "@tsn.jit\ndef f(n): ...\n\n"
    assert kernels_launched_once(head + "f(3)(x)") == ["f(3)"]
    assert kernels_launched_once(head + "k = f(3)\nk(x)") == ["k"]
    assert not kernels_launched_once(head + "k = f(3)\nk(x)\nk(x)")
    assert not kernels_launched_once(head + "k = f(3)\nfor i in range(2):\n    k(x)")


def test_pages_have_blocks():
    assert len(BLOCKS) >= 10 and len(PROGRAMS) >= 2


@variants(4, "block, env, name, output", PROGRAMS, ids=[p[0].where for p in PROGRAMS])
def test_program_prints_the_output_of_the_page(tmp_path, block, env, name, output):
    (tmp_path / name).write_text(block.text)
    known = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "VIRTUAL_NODES")}
    variables = dict(pair.split("=", 1) for pair in env.split())
    known |= variables | {"TSN_PYTHON": sys.executable, "TSN_BUILD": "0"}
    if ranks.gpus() < int(variables["GPUS"]):
        known |= {"TSN_DEVICE": "simulator", "TSN_SIM_RACES": "1"}
    done = jobs.launch(name, env=known, cwd=str(tmp_path))
    assert done.returncode == 0, f"{block.where}\n{done.stderr}"
    assert done.stdout.strip() == output, block.where


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_blocks_and_links_of_a_page(page):
    """Each block has a language that is looked at, parts of programs are Python, links lead somewhere."""
    for block in blocks_of(page):
        if block.language == "python" and block.is_part:
            ast.parse(block.text)
        assert block.language in LANGUAGES, f"{block.where}: tag the block as one of {', '.join(LANGUAGES)}"
    prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", page.read_text(), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", prose):
        other = page.parent / target if target else page
        assert other.exists(), f"{page.relative_to(ROOT)}: the link to {target} leads nowhere"
        if anchor and not anchor.startswith("tilescale_net."):  # those are of the site alone, see .ci/site
            assert anchor in anchors(other), f"{page.relative_to(ROOT)}: {target} has no heading #{anchor}"
    for address in re.findall(r"\]\((https?:[^)]*)\)", prose):
        assert re.fullmatch(r"https?://[\w-]+(\.[\w-]+)+(/\S*)?", address), f"{page.relative_to(ROOT)}: {address}"


@functools.cache
def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h)).strip().lower() for h in headings]
    return {form for h in plain for form in (h.replace(" ", "-"), re.sub(r"[-\s]+", "-", h))}


def test_tables_and_plots_agree_with_the_data():
    done = subprocess.run(
        [sys.executable, "docs/results/render.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
