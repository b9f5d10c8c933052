import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.common import format_bytes, parse_bytes, parse_sizes


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
