"""The chaos transport follows its settings, and still delivers everything exactly once."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fabric.pair import PROVIDERS, pair, until
from tilescale_net import _native
from tilescale_net.errors import FabricError
from tilescale_net.runtime import fabric

LIBRARY, PROVIDER = next(p[1:] for p in PROVIDERS if "tcp" in p[2])


def chaotic(text: str, **options):
    return pair(LIBRARY, PROVIDER, chaos=text, **options)


def traffic(a, b, n=60, seed=0):
    """n writes with immediates and n messages from a to b; returns the immediates and messages as they arrived."""
    rng = random.Random(seed)
    a.store(rng.randbytes(a.bytes))
    sizes = [rng.randrange(1, 9000) for _ in range(n)]
    for i, size in enumerate(sizes):
        a.write(i * 10_000, size, cookie=i, imm=i)
        a.message(b"%d" % i, cookie=1000 + i)
    until(lambda: len(a.of("done")) >= 2 * n and len(b.of("immediate")) >= n and len(b.of("message")) >= n, a, b)
    time.sleep(0.002)
    a.poll(), b.poll()  # nothing comes twice
    assert sorted(e["cookie"] for e in a.of("done")) == [*range(n), *range(1000, 1000 + n)]
    for i, size in enumerate(sizes):
        assert b.load(i * 10_000, size) == a.load(i * 10_000, size)
    imms, texts = [e["imm"] for e in b.of("immediate")], [int(e["data"]) for e in b.of("message")]
    assert sorted(imms) == sorted(texts) == list(range(n))
    return imms, texts


@pytest.mark.parametrize("seed", range(12))
def test_everything_arrives_exactly_once(seed):
    a, b = chaotic(f"seed={seed},reorder=0.5,split=0.5,eagain=0.3,delay_us=300,depth=24", rails=1 + seed % 2)
    imms, texts = traffic(a, b, seed=seed)
    assert imms != sorted(imms) and texts != sorted(texts), "nothing was reordered"


def test_quiet_chaos_changes_nothing():
    a, b = chaotic("seed=5")
    imms, texts = traffic(a, b)
    assert imms == sorted(imms) and texts == sorted(texts)
    assert a.properties()["provider"] == f"chaos+{PROVIDER}" and not a.properties()["ordered_messages"]


def test_an_immediate_still_comes_after_all_its_pieces():
    a, b = chaotic("seed=3,split=1,reorder=0.7,delay_us=200")
    for turn in range(1, 120):
        a.store(bytes([turn]) * 5000)
        a.write(0, 5000, cookie=turn, imm=turn)
        until(lambda: b.of("immediate"), a, b)
        assert b.load(0, 5000) == bytes([turn]) * 5000
        until(lambda: a.of("done"), a, b)
        a.events.clear(), b.events.clear()


def test_pieces_of_a_split_write_arrive_apart():
    """Otherwise code that takes one piece for the whole would not be found."""
    a, b = chaotic("seed=4,split=1,reorder=1,delay_us=3000")
    partial = 0
    for turn in range(1, 40):
        a.store(bytes([turn]) * 4000)
        a.write(0, 4000, cookie=turn)
        while not a.of("done"):
            a.poll(), b.poll()
            partial += len(set(b.load(0, 4000))) > 1
        a.events.clear()
    assert partial > 0


def test_a_source_reused_too_early_is_found_out():
    a, b = chaotic("seed=2,reorder=1,delay_us=20000")
    a.store(b"\x01" * 64)
    a.write(0, 64, cookie=1)
    a.store(b"\x02" * 64)
    until(lambda: a.of("done"), a, b)
    assert b.load(0, 64) == b"\x02" * 64


def test_narrow_immediates():
    a, b = chaotic("seed=1,imm_bits=16,max_write=4096")
    assert a.properties()["imm_bits"] == 16 and a.properties()["max_write"] == 4096
    with pytest.raises(FabricError, match="immediate 65536 does not fit 16 bits"):
        a.transport.write(1, a.region, a.remote, 8, imm=65536)
    with pytest.raises(FabricError, match="4097 bytes exceed the largest transfer, 4096"):
        a.transport.write(1, a.region, a.remote, 4097)
    a.write(0, 8, imm=65535)
    until(lambda: b.of("immediate"), a, b)


def test_a_link_that_only_says_again():
    a, _ = chaotic("seed=1,eagain=1")
    assert not any(a.transport.write(1, a.region, a.remote, 8) or a.transport.message(1, b"x") for _ in range(1000))


def test_failures_on_purpose():
    a, b = chaotic("seed=1,error_after=3")
    for cookie in range(4):
        a.write(0, 8, cookie=cookie)
    end = time.monotonic() + 10
    while len(a.events) < 4 and time.monotonic() < end:
        a.poll(), b.poll()
    failed = {e["cookie"]: e["text"] for e in a.of("failed")}
    assert sorted(failed) == [2, 3] and "operation 3 to peer 1 fails on purpose" in failed[2]
    assert sorted(e["cookie"] for e in a.of("done")) == [0, 1]


def test_random_failures_are_all_reported():
    a, b = chaotic("seed=9,error=0.3")
    for cookie in range(200):
        a.write(0, 8, cookie=cookie)
    end = time.monotonic() + 10
    while len(a.events) < 200 and time.monotonic() < end:
        a.poll(), b.poll()
    assert sorted(e["cookie"] for e in a.events) == list(range(200))
    assert 20 < len(a.of("failed")) < 120


def test_a_refusal_of_the_network_becomes_a_failure():
    a, b = chaotic("seed=1")
    a.post("write", 1, a.region, a.remote, 8, a.bytes - 4, cookie=7)
    while not a.events:
        a.poll()
    assert a.events[0]["kind"] == "failed" and a.events[0]["cookie"] == 7 and "local bytes" in a.events[0]["text"]


def test_a_stalled_peer():
    a, b = chaotic("seed=1,stall_after=5,depth=16")
    taken = sum(bool(a.transport.write(1, a.region, a.remote, 8, cookie=i)) for i in range(4))
    until(lambda: len(a.of("done")) == taken, a, b)
    taken = sum(bool(a.transport.write(1, a.region, a.remote, 8, cookie=i)) for i in range(100))
    assert taken == 16
    before = len(a.events)
    for _ in range(200):
        a.poll(), b.poll()
    assert len(a.events) == before


def test_options_reach_it_from_the_environment(monkeypatch):
    monkeypatch.setenv("TSN_CHAOS", "imm_bits=9")
    assert _native.Transport(fabric.transport_options()).properties()["imm_bits"] == 9


@pytest.mark.parametrize(
    "text,words",
    [
        ("speed=1", "unknown field 'speed'.*known are seed, reorder"),
        ("reorder=2", "'reorder=2' is not a probability between 0 and 1"),
        ("reorder=", "'reorder=' is not a probability"),
        ("reorder=nan", "is not a probability"),
        ("seed=-1", "'seed=-1' is not a whole number"),
        ("seed=1x", "is not a whole number"),
        ("imm_bits=33", "imm_bits=33 is outside 8 to 32"),
        ("depth=99999999999999999999999", "is not a whole number"),
    ],
)
def test_bad_options_are_named(text, words):
    with pytest.raises(FabricError, match=words):
        _native.Transport(fabric.transport_options(chaos=text))


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="seduporlit_=,0.19-x", max_size=30))
def test_any_text_is_parsed_or_refused(text):
    try:
        _native.parse_chaos(text)
    except FabricError as err:
        assert "chaos" in str(err)
