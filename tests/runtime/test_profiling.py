"""A step that takes long: the line about it, and what other ranks that wait for it say."""

import time

import pytest

import tilescale_net as tsn
from tests import ranks
from tilescale_net.runtime import profiling


@pytest.mark.parametrize("rank, seconds, lines", [("0", 1.0, ["compiling …"]), ("0", 0.0, []), ("1", 1.0, [])])
def test_one_line_of_the_first_rank_when_it_takes_long(monkeypatch, caplog, rank, seconds, lines):
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(profiling, "SILENCE_S", 0.3)
    with profiling.long_step("compiling", " …"):
        assert profiling.current_step() == "compiling" and profiling.current_step(30.0) == ""
        time.sleep(seconds)
    assert [r.getMessage() for r in caplog.records if r.name == "tilescale_net"] == lines
    assert profiling.current_step() == ""


def _compiles_for_long() -> list[str]:
    tsn.init("4M")
    if tsn.rank() == 0:
        with profiling.long_step("compiling kernel slow"):
            while tsn.world().failure is None:
                time.sleep(0.1)
    said = []
    for call in (lambda: tsn.zeros(4), tsn.barrier):
        begin = time.monotonic()
        with pytest.raises(tsn.PeerLost) as error:
            call()
        said.append(str(error.value))
    assert time.monotonic() - begin < 3.0
    while not tsn.world().control.store.ask(lambda s: s.check(["failed"])):  # before this process ends without a word
        time.sleep(0.05)
    return said


def test_timeouts_name_the_activity_of_the_other_rank():
    (late, *others) = ranks.launch(3, _compiles_for_long, init=False, env={"TSN_TIMEOUT": "1"}, timeout=60)
    words = "did not finish (gave up after "
    for o in (late, *others):
        assert o.ok, o.error
        first, second = o.value
        assert first == second and words in first, first
        assert "not arrived: rank 0 (compiling kernel slow; last call: " in first and "rank 1 (" not in first, first
    assert "rank 1 failed: " in late.value[0] or "rank 2 failed: " in late.value[0]
