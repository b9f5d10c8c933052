"""Commands of README and docs, in blocks and in sentences: the programs exist, and take these arguments.

Benchmarks and `python -m tilescale_net` parse them with their own parsers. Programs are run in test_blocks.py and in
tests/tutorials.
"""

import argparse
import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_blocks import PAGES, ROOT, blocks_of
from tilescale_net import cli

ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
# Files that the text speaks of as the reader's own, or that come with something else.
READERS = re.compile(
    r"(script|shift|moe|slow|layer|ring_sum|layer_twice|two_collectives|sharded_weight|scaled)\.py(::\w+)?|DeepEP/.*"
)
# `-m` of Python that is not ours.
OTHERS = ("pip", "venv", "mkdocs")


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """(where, words) of each command, without variables before it and the comment behind it."""
    text = page.read_text()
    lines = [(b.where, line) for b in blocks_of(page) if b.language == "bash" for line in b.text.splitlines()]
    lines += [
        (b.where, m)
        for b in blocks_of(page)
        if b.language == "yaml"
        for m in re.findall(r"bash launch\.sh [^\"]*", b.text)
    ]
    lines += [
        (b.where, m[1])
        for b in blocks_of(page)
        if b.language == "text"
        for m in re.finditer(r"^\$ (.*)$", b.text, re.M)
    ]
    prose = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    for m in re.finditer(r"`([^`\n]+)`", prose):
        lines.append((f"{page.relative_to(ROOT)}:{prose[: m.start()].count(chr(10)) + 1}", m[1]))
    found = []
    for where, line in lines:
        words = line.split("#")[0].replace(" …", "").split()
        while words and ASSIGNMENT.fullmatch(words[0]):
            words.pop(0)
        if len(words) > 1 and (
            words[0] in ("bash", "python", "torchrun", "srun") or re.fullmatch(r"\w+\.py", words[0])
        ):
            found.append((where, words))
    return found


COMMANDS = {page: commands_of(page) for page in PAGES}


def test_there_are_commands():
    assert sum(map(len, COMMANDS.values())) > 100


@pytest.mark.parametrize("page", [p for p in PAGES if COMMANDS[p]], ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_of_a_page(page, monkeypatch, capsys):
    monkeypatch.setenv("TSN_DEVICE", "simulator")
    seen = set()
    for where, words in COMMANDS[page]:
        if tuple(words) not in seen:
            seen.add(tuple(words))
            check(where, words, monkeypatch)
    capsys.readouterr()


def check(where: str, words: list[str], monkeypatch) -> None:
    """Fails when a command names a file, a flag or a value that is not there."""
    if words[:2] == ["bash", "launch.sh"] and words[2:]:
        words = words[2:]
        if words[0] == "pytest":
            for path in (w.split("::")[0] for w in words[1:] if w.startswith("tests/")):
                assert (ROOT / path).exists(), f"{where}: there is no {path}"
            return
    elif words[:2] == ["python", "-m"]:
        return check_module(where, words[2:])
    elif re.fullmatch(r"\w+\.py", words[0]) and not READERS.fullmatch(words[0]):
        words = [f"benchmark/{words[0]}", *words[1:]]  # in tables, behind a word for it
    script = next((i for i, w in enumerate(words) if w.endswith(".py") and not w.startswith("$")), None)
    if script is None or READERS.fullmatch(words[script]):
        return
    path = ROOT / words[script]
    assert path.exists(), f"{where}: there is no {words[script]}"
    if path.parent.name == "benchmark":
        refused = refusal(path, words[script + 1 :], monkeypatch)
        assert refused is None, f"{where}: {' '.join(words)}\n{refused}"


def check_module(where: str, words: list[str]) -> None:
    """`python -m` of this package is parsed; a command without arguments is a mention."""
    if words[0] != "tilescale_net":
        if words[0] not in OTHERS:
            assert (ROOT / words[0].replace(".", "/")).with_suffix(".py").exists(), f"{where}: there is no {words[0]}"
        return
    words = [w for w in words[1:] if w != "\\"]
    names = next(a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    if words[:1] and words[0] not in ("--version", "--help"):
        assert words[0] in names, f"{where}: python -m tilescale_net has no {words[0]}"
    if len(words) > 1:
        try:
            cli.parser().parse_args(words)
        except SystemExit:
            raise AssertionError(f"{where}: {' '.join(words)}: not what python -m tilescale_net takes") from None


# Pages whose first commands a newcomer copies as they are, variables in front included.
FIRST = [
    ROOT / "README.md",
    ROOT / "docs" / "install.md",
    ROOT / "docs" / "quick-start.md",
    ROOT / "docs" / "cluster.md",
]


@pytest.mark.parametrize("page", FIRST, ids=lambda p: p.name)
def test_the_launcher_takes_the_variables_of_a_page(page, tmp_path):
    """`launch --check` refuses a job that could not start: a missing address or port, a wrong number, an unknown name."""
    lines = [line for b in blocks_of(page) if b.language == "bash" for line in b.text.splitlines()]
    found = [m for line in lines if (m := re.match(r"((?:[A-Z_]+=\S+ )+)bash launch\.sh (\S+\.py)", line))]
    assert found
    for m in found:
        variables = dict(pair.split("=", 1) for pair in m[1].split())
        variables = {name: "0" if value.startswith("$") else value for name, value in variables.items()}
        script = ROOT / m[2] if (ROOT / m[2]).exists() else tmp_path / m[2]
        script.touch()
        env = {
            k: v
            for k, v in os.environ.items()
            if not re.fullmatch("RANK|WORLD_SIZE|LOCAL_RANK|VIRTUAL_NODES|TSN_DEVICE", k)
        }
        command = [sys.executable, str(ROOT / "tilescale_net" / "launch"), "--check", str(script)]
        done = subprocess.run(
            command, env=env | {"TSN_DEVICE": "simulator"} | variables, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{page.name}: {m[0]}\n{done.stderr}"


class Parsed(Exception):
    """Ends a benchmark behind its arguments."""


def refusal(path: Path, words: list[str], monkeypatch) -> str | None:
    """A benchmark's error for these words; None when it accepts them."""
    real, said = argparse.ArgumentParser.parse_args, io.StringIO()

    def parse_and_end(self, *args, **named):
        real(self, *args, **named)
        raise Parsed

    with monkeypatch.context() as m, contextlib.redirect_stderr(said):
        m.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
        m.setattr(sys, "argv", [str(path), *shlex.split(" ".join(words))])
        m.setenv("WORLD_SIZE", "2")
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Parsed:
            return None
        except SystemExit as end:
            return f"ends with {end.code}: {said.getvalue()}"
    return "its arguments are parsed nowhere"


@pytest.mark.parametrize(
    "words, said",
    [
        ("bash launch.sh benchmark/queue.py", "there is no benchmark/queue.py"),
        ("bash launch.sh benchmark/put_signal.py --sizes 8X", "'8X' is not a size"),
        ("put_signal.py --nothing 1", "unrecognized arguments"),
        ("bash launch.sh pytest tests/none.py", "there is no tests/none.py"),
        ("python -m tilescale_net prune", "has no prune"),
        ("python -m tilescale_net tune moe --colour 3", "not what python -m tilescale_net takes"),
        ("python -m tests.none", "there is no tests.none"),
    ],
)
def test_commands_that_are_wrong_are_found(words, said, monkeypatch, capsys):
    monkeypatch.setenv("TSN_DEVICE", "simulator")
    with pytest.raises(AssertionError, match=re.escape(said)):
        check("page:1", words.split(), monkeypatch)
