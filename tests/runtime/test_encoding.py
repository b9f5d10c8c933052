"""What ranks send each other: what goes in comes out, and nothing else does any harm."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilescale_net.runtime import encoding

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
@settings(deadline=None)
def test_round_trip(value):
    assert encoding.decode(encoding.encode(value)) == value


@given(st.binary(max_size=200) | PLAIN.map(encoding.encode).map(lambda b: b[: len(b) // 2]))
@settings(deadline=None)
def test_garbage_is_a_value_or_a_value_error(data):
    try:
        encoding.encode(encoding.decode(data))
    except ValueError:
        pass


def test_edges():
    assert encoding.decode(encoding.encode((1, (b"\0\xff", "a")))) == [1, [b"\0\xff", "a"]]
    for deep in (b"[" * 100_000, b'{"a":' * 100_000, b'{"\\u0000bytes": 5}', b'{"\\u0000bytes": "%"}', b"9" * 10_000):
        with pytest.raises(ValueError):
            encoding.decode(deep)
    for wrong in (object(), {1: 2}, {"\0bytes": 1}, [set()]):
        with pytest.raises(TypeError):
            encoding.encode(wrong)
