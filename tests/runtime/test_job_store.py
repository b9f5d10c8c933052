"""Messages between ranks: they arrive unchanged, and malformed ones do no harm."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilescale_net.errors import PeerLost
from tilescale_net.runtime import control, job_store, liveness, world
from tilescale_net.trace import reporter

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
@settings(deadline=None)
def test_round_trip(value):
    assert job_store.decode(job_store.encode(value)) == value


@given(st.binary(max_size=200) | PLAIN.map(job_store.encode).map(lambda b: b[: len(b) // 2]))
@settings(deadline=None)
def test_garbage_is_a_value_or_a_value_error(data):
    try:
        job_store.encode(job_store.decode(data))
    except ValueError:
        pass


def test_edges():
    assert job_store.decode(job_store.encode((1, (b"\0\xff", "a")))) == [1, [b"\0\xff", "a"]]
    for deep in (b"[" * 100_000, b'{"a":' * 100_000, b'{"\\u0000bytes": 5}', b'{"\\u0000bytes": "%"}', b"9" * 10_000):
        with pytest.raises(ValueError):
            job_store.decode(deep)
    for wrong in (object(), {1: 2}, {"\0bytes": 1}, [set()]):
        with pytest.raises(TypeError):
            job_store.encode(wrong)


class Said:
    """A control whose ranks all say the same."""

    def __init__(self, text):
        self.gather = lambda name, value: [text]


@pytest.mark.parametrize("said", ["[" * 100_000, '{"a":' * 100_000, "[1e999, 1e999, [1e999]]", "[[1e999, 1]]"])
def test_words_in_the_store_cannot_end_who_reads_them(said):
    assert control.last_call(said)[0] == 0 and control.failed_rank(said) is None
    assert "cannot be read" in control.announced(said, 0)
    assert liveness._stopped_in(said) == [] and reporter._read(said) == (0, None)
    with pytest.raises(PeerLost, match="cannot be read"):
        world._parse_members(said, [0, 1])
    with pytest.raises(PeerLost, match="cannot be read"):
        world.live_everywhere(Said(said), {})


def test_a_value_of_another_kind_is_named_however_deep_it_is():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="instead of 2 values"):
        job_store.check_alike([1, 2], deep)
