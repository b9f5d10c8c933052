"""When a rank ends for any reason, anywhere, the others end too, in time, and name that rank and its reason."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

import tilescale_net as tsn
from tests import ranks
from tests.variants import variants
from tilescale_net.launch.run import reserve_port
from tilescale_net.runtime import bootstrap, control

QUICK = {"TSN_TIMEOUT": "2", "TSN_HEARTBEAT_TIMEOUT": "2"}  # and 5 s more for collective calls


def _end_with_the_others(lost):
    """For `on_start`: ends the stopped rank when all others have ended."""

    def on_start(procs):
        def body():
            for rank, proc in enumerate(procs):
                if rank != lost:
                    proc.join(60)
            procs[lost].kill()

        threading.Thread(target=body, daemon=True).start()

    return on_start


def _stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def _stopped(lost, where):
    if int(os.environ["RANK"]) == lost:
        if where == "init":
            bootstrap.connect_gloo = lambda *_: _stop()
        if where == "heap":
            tsn.init("4M")
            _stop()
    tsn.init("4M")
    tsn.barrier()
    tsn.barrier()


@variants(1, "lost, where", [(0, "heap"), (0, "init"), (1, "heap")])
def test_a_stopped_rank_stops_nobody_else(lost, where):
    begin = time.monotonic()
    outcomes = ranks.launch(
        3, _stopped, lost, where, env=QUICK, init=False, timeout=100, on_start=_end_with_the_others(lost)
    )
    for o in outcomes:
        if o.rank != lost:
            kind, text, _ = o.error
            assert kind == "PeerLost" and f"rank {lost}" in text.partition(": ")[2], text
            assert "nothing yet" not in text, text
            if lost == 0:
                assert "rank 0, which keeps the store of the job, does not answer" in text or "is stopped" in text, text
            other = 3 - lost - o.rank
            assert f"rank {other}" not in text.partition(": ")[2], text
    assert time.monotonic() - begin < 150  # a hang is ended at 100, when no rank has said anything


def _dies(lost, how):
    tsn.init("4M")
    tsn.barrier()
    if tsn.rank() == lost:
        how()
    else:
        time.sleep(0.3)
    tsn.barrier()


def _killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_is_named(lost):
    begin = time.monotonic()
    for o in ranks.launch(3, _dies, lost, _killed, init=False, timeout=60):
        if o.rank != lost:
            kind, text, _ = o.error
            assert kind == "PeerLost" and f"rank {lost} (process ended without a report)" in text, text
    assert time.monotonic() - begin < 30  # far below TSN_TIMEOUT


def _wrong_setting(wrong):
    if os.environ["RANK"] == str(wrong):
        os.environ.update(TSN_PROXY_CAPACITY="3")
    if os.environ["RANK"] == "2":  # which looks late, as a rank of a busy machine does
        explain = control.Control._explain
        control.Control._explain = lambda *args: (time.sleep(1.5), explain(*args))[1]
    tsn.init("4M")


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_error_in_the_first_init_reaches_the_others(wrong):
    outcomes = ranks.launch(3, _wrong_setting, wrong, env={"VIRTUAL_NODES": "3", **QUICK}, init=False, timeout=60)
    assert outcomes[wrong].error[0] == "ConfigurationError" and "TSN_PROXY_CAPACITY=3" in outcomes[wrong].error[1]
    for o in outcomes:
        if o.rank != wrong:
            kind, text, _ = o.error
            assert kind == "PeerLost" and f"rank {wrong} failed" in text and "TSN_PROXY_CAPACITY=3" in text, text


def _waits_for_a_dead_peer():
    """A wait that times out because the peer is gone is the peer's fault."""
    tsn.init("4M")
    world = tsn.world()
    pids = world.control.gather("the test's processes", os.getpid())
    if tsn.rank() == 1:
        _killed()
    select.select([os.pidfd_open(pids[1])], [], [])
    world.fail(tsn.WaitTimeout("rank: wait in block 0 waited"))


def test_the_death_of_a_peer_explains_a_timeout():
    outcomes = ranks.launch(2, _waits_for_a_dead_peer, env=QUICK, init=False, timeout=60)
    kind, text, _ = outcomes[0].error
    assert kind == "PeerLost" and "rank 1 (process ended without a report)" in text, text


def _waits_for_a_silent_store():
    """A wait that times out before silence counts as loss is still explained by it."""
    tsn.init("4M")
    tsn.barrier()
    if tsn.rank() == 0:
        _stop()
    time.sleep(0.3)
    tsn.world().fail(tsn.WaitTimeout("rank: wait in block 0 waited"))


def test_a_silence_that_lasts_explains_a_timeout():
    env = {"TSN_TIMEOUT": "1", "TSN_HEARTBEAT_TIMEOUT": "4"}
    outcomes = ranks.launch(
        3, _waits_for_a_silent_store, env=env, init=False, timeout=60, on_start=_end_with_the_others(0)
    )
    for o in outcomes[1:]:
        kind, text, _ = o.error
        assert kind == "PeerLost" and "rank 0" in text.partition(": ")[2].partition("(rank:")[0], text


def _learns_late():
    """Rank 1 stands still while rank 0, which keeps the store, fails. What rank 1 reports."""
    tsn.init("4M")
    world = tsn.world()
    tsn.barrier()
    if tsn.rank() == 0:
        time.sleep(0.5)
        world.give_up("mine")
        return None
    subprocess.Popen(["sh", "-c", f"sleep 3.5; kill -CONT {os.getpid()}"])
    _stop()
    with pytest.raises(tsn.PeerLost) as raised:
        tsn.barrier()
    return str(raised.value)


def test_the_rank_with_the_store_stays_until_a_slow_rank_has_the_reason():
    late = ranks.launch(2, _learns_late, init=False, timeout=60)[1]
    assert late.ok and "rank 0 failed: mine" in late.value, late


def _fails_and_lives_on():
    """Rank 1 meets an error and its program does not end; the others wait for it. Seconds until they know."""
    tsn.init("4M")
    tsn.barrier()
    begin = time.monotonic()
    if tsn.rank() == 1:
        with contextlib.suppress(tsn.WaitTimeout):
            tsn.world().fail(tsn.WaitTimeout("rank 1: mine"))
        time.sleep(300)
    for call in (tsn.barrier, tsn.finalize):
        with pytest.raises(tsn.PeerLost, match="rank 1 failed: rank 1: mine"):
            call()
    return time.monotonic() - begin


def test_a_rank_that_fails_and_lives_on_holds_nobody():
    outcomes = ranks.launch(3, _fails_and_lives_on, init=False, timeout=60, on_start=_end_with_the_others(1))
    for o in (outcomes[0], outcomes[2]):
        assert o.ok and o.value < 20, o  # far below TSN_TIMEOUT


# -- ends of the program itself ---------------------------------------------------------------------------------------

# Each job's ranks are forks of one program that has imported the modules of init; they end as a program does.
DRIVER = """
import gc, json, os, sys, time, traceback
import torch, tilescale_net.compiler.toolchain
gc.freeze()  # or the end of each fork would copy all that is there
jobs, folder = json.loads(sys.argv[1]), sys.argv[2]
for job, (port, text) in enumerate(jobs):
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.dup2(os.open(f"{folder}/{job}.{rank}", os.O_CREAT | os.O_WRONLY), 2)
            break
        children.append(pid)
    else:
        for rank, pid in enumerate(children):
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    import tilescale_net as tsn
    tsn.init("4M")
    rank = tsn.rank()
    tsn.barrier()
    exec(text)
    tsn.barrier()
    break
"""

CHILDREN = """
import signal, time
x = tsn.zeros(4)
for end in (lambda: sys.exit(0), lambda: 1 / 0, lambda: tsn.barrier()):
    pid = os.fork()
    if pid == 0:
        end()
        sys.exit(0)
    for _ in range(200):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(pid, signal.SIGKILL)
        raise RuntimeError("the child hangs")
tsn.barrier()
print("the rank goes on", file=sys.stderr)
"""

# Rank 1 fails and finalizes the world alone, while the others wait for it.
FINALIZE = """
import time
from tilescale_net.runtime import worlds
worlds.report_patience = 0.5
if rank == 1:
    try: raise KeyError('x')
    finally: tsn.finalize()
{others}
"""

# Statements of rank 1, its exit code, rank 0's exit code and output.
ENDS = [
    ("if rank == 1: raise ZeroDivisionError('mine')", 1, 1, "rank 1 failed: ZeroDivisionError: mine"),
    ("if rank == 1: sys.exit(3)", 3, 1, "rank 1 failed: it ended (exit code 3)"),
    ("if rank == 1: raise SystemExit('a word')", 1, 1, "rank 1 failed: it ended (exit code 1)"),
    ("if rank == 1: raise SystemExit(3)", 3, 1, "rank 1 failed: it ended (exit code 3)"),
    ("if rank == 1: sys.exit(0)", 1, 1, "rank 1 ended (exit code 0)"),
    (
        "if rank == 1:\n  try: sys.exit(3)\n  except SystemExit: pass\n  raise KeyError('late')",
        1,
        1,
        "rank 1 failed: KeyError: 'late'",
    ),
    ("try: sys.exit(3)\nexcept SystemExit: pass\nprint('caught', file=sys.stderr)", 0, 0, "caught"),
    # Python shows the exception by a hook of a debugger or logger.
    (
        "if rank == 1:\n  sys.excepthook = lambda *error: None\n  raise ValueError('unheard')",
        1,
        1,
        "rank 1 failed: ValueError: unheard",
    ),
    (
        FINALIZE.format(others="tsn.barrier()"),
        1,
        1,
        "rank 1 called tilescale_net.finalize() while it handled KeyError: 'x'",
    ),
    (FINALIZE.format(others="while True: time.sleep(0.01); tsn.synchronize()"), 1, 1, "rank 1 failed: KeyError: 'x'"),
    # The others' collective call is given up, and its thread is still waiting when they end.
    (
        "if rank == 1:\n  try: tsn.world().fail(tsn.WaitTimeout('mine'))\n  except tsn.WaitTimeout: time.sleep(3)",
        1,
        1,
        "rank 1 failed: mine",
    ),
    ("try: sys.exit(0)\nfinally: tsn.finalize(); print('in order', file=sys.stderr)", 0, 0, "in order"),
    (CHILDREN, 0, 0, "forked from a rank"),
]


@pytest.mark.sample(0)
def test_the_end_of_a_program_reaches_the_other_ranks(tmp_path):
    with contextlib.ExitStack() as stack:
        jobs = [(stack.enter_context(reserve_port("127.0.0.1")).getsockname()[1], text) for text, *_ in ENDS]
        env = {**os.environ, **QUICK, "TSN_DEVICE": "simulator", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, json.dumps(jobs), str(tmp_path)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            timeout=40 * len(ENDS),  # a second each, on a machine with nothing else to do
        )
    codes = [int(c) for c in done.stdout.split()]
    for job, (text, code, others, said) in enumerate(ENDS):
        words = [(tmp_path / f"{job}.{rank}").read_text() for rank in range(2)]
        ended = codes[2 * job : 2 * job + 2]
        assert ended == [others, code] and said in words[0], (text, ended, words)
    assert all("the rank goes on" in (tmp_path / f"{len(ENDS) - 1}.{rank}").read_text() for rank in range(2))
