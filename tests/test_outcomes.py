"""What is written of tests, and what a second run leaves out."""

from types import SimpleNamespace

from tests.outcomes import Outcomes, read


def _report(test, when, outcome="passed", said=""):
    return SimpleNamespace(nodeid=test, when=when, outcome=outcome, duration=1, capstdout=said, longreprtext=outcome)


def test_a_run_that_was_cut_short_goes_on(tmp_path):
    path = tmp_path / "outcomes"
    first = Outcomes(path)
    for report in [
        *(_report("right", when, said="| row |\n") for when in ("setup", "call", "teardown")),
        *(
            _report("wrong", when, "failed" if when == "teardown" else "passed")
            for when in ("setup", "call", "teardown")
        ),
        *(_report("nowhere", when, "skipped" if when == "setup" else "passed") for when in ("setup", "teardown")),
        _report("died", "???", "failed"),
        _report("under way", "setup"),
    ]:
        first.pytest_runtest_logreport(report)
    path.write_text(path.read_text() + '{"test": "cut off", "outc')
    found = read(path)
    assert {test: o["outcome"] for test, o in found.items()} == {
        "right": "passed", "wrong": "failed", "nowhere": "skipped", "died": "failed",
    }  # fmt: skip
    assert found["right"]["said"] == "| row |\n" and found["right"]["seconds"] == 3

    gone, config = [], SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)))
    items = [SimpleNamespace(nodeid=test) for test in (*found, "under way")]
    second = Outcomes(path)
    second.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in gone] == ["right"] and len(items) == 4
    second.pytest_runtest_logreport(_report("under way", "teardown"))
    assert read(path)["under way"]["outcome"] == "passed"
