"""Structured fuzzers of what Python reads from outside of the process: values of other ranks, words in the store,
environment variables, kept kernels. What comes out is a value or the error that is documented; nothing else.

usage: python -m tests.runtime.fuzzers NAME RUNS [SEED]     prints what each input took of the processor
"""

import ctypes
import functools
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from tilescale_net.compiler.simulator import cache
from tilescale_net.compiler.simulator.cache import CachedKernel, Lowered
from tilescale_net.compiler.simulator.host_source import HostSource
from tilescale_net.errors import ConfigurationError, PeerLost, TileScaleError
from tilescale_net.runtime import control, cuda_memory, job_store, liveness, placement, settings, tuned, world
from tilescale_net.runtime.job_store import SignedStore
from tilescale_net.trace import events, reporter, timeline

NUMBERS = (0, 1, -1, 2, 3, 255, 65535, 65536, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0,
           1e308)  # fmt: skip
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
                    + dice.choice((b'"', b"[", b"{", b"}", b",", b":", b"\\u", b"9" * 20, b"null", b"[" * 2000))
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
    """Another rank's damaged part of `gather`, compared with this rank's own."""
    mine = dice.choice((["host/boot", 77], [3, b"\0" * 16, "gpu"], [12, 5], b"blob", "text"))
    try:
        job_store.check_alike(mine, job_store.decode(as_json(dice)))
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

    def compare_set(self, key, expected, desired):
        return self.dice.choice([b"", b"-1", b"9" * 99, b"7 x", as_json(self.dice), str(desired).encode()])


def words_in_store(dice: random.Random) -> None:
    """Failures, last calls and heartbeats of other ranks."""
    said = as_json(dice).decode(errors="replace")
    calls, call = control.last_call(said)
    assert isinstance(calls, int) and isinstance(call, str)
    assert control.failed_rank(said) is None or control.announced(said, 0) != ""
    reporter._read(said)
    everybody = SimpleNamespace(gather=lambda name, value: [said])
    for read in (lambda: world._parse_members(said, [0, 1, 2]), lambda: world.live_everywhere(everybody, {})):
        try:
            assert read() is not None
        except PeerLost:
            pass
    store = SignedStore(Store(dice), "tsn", dice.choice([None, b"secret"]))
    news = liveness.Heartbeats(0, ["a", "a", "b"], 1.0).round(store)
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


# Variables of launchers that only name ranks and places; others make this process meet real ones.
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
            "LOCAL_WORLD_SIZE")  # fmt: skip
_NAMES = [n for n in settings.ALL if n != "CUDA_MODULE_LOADING"] + [*LAUNCHER] * 3
_clean = {k: v for k, v in os.environ.items() if k not in (*settings.ALL, *LAUNCHER) and not k.startswith("TSN_")}


def environment(dice: random.Random) -> None:
    """Variables of this package and of launchers."""
    for name in [name for name in os.environ if name not in _clean]:
        del os.environ[name]
    os.environ.update({dice.choice(_NAMES): _texts(dice) for _ in range(1 + dice.randrange(4))})
    for read in (
        settings.check,
        *(settings.ALL[name].get for name in os.environ if name in settings.ALL),
        settings.load_kernels_early,
        lambda: placement.launched_rank(0.0),
        lambda: settings.heap_bytes(None, False),
    ):
        try:
            read()
        except ConfigurationError as err:
            assert str(err)


@functools.cache
def _sealed() -> bytes:
    with tempfile.TemporaryDirectory(prefix="tilescale_net-fuzz-") as folder:
        path = Path(folder) / "kept.so"
        path.write_bytes(b"\x7fELF" + bytes(range(256)) * 4)
        cache.seal(path)
        return path.read_bytes()


_CODE = Lowered("__global__ void k() {}", HostSource("void k() {}", {"k": ()}, frozenset()), "stub", 2)
_KEPT = CachedKernel("k", None, ("x", "y"), 0, ("file.py:1",), _CODE).text().encode()


def kept_kernel(dice: random.Random) -> None:
    """A file of the cache of kernels: taken as it was made, or not at all; text in it is a kernel or an error."""
    if dice.random() < 0.3:
        try:
            CachedKernel.parse(damaged(dice, _KEPT).decode(errors="replace"))
        except (ValueError, KeyError, TypeError):
            pass
        return
    whole = _sealed()
    data = damaged(dice, whole)
    if dice.random() < 0.5:
        at = dice.randrange(len(whole))
        data = whole[:at] + bytes(len(whole[at : at + 1 + dice.randrange(512)]))
        data += whole[len(data) :]
    try:
        entry = cache.unseal(data)
    except ValueError:
        assert data != whole
    else:
        assert data == whole and entry == whole[: len(entry)]


_PLACE: dict[str, object] = {"gpu": "a", "ranks": 2, "nodes": 1, "package": "1"}
_TUNED = {"schema": tuned.SCHEMA, "place": _PLACE, "choices": {"matmul 1": {"choice": {"blocks": 4}, "us": 1.5}}}


def tuned_file(dice: random.Random) -> None:
    """A file of what was tuned: choices by name, or an error."""
    data = dict(_TUNED)
    if dice.random() < 0.7:
        data["choices"] = {"a": value(dice), "b": {"choice": value(dice), "us": value(dice)}}
    text = damaged(dice, json.dumps(data).encode()).decode(errors="replace")
    try:
        found = tuned._parsed(text, _PLACE)
    except ValueError:
        return
    assert all(isinstance(entry["choice"], dict) for entry in found.values())


@functools.cache
def _ring() -> bytes:
    """A ring in a file, as a process leaves it: more events than it holds, of every kind."""
    with tempfile.TemporaryDirectory(prefix="tilescale_net-fuzz-") as folder:
        made = events.Ring(f"{folder}/ring", 0, 2, 16)
        for n in range(20):
            name = made.name(f"name {n % 5}")
            kind = 1 + n % len(events.Kind)
            made.add(events.Event(n, n + 2, name, kind, n % 7, n % 2, n % 3, n % 4, n, 65536 + 8 * n, n, 100 * n))
        made.close()
        return Path(f"{folder}/ring").read_bytes()


_NAMES_END = ctypes.sizeof(events.Header) + (1 << 18)  # of the file of `_ring`, where its events begin


def trace(dice: random.Random) -> None:
    """Rings in files and as other hosts pack them: parts that make a timeline, or an error."""
    raw = bytearray(_ring())
    for _ in range(dice.randrange(4)):  # fields of the header, lengths of names, fields of events
        at = dice.choice((0, ctypes.sizeof(events.Header), _NAMES_END)) + 4 * dice.randrange(64)
        word = dice.choice((0, 1, 2, 255, 0x7FFFFFFF, 0xFFFFFFFF, dice.randrange(1 << 32), dice.randrange(16)))
        raw[at : at + 4] = word.to_bytes(4, "little")
    data = bytes(raw) if dice.random() < 0.7 else damaged(dice, bytes(raw))
    source = dice.choice(("host", "kernels", "proxy0", "proxy", "proxy-1", "proxy²", "", "x", "proxy99999999999"))
    try:
        if dice.random() < 0.3:
            data = events.unpacked(damaged(dice, events.packed(data)), "a trace")
        part = events.read_part(data, "a trace", source)
    except ValueError as err:
        assert str(err).startswith("a trace ")
        return
    json.dumps(timeline.merged([part, events.read_part(_ring(), "a trace", "host")]))


@functools.cache
def _offers() -> cuda_memory.Offers:
    offers = cuda_memory.Offers()
    for _ in range(2):
        offers.add(os.open("/dev/null", os.O_RDONLY))
    return offers


def offered_memory(dice: random.Random) -> None:
    """Both ends of requests for memory over the Unix socket: a descriptor that was requested, or none."""
    offers, before = _offers(), len(os.listdir("/proc/self/fd"))
    asked = damaged(dice, dice.randrange(4).to_bytes(4, "little"))
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(10)
        asker.connect(offers.name)
        asker.sendall(asked)
        asker.shutdown(socket.SHUT_WR)
        try:
            _, fds, _, _ = socket.recv_fds(asker, 1, 4)
        except ConnectionResetError:  # it was sent more than it has read
            fds = []
    assert len(fds) <= (len(asked) >= 4 and int.from_bytes(asked[:4], "little") < 2)
    with socket.socket(socket.AF_UNIX) as listener:  # one that answers in another way
        listener.bind("")
        listener.listen(1)
        descriptors = [offers._fds[0]] * dice.randrange(3)
        answer = threading.Thread(target=_answer, args=(listener, bytes(dice.randrange(3)), descriptors))
        answer.start()
        try:
            fds.append(cuda_memory.take_descriptor(listener.getsockname(), os.getpid(), 0))
            assert descriptors
        except TileScaleError:
            pass
        answer.join()
    for fd in fds:
        os.close(fd)
    os.close(cuda_memory.take_descriptor(offers.name, os.getpid(), dice.randrange(2)))
    # No file stays open but those that the other thread is about to close.
    assert len(os.listdir("/proc/self/fd")) <= before + 2 and offers._thread.is_alive()


def _answer(listener: socket.socket, text: bytes, fds: list[int]) -> None:
    asker, _ = listener.accept()
    with asker:
        asker.recv(4)
        if text:
            socket.send_fds(asker, [text], fds)


FUZZERS = {
    f.__name__: f for f in (payload, words_in_store, environment, kept_kernel, tuned_file, trace, offered_memory)
}


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
    begin = time.process_time()
    done = fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    spent = time.process_time() - begin
    print(f"{sys.argv[1]}: {done} inputs, {spent:.0f} s of the processor, {done / spent:.0f} in one")
