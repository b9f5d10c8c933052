"""All ranks in one process: every schedule, random ones, and one again."""

import random
import re
import time

import pytest

import tilescale_net as tsn
from tests.simulator import small_calls, small_jobs
from tests.simulator.small_programs import (
    ADD,
    ATOMIC,
    FENCE,
    LOAD,
    PUT,
    QUIET,
    SET,
    TEST,
    WAIT,
    WAIT_EXACTLY,
    job,
    random_programs,
)
from tilescale_net import cli
from tilescale_net.errors import ConfigurationError
from tilescale_net.explore import search
from tilescale_net.explore.case import Case, load

HEAP = 2 << 20


def _every(function, ranks=2, races=True, **limits):
    with Case(function, ranks, HEAP, races) as case:
        return search.every(case, **limits)


def _message(*order):
    """Data to the other rank, the operations of `order`, then its signal; each rank returns the data that it received."""
    steps = [
        [(PUT, 0, 1 - r, 5), *((operation, 0, 1 - r, 0) for operation in order), (SET, 0, 1 - r, 1)] for r in range(2)
    ]
    programs = [mine + [(WAIT, 0, 0, 1), (LOAD, 0, 0, 0)] for mine in steps]
    last = len(programs[0]) - 1
    return job(programs, right=lambda out: out[0, last] == 5)


def test_a_right_message_is_right_in_every_schedule():
    for order in ((FENCE,), (QUIET,)):
        report = _every(_message(*order))
        assert (report.complete, report.failure, report.states) == (True, "", 1), report


@pytest.mark.parametrize(
    "races, kind", [(True, "N.fence(1) is missing"), (False, "the check of program returned False")]
)
def test_a_missing_fence_is_found(races, kind):
    report = _every(_message(), races=races)
    assert kind in report.failure and report.schedule and report.preemptions == 0, report


@pytest.mark.parametrize("ranks, schedules", [(2, 6), (3, 90)])
def test_orders_of_atomic_operations_are_counted(ranks, schedules):
    """Each of two operations of every rank sees another number: as many as there are orders."""
    report = _every(job([[(ATOMIC, 0, 0, 1)] * 2] * ranks), ranks)
    assert (report.schedules, report.states, report.complete) == (schedules, schedules, True), report


def test_additions_by_signals_need_no_orders():
    programs = [[(WAIT, 0, 0, 6), (LOAD, 0, 0, 0)], [(ADD, 0, 0, 1)] * 3, [(ADD, 0, 0, 1)] * 3]
    report = _every(job(programs), 3)
    assert (report.schedules, report.failure) == (1, ""), report


def test_a_wait_that_another_signal_may_end_is_tried_with_both():
    """One word for two senders: in some schedule the other one's data are not there yet."""
    senders = [[(PUT, r - 1, 0, 5), (FENCE, 0, 0, 0), (ADD, 0, 0, 1)] for r in (1, 2)]
    for index in (0, 1):
        programs = [[(WAIT, 0, 0, 1), (LOAD, index, 0, 0)], *senders]
        report = _every(job(programs, right=lambda out: out[0, 1] in (0, 5)), 3, races=False)
        assert (report.failure, report.complete) == ("", True)
        report = _every(job(programs), 3)
        assert "nothing orders the two" in report.failure, report


@pytest.mark.parametrize(
    "programs",
    [
        [[(WAIT, 0, 0, 1), (SET, 0, 1, 1)], [(WAIT, 0, 0, 1), (SET, 0, 0, 1)]],
        [[(WAIT_EXACTLY, 0, 0, 1)], [(SET, 0, 0, 1), (SET, 0, 0, 2)]],
    ],
    ids=["both wait first", "a value that goes by"],
)
def test_deadlocks_are_found(programs):
    report = _every(job(programs), races=False)
    assert report.failure.startswith(
        "deadlock: no thread can go on: rank 0 block 0 thread 0 in N.wait (small_programs.py:"
    )
    assert not report.complete


def test_a_deadlock_names_the_line_of_a_loop_or_an_mbarrier():
    for wrong, name in ((small_jobs.poll_for_nothing, "N.ld"), (small_jobs.wrong_parity, "T.barrier_wait")):
        report = _every(wrong)
        assert re.search(rf"rank 0 block 0 thread \d+ in {name} \(small_jobs.py:\d+\)", report.failure), report


def test_polls_of_an_unchanged_word_wait_for_other_threads():
    """The third test of an unchanged word comes when it has changed, or when no other thread can go on."""
    polls = [(TEST, 0, 0, 1)] * 4
    report = _every(job([polls, [(SET, 0, 0, 1)]]))
    assert (report.complete, report.states) == (False, 3), report
    assert report.not_followed[0].startswith("a loop that ends after a number of polls"), report
    report = _every(job([polls, []]))
    assert (report.complete, report.states) == (False, 1), report  # nobody looks whether others could have run


@pytest.mark.parametrize("races", [True, False])
def test_loops_of_loads_are_explored(races):
    """N.ld with and without an order, a counter that all add to, a sequence lock."""
    for right in (small_jobs.loads, small_jobs.loads_relaxed, small_jobs.counter, small_jobs.seqlock):
        report = _every(right, races=races)
        assert (report.failure, report.complete) == ("", True), (right.__name__, report)
    for wrong in (small_jobs.counter_wrong_number, small_jobs.seqlock_without_a_second_look):
        assert _every(wrong, races=races).failure, wrong.__name__


def test_accesses_that_a_gpu_may_reorder_are_named():
    assert _every(small_jobs.packed).complete
    for program, line in (
        (small_jobs.packed_relaxed_store, 'N.st(N.remote(flag, right)[0], T.uint64(1), sem="relaxed" if'),
        (small_jobs.packed_relaxed_loads, 'out[0] = T.cast(N.ld(flag[1]), "float32")'),
    ):
        report = _every(program)
        assert not report.failure and not report.complete, report
        places = [text.rpartition(" ")[2] for text in report.not_followed]
        assert places == [f"(small_jobs.py:{_line_of(line)})"], report


def test_loads_that_a_gpu_may_carry_out_before_a_store_are_named():
    """N.fence does not order them. Polls repeat until the value is new, and a thread sees what it has acquired."""
    for right in (small_jobs.dekker, small_jobs.peterson, small_jobs.replies, small_jobs.loads, small_jobs.counter):
        report = _every(right)
        assert (report.failure, report.complete) == ("", True), (right.__name__, report)
    dekker, peterson = "out[0] = T.cast(N.ld(flag[0]", "while N.ld(words[other]"
    bare = {small_jobs.dekker_bare: dekker, small_jobs.dekker_fence: dekker, small_jobs.peterson_bare: peterson}
    for wrong, line in bare.items():
        report = _every(wrong)
        assert not report.failure and not report.complete, report
        words = "before the thread's own earlier store", f"small_jobs.py:{_line_of(line)})"
        assert any(all(word in text for word in words) for text in report.not_followed), (line, report)


def test_the_limit_of_time_bounds_one_schedule_too():
    began = time.monotonic()
    report = _every(small_jobs.does_not_end, seconds=1)
    assert (report.failure, report.complete, report.schedules) == ("", False, 0), report
    report = _every(small_jobs.spins, seconds=1, races=False)
    assert not report.complete and (not report.failure or "never sees what others write" in report.failure), report
    with Case(small_jobs.does_not_end, 2, HEAP) as case:
        report = search.random(case, 1 << 30, seconds=1)
        assert (report.failure, report.complete, report.schedules) == ("", False, 0), report
        assert not search.repeat(case, "0", seconds=1).failure
    assert time.monotonic() - began < 150  # 100,000 decisions alone take minutes


def test_untracked_accesses_without_the_race_detector_are_named():
    report, line = _every(small_jobs.ring, races=False), _line_of("N.put_signal_block(y, x, (N.my_pe()")
    said = f"writes to the source of a put in flight (small_jobs.py:{line})"
    assert not report.complete and report.not_followed == [said], report
    assert "not followed: writes to the source" in search.text(report, "here", 2)


def test_functions_that_are_given_pointers_are_named():
    place = f"(small_jobs.py:{_line_of('T.address_of(y[0])')})"
    for races in (True, False):
        report = _every(small_jobs.extern, races=races)
        assert not report.failure and not report.complete, report
        assert report.not_followed == [f"accesses of a function that takes a pointer, such as T.call_extern {place}"]


def _line_of(text):
    with open(small_jobs.__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def test_a_schedule_can_be_repeated(tmp_path):
    report = _every(_message(), races=False)
    with Case(_message(), 2, HEAP, False) as case:
        again = search.repeat(case, report.schedule)
        assert (again.failure, again.schedule, again.steps) == (report.failure, report.schedule, report.steps)
        file = tmp_path / "schedule"
        file.write_text(report.schedule + "\n")
        assert search.repeat(case, str(file)).failure == report.failure
        for wrong, said in (("0.9", "decision 1"), ("x", "no schedule"), ("0x", "no schedule")):
            with pytest.raises(ConfigurationError, match=said):
                search.repeat(case, wrong)
    assert any("has arrived at PE" in step and "small_programs.py:" in step for step in report.steps), report.steps


def test_seeds_repeat_the_whole_job():
    found = []
    for _ in range(2):
        with Case(_message(), 2, HEAP, False) as case:
            found.append(search.random(case, 50))
            found[-1].seconds = 0.0
    assert found[0] == found[1] and found[0].failure and found[0].seed is not None
    with Case(_message(FENCE), 2, HEAP) as case:
        assert not search.random(case, 50).failure


def test_the_search_can_be_bounded():
    programs = job([[(ATOMIC, 0, 0, 1)] * 3] * 3)
    assert not _every(programs, 3, most=5).complete
    few = _every(programs, 3, preemptions=0)
    assert not few.complete and few.schedules < 90, few


def _equal(programs, ranks, blocks, most):
    """Whether the reduced search finds the states that all interleavings lead to; None where there are too many."""
    with Case(job(programs, blocks), ranks, HEAP, False) as case:
        naive = case.native.all(most, 60.0, -1, False)
    if not naive["failure"] and not naive["complete"]:
        return None
    with Case(job(programs, blocks), ranks, HEAP, False) as case:
        reduced = case.native.all(1 << 40, 60.0, -1, True)
    if naive["failure"]:
        return bool(reduced["failure"])
    return (reduced["states"], reduced["failure"]) == (naive["states"], "")


def test_an_event_that_two_others_may_come_before():
    """An atomic operation and a load in one event: a write that arrives before the load may arrive before the operation, too."""
    assert _equal([[(ATOMIC, 0, 0, 1), (LOAD, 0, 0, 0)], [(PUT, 0, 0, 1), (ATOMIC, 0, 0, 2)]], 2, 1, 1000)


def _compare(seeds, ranks, steps, blocks, most):
    compared = 0
    for seed in seeds:
        programs = random_programs(random.Random(seed), ranks, steps, blocks)
        same = _equal(programs, ranks, blocks, most)
        assert same is not False, (seed, programs)
        compared += same is True
    return compared


def test_no_state_is_left_out():
    first = random.randrange(1 << 20)
    print(f"programs of seeds from {first} on")
    assert _compare(range(first, first + 15), 2, 3, 1, 1000) > 5


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks, steps, blocks", [(2, 3, 1), (3, 2, 1), (2, 4, 1), (2, 1, 2)])
def test_no_state_of_many_programs_is_left_out(ranks, steps, blocks):
    first = random.randrange(1 << 20)
    print(f"programs of seeds from {first} on")
    assert _compare(range(first, first + 120), ranks, steps, blocks, 30000) > 40


@pytest.mark.parametrize(
    "text, said",
    [
        ("def f(a):\n    pass\n", "callable without arguments"),
        ("def f():\n    pass\n", "must return a function"),
        ("def f():\n    return lambda: None\n", "launches no kernel"),
        ("g = 1\n", "has no function f"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("def f():\n    1 / 0\n", "f does not set up a rank, see above"),
        (
            "import tilescale_net as tsn\ndef f():\n    tsn.zeros((tsn.rank() + 1,))\n    return lambda: None\n",
            "launches no kernel",
        ),
    ],
)
def test_functions_that_are_none(tmp_path, text, said, capsys):
    script = tmp_path / "script_of_a_check.py"
    script.write_text(text)
    assert cli.main(["check", f"{script}::f"]) == 2
    assert said in capsys.readouterr().err


def test_unequal_calls_of_ranks_are_reported():
    def unequal():
        tsn.zeros((tsn.rank() + 1,))
        return _message(FENCE)()

    with pytest.raises(ConfigurationError, match="rank 1 calls tilescale_net.zeros"):
        Case(unequal, 2, HEAP)
    with pytest.raises(ConfigurationError, match="1 to 8 ranks"):
        Case(unequal, 9, HEAP)
    with pytest.raises(ConfigurationError, match="names no function"):
        load("script.py")


def test_the_command(capsys):
    where = f"{small_jobs.__file__}::"
    assert cli.main(["check", where + "stream"]) == 0
    assert capsys.readouterr().out.startswith("all schedules explored: ")
    assert cli.main(["check", where + "waits_in_wrong_order"]) == 1
    said = capsys.readouterr().out
    assert "wrong: deadlock" in said and "rank 0 block 0 begins" in said and "--schedule 0.1\n" in said
    assert cli.main(["check", where + "waits_in_wrong_order", "--schedule", "0.1"]) == 1


def test_calls_whose_ranks_run_ahead():
    """A rank of three may have ended a call, and begun the next, before another has read its first word.

    Also that a job may make an object that reads what was tuned.
    """
    for name in ("broadcast", "moe_dispatch"):
        report = _every(getattr(small_calls, name), 3)
        assert report.complete and not report.failure, (name, report)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 3])
def test_small_jobs_and_calls(ranks):
    """Prints the table of docs/simulator.md."""
    found = [(name, getattr(small_jobs, name)) for name in small_jobs.BODIES if name != "passes" or ranks == 2]
    found += [(name, getattr(small_calls, name)) for name in small_calls.CALLS]
    print("| job | ranks | schedules | given up | decisions | seconds |\n| --- | --- | --- | --- | --- | --- |")
    for name, function in found:
        with Case(function, ranks) as case:
            report = search.every(case, seconds=120)
        complete = report.schedules if report.complete else f"more than {report.schedules}"
        print(f"| {name} | {ranks} | {complete} | {report.cut} | {report.events} | {report.seconds:.2f} |", flush=True)
        assert not report.failure, (name, report)
    for name in ("ring_without_wait", "put_without_fence", "stream_without_credit", "barrier_without_quiet"):
        assert _every(getattr(small_jobs, name), ranks).failure, name
