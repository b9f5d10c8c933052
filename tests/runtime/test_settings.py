"""The table of settings: its page, its checks, and that nothing else reads the environment."""

import re
from pathlib import Path

import pytest

from tilescale_net import _native
from tilescale_net.errors import ConfigurationError, FabricError
from tilescale_net.runtime import settings

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tilescale_net"


def sources(*patterns: str):
    """(path, text) of files of the package."""
    for pattern in patterns:
        for path in PACKAGE.rglob(pattern):
            yield path.relative_to(ROOT), path.read_text()


def test_the_page_is_that_of_the_table():
    said = "docs/settings.md differs from the table; run python -m tilescale_net settings > docs/settings.md"
    assert (ROOT / "docs" / "settings.md").read_text() == settings.page(), said


def test_the_page_lists_the_fields_of_chaos():
    with pytest.raises(FabricError) as error:
        _native.parse_chaos("nothing=1")
    assert sorted(str(error.value).partition("known are ")[2].split(", ")) == sorted(settings.CHAOS_FIELDS)


def test_variables_are_read_through_the_table_alone():
    reading = re.compile(r"(?:environ\.get\(|environ\[|getenv\()\s*\"(TSN_\w+)\"")
    found = {(str(path), name) for path, text in sources("*.py", "*.cpp", "*.h") for name in reading.findall(text)}
    # Read before Python starts or without it, or before the package can be imported.
    assert found == {
        ("tilescale_net/csrc/fabric/provider.cpp", "TSN_LIBFABRIC"),
        ("tilescale_net/csrc/cuda/driver.cpp", "TSN_LIBCUDA"),
        ("tilescale_net/launch/set_up.py", "TSN_LIBFABRIC"),
        ("tilescale_net/launch/set_up.py", "TSN_TORCH"),
    }


def test_every_variable_that_is_named_has_a_row():
    shell = (ROOT / "launch.sh").read_text() + (ROOT / "setup.py").read_text()
    named = set(re.findall(r"\bTSN_[A-Z_]+\b", shell))
    for _, text in sources("*.py"):
        named |= set(re.findall(r"[\"'`(]?\b(TSN_[A-Z_]+[A-Z])(?==|\b[\"'`,. ])", re.sub(r"TSN_\w+\(", "", text)))
    assert sorted(named - set(settings.ALL) - MACROS) == []


# Of C++, in texts that Python holds.
MACROS = {
    f"TSN_{name}" for name in ("TRACED", "TRACED_KERNEL", "TRACE_KERNEL", "HOST_STANDALONE", "WITH_LIBFABRIC", "HOT")
}
MACROS |= {"TSN_COLD"}


WRONG = [
    ("TSN_TIMEOUT", "nan", "not a finite number"), ("TSN_TIMEOUT", "inf", "not a finite number"),
    ("TSN_TIMEOUT", "0", "below the minimum of 0.01"), ("TSN_TIMEOUT", "1e12", "above the maximum"),
    ("TSN_RAILS", "1.5", "not a whole number"), ("TSN_RAILS", "-1", "below the minimum of 0"),
    ("TSN_PROXY_STAGING", "yes", "neither 0 nor 1"), ("TSN_PROXY_CPUS", "2,x", "not a list such as 2,3 or 4-7"),
    ("TSN_PROXY_CHUNK", "1 apple", "not a size"), ("TSN_SIM_VISIBILITY", "soon", "not one of eager, late, random"),
    ("TSN_DEVICE", "gpu", "not one of auto, cuda, simulator"), ("TSN_OUTPUT", "everything", "not one of all, first"),
    ("TSN_PROVIDER", "tcp;ofi_rxn", "no provider 'ofi_rxn'; did you mean ofi_rxm?"),
    ("TSN_CHAOS", "banana=1", "unknown field 'banana'"), ("TSN_CHAOS", "reorder=7", "not a probability"),
    ("TSN_TRACE", "/proc/no/x.json", "there is no folder /proc/no"), ("TSN_TRACE", "/tmp", "no file can be written there"),
    ("TSN_TRACE", "/proc/x.json", "no file can be written there"),
]  # fmt: skip


def test_wrong_values(monkeypatch):
    for name, value, said in WRONG:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ConfigurationError, match=f"^{name}=") as error:
                settings.check()
            assert said in str(error.value)


NEAR = {
    "TSN_HEAPSIZE": "TSN_HEAP_SIZE", "TSN_TIME_OUT": "TSN_TIMEOUT", "TSN_SIM_SEEDS": "TSN_SIM_SEED",
    "TSN_PROXY_THREAD": "TSN_PROXY_THREADS", "TSN_provider": "TSN_PROVIDER", "TSN_SEED": "TSN_SIM_SEED",
    "TSN_HEAP": "TSN_HEAP_SIZE", "TSN_RACES": "TSN_SIM_RACES", "TSN_TRACE_FILE": "TSN_TRACE", "TSN_WEATHER": None,
}  # fmt: skip


def test_a_name_of_no_setting_is_an_error(monkeypatch):
    for name, near in NEAR.items():
        advice = f"did you mean {near}[?] " if near else ""
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            with pytest.raises(ConfigurationError, match=f"there is no setting {name}; {advice}docs/settings.md lists"):
                settings.check()


def test_names_that_are_nearly_the_launchers(monkeypatch):
    variables = {"VIRTUAL_NODE": "2", "GPU": "4", "NODE": "worker-3", "MASTER_ADDRESS": "a", "NODE_NAME": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for row in settings.LAUNCHER:
        monkeypatch.delenv(row, raising=False)
    found = [pair for pair in settings.misspelt_launch() if pair[0] in variables]
    assert found == [("GPU", "GPUS"), ("MASTER_ADDRESS", "MASTER_ADDR"), ("VIRTUAL_NODE", "VIRTUAL_NODES")]
    monkeypatch.setenv("GPUS", "2")
    assert ("GPU", "GPUS") not in settings.misspelt_launch()


def test_ranks_may_come_as_far_apart_as_first_calls_do():
    """A kernel's compilation takes up to a minute, and ranks need not compile the same ones."""
    assert settings.TIMEOUT.default >= 60


def test_good_values(monkeypatch):
    values = {
        "TSN_TIMEOUT": ("0.5", 0.5),
        "TSN_HEAP_SIZE": ("1.5G", 3 << 29),
        "TSN_PROXY_CPUS": ("1,3-5", [1, 3, 4, 5]),
        "TSN_PROXY_STAGING": ("1", True),
        "TSN_PROVIDER": ("tcp;ofi_rxm", "tcp;ofi_rxm"),
        "TSN_DEVICE": ("CUDA", "cuda"),
        "TSN_RAILS": ("", 0),
    }
    for name, (value, _) in values.items():
        monkeypatch.setenv(name, value)
    settings.check()
    for name, (_, read) in values.items():
        assert settings.ALL[name].get() == read
    monkeypatch.setenv("TSN_PROVIDER", "mine")
    monkeypatch.setenv("FI_PROVIDER_PATH", "/somewhere")
    settings.check()


def test_the_heaps_size_is_named_as_it_was_given():
    for size, words in (
        ("4 apples", "heap_bytes='4 apples'"),
        (4, "heap_bytes: a heap of 4"),
        (1.5, "heap_bytes=1.5"),
        (1 << 63, "heap_bytes: a heap of 9223372036854775808 bytes is more than any memory holds"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            settings.heap_bytes(size, on_gpu=False)
