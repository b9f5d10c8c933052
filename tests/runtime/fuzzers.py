"""Structured fuzzers of what Python reads from outside of the process: values of other ranks, words in the store,
environment variables, kept kernels. What comes out is a value or the error that is documented; nothing else.

usage: python -m tests.runtime.fuzzers NAME RUNS [SEED]     prints how many a second
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tilescale_net import fabric
from tilescale_net.compiler.simulator import cache
from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import control, encoding, heartbeats, placement, settings

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    255,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**53,
    2**63,
    2**64,
    -(2**63),
    10**400,
    0.5,
    -0.0,
    1e308,
)
TEXTS = ("", "0", "1", "a", "\0", "\0bytes", "²", "٣", "\ud800", "AA==", "%%%", "x" * 300, "rank 1", "end")


def value(dice: random.Random, depth: int = 0):
    """Something that JSON can hold."""
    kind = dice.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return dice.choice(NUMBERS)
    if kind < 4:
        return dice.choice(TEXTS)
    if kind == 4:
        return dice.choice((None, True, False, float("nan"), float("inf")))
    if kind < 7:
        return [value(dice, depth + 1) for _ in range(dice.randrange(4))]
    return {dice.choice(TEXTS): value(dice, depth + 1) for _ in range(dice.randrange(3))}


def damaged(dice: random.Random, data: bytes) -> bytes:
    """`data` with one to four changes, or as it is."""
    for _ in range(dice.randrange(5)):
        at = dice.randrange(len(data) + 1)
        data = dice.choice(
            (
                lambda: data[:at],
                lambda: data[:at] + dice.randbytes(1 + dice.randrange(3)) + data[at:],
                lambda: (
                    data[:at]
                    + dice.choice((b'"', b"[", b"{", b"}", b",", b":", b"\\u", b"9" * 20, b"null"))
                    + data[at:]
                ),
                lambda: data[:at] + data[at + 1 :],
                lambda: data[:at] + data[dice.randrange(len(data) + 1) :],
            )
        )()
    return data


def as_json(dice: random.Random) -> bytes:
    return damaged(dice, json.dumps(value(dice)).encode("utf-8", "surrogatepass"))


def payload(dice: random.Random) -> None:
    """What `gather` has got from a rank, held against what this rank has sent itself."""
    mine = dice.choice((["host/boot", 77], [3, b"\0" * 16, "gpu"], [12, 5], b"blob", "text"))
    try:
        control.check_alike(mine, encoding.decode(as_json(dice)))
    except ValueError:
        pass


class Store:
    """A store in which every key holds some text."""

    def __init__(self, dice: random.Random):
        self.dice = dice

    def check(self, keys):
        return self.dice.random() < 0.9

    def get(self, key):
        return as_json(self.dice)

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def set(self, key, value):
        pass

    def add(self, key, amount):
        return self.dice.choice([0, 1, -1, 2**62])


def words_in_store(dice: random.Random) -> None:
    """Failures, last calls and heartbeats of other ranks."""
    calls, call = control.last_call(as_json(dice).decode(errors="replace"))
    assert isinstance(calls, int) and isinstance(call, str)
    news = heartbeats.Heartbeats(0, ["a", "a", "b"], 1.0).round(Store(dice))
    assert news.failed is None or isinstance(news.failed, str)
    assert set(news.stopped) <= {1, 2}


def _texts(dice: random.Random) -> str:
    common = ("", "0", "1", "2,3", "4-7", "7-4", "0-99999999999", "64M", "1e400", "nan", "on", "all", "node", "efa", "'", '"a',
              "9" * 400, "-1", "0x10", "²", "٣", "\udcff", "1.5G", "1" + "0" * 30 + "T", "seed=1,split=2", "error=nan",
              "1/a/b:2", "127.0.0.1", "127.0.0.1:1", "k=", "=", "a\nb", "1_000", " 1 ", "+5", "imm_bits=7", "delay_us=-1")  # fmt: skip
    text = dice.choice(common)
    if dice.random() < 0.3:
        text += dice.choice((",", "-", "=", ";", ".", " ", "K", "\u00e9")) + dice.choice(common)
    return damaged(dice, text.encode("utf-8", "surrogateescape")).replace(b"\0", b"").decode("utf-8", "surrogateescape")


# Those of launchers that only say who and where; others make this process meet real ones.
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS", "LOCAL_WORLD_SIZE")
_clean = {k: v for k, v in os.environ.items() if k not in (*settings.ALL, *LAUNCHER) and not k.startswith("TSN_")}


def environment(dice: random.Random) -> None:
    """Variables of this package and of launchers."""
    names = [n for n in settings.ALL if n != "CUDA_MODULE_LOADING"] + [*LAUNCHER] * 3
    os.environ.clear()
    os.environ.update(_clean)
    os.environ.update({dice.choice(names): _texts(dice) for _ in range(1 + dice.randrange(4))})
    for read in (
        settings.check,
        *(settings.ALL[name].get for name in os.environ if name in settings.ALL),
        fabric.check_settings,
        settings.load_kernels_early,
        lambda: placement.find(0.0),
        lambda: settings.heap_bytes(None, False),
    ):
        try:
            read()
        except ConfigurationError as err:
            assert str(err)


_kept = b"\x7fELF" + bytes(range(256)) * 40
_folder = tempfile.TemporaryDirectory(prefix="tilescale_net-fuzz-")


def kept_kernel(dice: random.Random) -> None:
    """A file of the cache of kernels: taken as it was made, or not at all."""
    path = Path(_folder.name) / f"{os.getpid()}.so"
    path.write_bytes(_kept)
    cache.seal(path)
    whole = path.read_bytes()
    data = damaged(dice, whole)
    if dice.random() < 0.5:
        changed = bytearray(whole)
        at = dice.randrange(len(changed))
        changed[at : at + 1 + dice.randrange(512)] = bytes(len(changed[at : at + 1 + dice.randrange(512)]))
        data = bytes(changed)
    try:
        held = cache.unseal(data)
    except ValueError:
        assert data != whole
    else:
        assert held == _kept


FUZZERS = {f.__name__: f for f in (payload, words_in_store, environment, kept_kernel)}


def fuzz(name: str, runs: int, seed: int, seconds: float = 1e9) -> int:
    """Run a fuzzer; how many inputs it has had. An input that fails is named by its seed."""
    saved, end = dict(os.environ), time.monotonic() + seconds
    settings.log.disabled = True
    try:
        for run in range(runs):
            if run % 256 == 0 and time.monotonic() > end:
                return run
            try:
                FUZZERS[name](random.Random(f"{seed} {run}"))
            except Exception as err:
                raise AssertionError(f"{name}: input {run} of seed {seed}: {type(err).__name__}: {err}") from err
        return runs
    finally:
        settings.log.disabled = False
        os.environ.clear()
        os.environ.update(saved)


if __name__ == "__main__":
    begin = time.monotonic()
    done = fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    print(
        f"{sys.argv[1]}: {done} inputs, {done / (time.monotonic() - begin):.0f} a second, {time.process_time():.0f} s CPU"
    )
