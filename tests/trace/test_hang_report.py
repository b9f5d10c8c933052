"""The report of a hang names where each rank waits, for what, and which rank should have sent it."""

import contextlib
import os
import re
import signal
import tempfile
import time

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tilescale_net.trace import reporter

TIMEOUT = 2.0
QUICK = {"TSN_TIMEOUT": str(TIMEOUT), "VIRTUAL_NODES": "2", "TSN_DEVICE": "simulator"}


def line_of(mark: str) -> str:
    with open(__file__) as f:
        number = next(i for i, line in enumerate(f, 1) if line.rstrip().endswith(f"# {mark}"))
    return f"test_hang_report.py:{number}"


@tsn.jit
def exchange(threads=64):
    @T.prim_func
    def main(ctx: N.Context(), flags: T.Tensor((4,), "uint64"), word: T.int32, value: T.int64):
        with T.Kernel(2, threads=threads) as block:
            tx = T.get_thread_binding()
            if block == 1:
                if tx == 0:
                    N.signal(flags[word], T.Cast("uint64", value), (N.my_pe() + 1) % N.n_pes())  # the signal
            else:
                N.wait_block(flags[2], "ge", value)  # the wait

    return main


def caught(body):
    """(what `body` raised, seconds, what was written to stderr)"""
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        begin = time.monotonic()
        try:
            body()
            error = None
        except tsn.TileScaleError as err:
            error = f"{type(err).__name__}: {err}"
        seconds = time.monotonic() - begin
        os.dup2(saved, 2)
        file.seek(0)
        return error, seconds, file.read().decode()


def hang(rounds):
    """Rank 1 sends the wrong word in the last of `rounds` rounds, ends its kernel and waits in a barrier."""
    tsn.init("4M")
    flags = tsn.zeros(4, torch.uint64)
    kernel = exchange()

    def body():
        for i in range(1, rounds + 1):
            kernel(flags, 3 if i == rounds and tsn.rank() == 1 else 2, i)
            begun.append(time.monotonic())
        tsn.barrier()

    # What a launch takes on this machine before its wait begins; with another tensor, whose signals do not count.
    others, usual = tsn.zeros(4, torch.uint64), 0.0
    for i in range(1, 4):
        begun = [time.monotonic()]
        kernel(others, 2, i)
        usual = max(usual, time.monotonic() - begun[0])
    tsn.barrier()
    begun = [time.monotonic()]
    error, _, said = caught(body)
    seconds = time.monotonic() - begun[-1] - usual
    with contextlib.suppress(tsn.TileScaleError):
        tsn.finalize()
    return error, seconds, said


@pytest.mark.parametrize("rounds", [1, 3])
def test_names_line_signal_and_sender(rounds):
    waiting, other = ranks.launch(2, hang, rounds, env=QUICK, init=False, timeout=100)
    assert other.value[0].startswith("PeerLost") and "who" not in other.value[2]
    error, seconds, said = waiting.value
    assert error.startswith("WaitTimeout") and line_of("the wait") in error
    assert seconds < TIMEOUT + 1.0
    row = re.search(
        r"^0 +0 +0 +(\S+) +wait +\[2\] of zeros\(\[4\], torch.uint64\) at \d+ +(\d+) +ge (\d+) +([\d.]+) s +(.+)$",
        said,
        re.M,
    )
    assert row, said
    assert row[1] == line_of("the wait") and (row[2], row[3], row[5]) == (str(rounds - 1), str(rounds), "rank 1")
    assert abs(float(row[4]) - TIMEOUT) < 1
    assert "rank 1: in tilescale_net.barrier for" in said and "in body)" in said
    if rounds == 1:
        assert "rank 1 sends this word" in said or "rank 1 has not sent it" in said
    else:
        assert "rank 1 has sent it 2 times, the last time 2" in said and line_of("the signal") in said


def asked():
    """Rank 0 waits in a kernel, and SIGUSR1 comes before the deadline."""
    flags = tsn.zeros(4, torch.uint64)
    kernel = exchange()

    def body():
        if tsn.rank() == 1:
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(2)
        kernel(flags, 2, 1)
        tsn.barrier()

    return caught(body)


def test_sigusr1_asks_all_ranks():
    first, second = ranks.run(2, asked, env=QUICK | {"TSN_TIMEOUT": "60"})
    assert first[0] is None and second[0] is None and first[2] == ""
    said = second[2]
    assert said.startswith("tilescale_net: asked by SIGUSR1")
    assert re.search(rf"^0 +0 +0 +{line_of('the wait')} .* ge 1 .* rank 1$", said, re.M), said
    assert "rank 0: runs kernel exchange for" in said and "1 thread waiting" in said
    assert "rank 1: in the program, neither" in said and "in body)" in said


# -- who should have sent it ----------------------------------------------------------------------------------------------


def of(sent, rank=0, size=4, pe=-1, operation="wait"):
    states = {r: {"sent": sent.get(r, [])} for r in range(size)}
    return reporter.sender_of(rank, {"pe": pe, "offset": 512, "operation": operation}, states, size)[0]


def test_senders():
    def entry(pe, offset=512, ago=1.0):
        return [pe, offset, 3, 7, ago, "a.py:1"]

    assert of({2: [entry(0)]}) == 2
    assert of({2: [entry(0, ago=5.0)], 3: [entry(0)]}) == 3  # the latest
    assert of({2: [entry(1), entry(3)]}) == 2  # whose word it is everywhere
    assert of({0: [entry(1)], 1: [entry(2)], 2: [entry(3)]}) == 3  # a ring
    assert of({0: [entry(1)], 2: [entry(1)]}) is None
    assert of({2: [entry(0, offset=520)]}) is None
    assert of({}) is None and of({}, size=2) == 1
    assert of({}, pe=3, operation="barrier") == 3


def test_a_report_of_many_threads_is_short():
    wait = dict(block=1, thread=0, line="a.py:3", operation="wait", pe=-1, offset=512, name=None)
    wait |= dict(compare="ge", wants=1, has=0, seconds=2.0)
    state = dict(rank=0, host=None, place="", kernel=["main", 2.0], waits=5000, waiting=[wait] * 64, sent=[])
    text = reporter.text("why", {0: state}, 3, {1: "ended"})
    assert len(text.splitlines()) < 40 and f"and {5000 - reporter.MAX_ROWS} more threads" in text
    assert "rank 1: ended" in text and "rank 2: does not answer" in text and "heap offset 512" in text
