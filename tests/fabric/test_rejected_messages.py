"""A process that has addresses but neither a token nor a key: its messages are dropped and counted, and do no harm."""

import struct

import pytest

from tests.fabric.pair import IDS, PROVIDERS, End, pair, until

NETWORKS = [(i, p) for i, p in zip(IDS, PROVIDERS) if p[2] != "shm"]  # its two ends need two processes
every_network = pytest.mark.parametrize("library,provider", [p[1:] for _, p in NETWORKS], ids=[i for i, _ in NETWORKS])


def words(blob: bytes, at: int) -> int:
    return struct.unpack_from("Q", blob, at)[0]


def without_token(address: bytes) -> bytes:
    """The address with another token: all that a foreign process can read from /proc/net/tcp, and a guess."""
    assert len(address) > 16
    token = words(address, len(address) - 8)
    return address[:-8] + struct.pack("Q", token ^ 0x1234)


@every_network
def test_foreign_messages(library, provider):
    a, b = pair(library, provider)
    foreign = End(1, library=library, provider=provider)  # claims to be rank 1
    foreign.twin = a
    foreign.transport.connect(0, without_token(a.address()[0]))
    for i in range(5):
        foreign.post("message", 0, b"I am rank 1" * (1 + i), cookie=i)
    until(lambda: a.transport.rejected_messages() == 5, a, foreign)
    b.message(b"and I am, too", cookie=1)
    until(lambda: a.of("message"), a, b, foreign)
    assert [e["data"] for e in a.of("message")] == [b"and I am, too"]
    assert b.transport.rejected_messages() == 0


@every_network
def test_keys_cannot_be_guessed(library, provider):
    a, b = pair(library, provider)
    key = a.address()[1]
    base, rkey = words(key, 24), words(key, 32)
    others = words(b.address()[1], 32)
    assert len(key) == 40 and rkey > 1 << 32 and others != rkey, "a key that counts from one can be guessed"
    a.store(b"secret weights")
    foreign = End(1, library=library, provider=provider)
    foreign.twin = a
    foreign.transport.connect(0, without_token(a.address()[0]))
    for guess in (1, 2, rkey ^ 1):
        remote = foreign.transport.add_remote(0, key[:24] + struct.pack("QQ", base, guess))
        for call in ("read", "write"):
            foreign.events.clear()
            foreign.post(call, 0, foreign.region, remote, 14, 0, 0, cookie=guess % 1000)
            for _ in range(3000):
                foreign.poll(), a.poll()
                if foreign.events:
                    break
            assert not foreign.of("done"), (call, guess)
            assert foreign.load(0, 14) == bytes(14) and a.load(0, 14) == b"secret weights"
            if foreign.events:  # the provider may have closed the connection
                break
