"""The words in which a record of the device reaches the user."""

import pytest

from tilescale_net import errors
from tilescale_net.runtime import context
from tilescale_net.runtime.context import COMPARISONS, OPERATIONS, ErrorKind, ErrorRecord

BASE = 1 << 40


def said(kind: str, operation: str, name_of=None, **fields) -> errors.TileScaleError:
    numbers = {
        name: value % (1 << 64) if name in ("expected", "observed", "bytes") else value
        for name, value in fields.items()
    }
    kind = ErrorKind[kind.upper().replace(" ", "_")]
    record = ErrorRecord(kind=kind, operation=OPERATIONS.index(operation), **numbers)
    return context.describe_error(record, 2, 4, BASE, 4.0, name_of)


@pytest.mark.parametrize("compare", COMPARISONS)
def test_a_wait_names_its_comparison(compare):
    comparison = 1 + COMPARISONS.index(compare)
    error = said("wait timeout", "wait", comparison=comparison, address=BASE + 512, expected=-3, observed=-9)
    assert isinstance(error, errors.WaitTimeout)
    assert f"waited 4 s for {compare} -3 on the signal at heap offset 512; last seen -9; check that the peer" in str(
        error
    )


def test_a_wait_names_its_tensor():
    error = said("wait timeout", "wait", lambda at: f"word of {at}", comparison=3, address=BASE + 512, expected=1)
    assert "on the signal word of 512 (heap offset 512); last seen 0" in str(error)


def test_a_wait_for_eq_that_came_too_late():
    text = str(said("wait timeout", "wait", comparison=1, address=BASE + 512, expected=1, observed=4))
    assert "for eq 1" in text and "last seen 4; the word went past that value" in text and "wait with ge" in text


def test_a_barrier_is_no_signal_of_a_peer():
    text = str(said("wait timeout", "barrier", comparison=3, pe=1, address=BASE + 8, expected=2, observed=1))
    assert "for PE 1 at barrier 2; it has come to barrier 1" in text
    assert "several blocks of a PE" in text and "sends this signal" not in text


def test_grid_barriers():
    text = str(said("wait timeout", "barrier_grid", expected=8, observed=3))
    assert "waited 4 s for all blocks of the launch; 3 of 8 have come; all blocks of the launch must call it" in text
    text = str(said("barriers overlap", "barrier"))
    assert "barrier in block 0 met another one in flight; one block of a PE at a time" in text


def test_a_tile_for_another_node():
    assert "failed: not direct; a source in shared memory" in str(said("not direct", "put_signal", pe=1))
    assert "N.is_direct(pe)" in str(said("not direct", "remote", pe=1))


def test_a_negative_count():
    text = str(said("not symmetric", "put", pe=1, address=BASE + 4096, bytes=-20))
    assert "put in block 0 towards PE 1: a size of -20 bytes; a count that is computed at run time was negative" in text


def test_an_address_elsewhere():
    text = str(said("not symmetric", "put", pe=1, address=BASE - 16, bytes=8))
    assert f"8 bytes at address {BASE - 16:#x} are not in the symmetric heap; pass tensors made with" in text
