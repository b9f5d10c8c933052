"""The line about a step that takes long."""

import time

import pytest

from tilescale_net.runtime import progress


@pytest.mark.parametrize("rank, seconds, lines", [("0", 1.0, ["compiling"]), ("0", 0.0, []), ("1", 1.0, [])])
def test_one_line_of_the_first_rank_when_it_takes_long(monkeypatch, caplog, rank, seconds, lines):
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(progress, "SILENCE_S", 0.3)
    with progress.step("compiling"):
        time.sleep(seconds)
    assert [r.getMessage() for r in caplog.records if r.name == "tilescale_net"] == lines
