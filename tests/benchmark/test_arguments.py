"""Wrong arguments end with exit code 2 and one message, from rank 0."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.common import BenchmarkParser, byte_count, format_bytes, int_list, one_of, positive_float, suite
from benchmark.common.arguments import parse_bytes, parse_sizes
from benchmark.common.copies import copy_parser, geometries, varying_columns
from benchmark.common.report import ROOT


def parser() -> BenchmarkParser:
    made = BenchmarkParser("test", sizes="2K..8K")
    made.add_argument("--op", type=one_of("send", "write"), default=["send"])
    made.add_argument("--threads", type=int_list(1, 1024), default=[128])
    made.add_argument("--duration", type=positive_float)
    made.add_argument("--size", type=byte_count)
    return made


def test_defaults():
    args = parser().parse_args([])
    assert (args.warmup, args.repeat, args.sizes) == (5, 20, [2048, 4096, 8192])
    assert (args.json, args.plot, args.baseline) == (None, None, None)


def test_given():
    args = parser().parse_args("--sizes 1..4 --op all --threads 1,2 --duration 0.5 --size 64K --warmup 0".split())
    assert (args.sizes, args.op, args.threads) == ([1, 2, 4], ["send", "write"], [1, 2])
    assert (args.duration, args.size, args.warmup) == (0.5, 65536, 0)


@pytest.mark.parametrize(
    "text, said",
    [
        ("--sizes 0", "size of zero"),
        ("--sizes 8..4", "ends before it starts"),
        ("--repeat 0", "0 is not a whole number of 1 or more"),
        ("--repeat 1.5", "'1.5' is not a whole number"),
        ("--warmup -1", "-1 is not a whole number of 0 or more"),
        ("--op receive", "'receive' is not one of send, write, all"),
        ("--threads 0", "0 is not within 1 and 1024"),
        ("--threads 1,x", "not a list of whole numbers"),
        ("--duration 0", "0 is not a number above 0"),
        ("--duration inf", "inf is not a number above 0"),
        ("--duration nan", "nan is not a number above 0"),
        ("--size 0", "zero bytes"),
        ("--json /no/such/folder/x.json", "cannot be written"),
        ("--json /tmp", "cannot be written"),
        ("--json /proc/x.json", "cannot be written"),
        ("--baseline /no/such/file", "cannot be read"),
        ("--no-such-flag", "unrecognized arguments"),
        ("--siz 4", "unrecognized arguments"),
    ],
)
def test_wrong(text, said, capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(text.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(text.split())
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "")


def test_help_is_shown_once(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    assert "--sizes" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_PROCID", "3")
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr() == ("", "")


def test_one_rank_is_too_few_for_copies(capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        parser().require_two_ranks("copies need")
    assert ended.value.code == 2
    assert "GPUS=2" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    parser().require_two_ranks("copies need")


def test_geometries_are_all_combinations():
    made = copy_parser("test", sizes="2K")
    args = made.parse_args("--threads 64,128 --blocks 1,2 --engine ldst --ring 4x8K --chunk 64K".split())
    every = geometries(args)
    assert [(g.blocks, g.threads) for g in every] == [(1, 64), (1, 128), (2, 64), (2, 128)]
    assert {(g.engine, g.ring, g.chunk, g.unroll) for g in every} == {("ldst", (4, 8192), 65536, None)}
    assert [c.key for c in varying_columns(args)] == ["blocks", "threads"]


def test_offsets_of_both_ends():
    made = copy_parser("test", sizes="2K")
    offsets = [made.parse_args(text.split()).offset for text in ("", "--offset 48", "--offset 0,16")]
    assert offsets == [(0, 0), (48, 48), (0, 16)]


@pytest.mark.parametrize(
    ("text", "complaint"), [("256", "not within 0 and 255"), ("x", "whole numbers"), ("1,2,3", "more than an offset")]
)
def test_offsets_that_are_none(text, complaint, capsys):
    with pytest.raises(SystemExit):
        copy_parser("test", sizes="2K").parse_args(["--offset", text])
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("ring", ["8", "x", "8x", "x16K", "8x16Q", "8 16"])
def test_ring_shape(ring, capsys):
    made = copy_parser("test", sizes="2K")
    with pytest.raises(SystemExit):
        made.parse_args(["--ring", ring])
    assert "such as 8x16K" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, value",
    [
        ("0", 0),
        ("7", 7),
        ("2K", 2048),
        ("2k", 2048),
        ("2KiB", 2048),
        ("2KB", 2048),
        ("1.5M", 3 << 19),
        (" 4G ", 4 << 30),
    ],
)
def test_parse_bytes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5", "2X", "1e3", "0x10", "1 2", "nan", "0.3K"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match="not a"):
        parse_bytes(text)


@given(st.integers(0, 2**50))
def test_format_is_exact(value):
    assert parse_bytes(format_bytes(value)) == value


def test_seed_rows():
    assert parse_sizes("2K..4M") == [2048 << i for i in range(12)]


@pytest.mark.parametrize(
    "text, value",
    [("8", [8]), ("8,1K", [8, 1024]), ("3..13", [3, 6, 12]), ("4K,8..32", [4096, 8, 16, 32]), ("5..5", [5])],
)
def test_parse_sizes(text, value):
    assert parse_sizes(text) == value


@pytest.mark.parametrize("text", ["", ",", "1,", "0", "0..8", "8..4", "1..", "..4", "1...4", "a..b"])
def test_parse_sizes_refuses(text):
    with pytest.raises(ValueError):
        parse_sizes(text)


def test_scripts_load_nothing_that_takes_seconds():
    """Before their arguments are right."""
    names = [path.stem for path in suite.FOLDER.glob("*.py") if path.stem != "__init__"]
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module('benchmark.' + name)\n"
    code += "print([name for name in ('torch', 'tilelang', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
