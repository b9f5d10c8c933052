"""A failing rank, Ctrl-C, a killed launcher: everything ends, and the rank to look at is named."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests import hosts, lacking
from tests.launch.conftest import LAUNCH, ROOT, alive, clean_environment, launch, start, wait_until
from tilescale_net.launch import job

# Ranks that only force ends, with a child that outlives its parent unless it is ended too.
STUBBORN = """
import signal, subprocess
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(['sleep', '1000'])
open(os.path.dirname(__file__) + f'/pids/{child.pid}', 'w')
"""


def last_line(done) -> str:
    return done.stderr.strip().splitlines()[-1]


def test_failing_rank_is_named_and_all_end(script):
    path = script(STUBBORN + "\nif rank == 2: raise ValueError('seven is too many')\ntime.sleep(1000)")
    begin = time.monotonic()
    done = launch(path, GPUS="3")
    assert time.monotonic() - begin < 12
    assert done.returncode == 1
    assert last_line(done) == "launch.sh: rank 2 failed first: exit code 1; ValueError: seven is too many"
    assert "line" in done.stderr and "Traceback" in done.stderr  # where it happened
    assert len(script.pids()) == 6
    assert not alive(script.pids())


PEER_LOST = "class PeerLost(Exception): pass\n"
# Ranks, script, exit code of the job, last line of stderr, other lines there.
REPORTS = {
    "an exit code": (2, "if rank == 1: sys.exit(77)\ntime.sleep(1000)", 77, "rank 1 failed first: exit code 77; it said nothing"),
    "exit code two of one rank alone": (2, "sys.exit(2 if rank == 1 else 0)", 2, "rank 1 failed first: exit code 2; it said nothing"),
    "a signal": (2, "if rank == 1: os.kill(os.getpid(), 11)\ntime.sleep(1000)", 139, "rank 1 failed first: killed by SIGSEGV"),
    "a lack of memory": (2, "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(1000)", 137, "rank 1 failed first: killed by SIGKILL, probably by the out-of-memory killer of the kernel or of a cgroup (see dmesg); it said nothing"),
    # A rank that raises PeerLost may well end before the rank that it lost.
    "a victim by its error": (3, PEER_LOST + """
if rank == 1:
    print('Traceback (most recent call last):', file=sys.stderr)
    print('ZeroDivisionError: division by zero', file=sys.stderr)
    time.sleep(0.7)
    sys.exit(5)
raise PeerLost('rank 0: rank 1 is gone')
""", 5, "rank 1 failed first: exit code 5; ZeroDivisionError: division by zero"),
    "a victim in a collective call of torch": (3, """
if rank == 1:
    time.sleep(0.5)
    raise ValueError("the culprit's own words")
raise RuntimeError('[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9. This looks like GLHF!')
""", 1, "rank 1 failed first: exit code 1; ValueError: the culprit's own words", "rank 0: exit code 1; RuntimeError: [gloo/transport", "rank 2: exit code 1; RuntimeError: [gloo/transport"),
    # They end first, without a word but the package's own about its progress, or by an error of their own.
    "ranks that catch the loss of another": (4, PEER_LOST + """
print('meeting the other ranks of the job', file=sys.stderr)
if rank == 1:
    time.sleep(0.5)
    raise ZeroDivisionError('here')
if rank == 2:
    try:
        raise PeerLost('rank 2: rank 1 failed')
    except PeerLost as error:
        raise RuntimeError('no more data') from error
if rank == 3:
    print('rank 3: rank 1 failed: ZeroDivisionError: here; restart the job', file=sys.stderr)
sys.exit(4)
""", 1, "rank 1 failed first: exit code 1; ZeroDivisionError: here", "rank 0: exit code 4\n"),
    "a stopped rank": (3, PEER_LOST + """
import signal
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
raise PeerLost(f'rank {rank}: rank 1 does not answer')
""", 1, "rank ", "rank 1 was stopped"),
    "a rank that left early": (2, PEER_LOST + """
if rank == 0:
    sys.exit(0)
time.sleep(0.5)
raise PeerLost('rank 1: rank 0 is gone')
""", 1, "rank 1 failed first: exit code 1; PeerLost: rank 1: rank 0 is gone (rank 0 had ended before, with exit code 0)"),
    "one reason of several ranks": (3, """
time.sleep((0.3, 0, 0.15)[rank])
raise RuntimeError('no memory') if rank != 2 else KeyError(rank)
""", 1, "ranks 0, 1 failed for the same reason, see above: exit code 1", "rank 2: exit code 1; KeyError: 2"),
    "an error behind torch's prefix": (2, """
for line in ('Traceback (most recent call last):', '  File', 'KeyError: 4'): print(f'[rank{rank}]: ' + line)
sys.exit(1 if rank else time.sleep(1000))
""", 1, "rank 1 failed first: exit code 1; KeyError: 4"),
}  # fmt: skip


@pytest.mark.parametrize("output", REPORTS)
def test_reports(script, output):
    ranks, text, code, last, *others = REPORTS[output]
    done = launch(script(text), GPUS=str(ranks))
    assert done.returncode == code, done.stderr
    assert last_line(done).startswith(f"launch.sh: {last}"), done.stderr
    assert all(f"launch.sh: {other}" in done.stderr for other in others), done.stderr
    assert done.stderr.count("no memory") in (0, 2)  # said once, and in the traceback's line of code
    assert not alive(script.pids())


@pytest.mark.parametrize(
    "line, file", [("0::/a/b", "a/b/memory.events"), ("4:memory:/a", "memory/a/memory.oom_control")]
)
def test_the_file_that_counts_kills_for_want_of_memory(tmp_path, monkeypatch, line, file):
    (tmp_path / "cgroup").write_text(f"1:cpu:/a\n{line}\n")
    events = tmp_path / file
    events.parent.mkdir(parents=True)
    counts = []
    for kills in (3, 4):
        events.write_text(f"low 0\noom 9\noom_kill {kills}\noom_group_kill 0\n")
        counts.append(job.oom_kills(str(tmp_path / "cgroup"), str(tmp_path)))
    assert counts == [{str(events): 3}, {str(events): 4}]
    monkeypatch.setattr(job, "oom_kills", lambda: counts[1])
    rank = job.Rank.__new__(job.Rank)
    rank.code = -signal.SIGKILL
    assert f"(oom_kill is 4 in {events}, and was 3 at the start)" in rank.exit_description(counts[0])
    assert "probably" in rank.exit_description(counts[1])


WORDS_OF_VICTIMS = """
tilescale_net.errors.PeerLost: rank 0: rank 1 is gone
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1
RuntimeError: [/src/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete
RuntimeError: Application timeout caused pair closure
torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Did the remote server shutdown or crash?
torch.distributed.DistNetworkError: The client socket has timed out after 1000ms while trying to connect to (host, 29500).
torch.distributed.DistStoreError: wait timeout after 1000ms, keys: /never
torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:328, remote process exited or there was a network error
""".strip().splitlines()
WORDS_OF_CULPRITS = """
ValueError: the culprit's own words
torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. EADDRINUSE
torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:328, unhandled cuda error (run with NCCL_DEBUG=INFO)
tilescale_net.errors.WaitTimeout: put_signal waited 4 s
""".strip().splitlines()


def test_victims_are_known_by_their_words():
    assert [line for line in WORDS_OF_VICTIMS if not job._VICTIM.search(line)] == []
    assert [line for line in WORDS_OF_CULPRITS if job._VICTIM.search(line)] == []


def test_signals_that_were_ignored_stay_so(script):
    """As nohup and shell scripts in the background start programs."""
    path = script("time.sleep(2)\nprint('done')")
    process = subprocess.Popen(
        ["bash", "-c", f"trap '' HUP INT; exec bash {LAUNCH} {path}"], env=clean_environment(GPUS="2"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wait_until(lambda: len(script.pids()) == 2)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "done\n"), err


def test_wrong_arguments_are_reported_once(script):
    text = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument('--count', type=int)
    time.sleep(0.3 * (rank == 0))
    parser.parse_args()
    """
    done = launch(script(text), "--count", "many", GPUS="3")
    assert done.returncode == 2
    assert done.stderr.count("invalid int value: 'many'") == 1
    assert "launch.sh" not in done.stderr
    helped = launch(script(text), "--help", GPUS="3")
    assert helped.returncode == 0
    assert helped.stdout.count("--count") == 2  # in the usage line and in the list


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_or_killed_launcher_ends_everything(script, number, code):
    """Ranks that only SIGKILL ends, and processes that they have started."""
    process = start(script(STUBBORN + "time.sleep(1000)"), GPUS="2")
    assert wait_until(lambda: len(script.pids()) == 4)
    begin = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - begin < 10 and process.returncode == code
    assert number == signal.SIGKILL or f"stopped by {number.name}" in err
    assert wait_until(lambda: not alive(script.pids()), 20 if number == signal.SIGKILL else 0)


def test_ctrl_c_lets_ranks_clean_up(script, tmp_path):
    text = f"""
    try:
        open({str(tmp_path)!r} + f'/ready{{rank}}', 'w')
        time.sleep(1000)
    except KeyboardInterrupt:
        open({str(tmp_path)!r} + f'/cleaned{{rank}}', 'w')
    """
    process = start(script(text), GPUS="2")
    assert wait_until(lambda: all((tmp_path / f"ready{r}").exists() for r in range(2)))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert all((tmp_path / f"cleaned{r}").exists() for r in range(2))


def test_processes_that_ranks_leave_running_are_ended(script):
    done = launch(script(STUBBORN), GPUS="2")
    assert done.returncode == 0
    assert len(script.pids()) == 4
    assert wait_until(lambda: not alive(script.pids()))


def test_objects_in_shared_memory_are_removed_for_a_killed_rank(script):
    """Files whose process held their lock; not files of other programs, which may run in another container."""
    other = f"/dev/shm/1:{os.geteuid()}:0-of-another-job"
    text = """
        import fcntl, signal
        name = f"/dev/shm/tilescale_net-{os.getpid()}-a"
        lock = open(name, "w")
        fcntl.lockf(lock, fcntl.LOCK_EX)
        for end in ("0", "1", "0_7"):
            open(f"{name}:{os.geteuid()}:{end}", "w")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    open(other, "w").close()
    try:
        assert launch(script(text), GPUS="2").returncode == 128 + signal.SIGKILL
        left = os.listdir("/dev/shm")
        assert os.path.exists(other)
        assert not [name for name in left if any(f"-{pid}-" in name for pid in script.pids())], left
    finally:
        os.unlink(other)


def test_much_output_neither_blocks_nor_fills_memory(script):
    done = launch(script("for i in range(20000): print('x' * 200)\nsys.exit(9 if rank == 1 else 0)"), GPUS="2")
    assert done.returncode == 9
    assert done.stderr.count("\n") < 100


def test_closed_stderr_does_not_break_the_job(script):
    path = script("for i in range(1000): print('x' * 200, file=sys.stderr)\nprint('done')")
    process = start(path, GPUS="1")
    process.stderr.close()
    out = process.stdout.read()
    assert process.wait(20) == 0
    assert out == "done\n"
    process.stdout.close()
    assert os.path.exists(path)


def _in(prefix: list[str], code: str, path: str) -> subprocess.CompletedProcess:
    """The launcher alone, behind a command and some lines of Python that change its surroundings."""
    start = f"import os, sys; {code}; from tilescale_net.launch import run; sys.exit(run.start([{path!r}]))"
    env = clean_environment(GPUS="2", PYTHONPATH=ROOT)
    return subprocess.run([*prefix, sys.executable, "-c", start], env=env, capture_output=True, text=True, timeout=60)


def test_a_launcher_without_streams(script, tmp_path):
    """As a daemon starts it."""
    path = script(f"# tilescale_net\nprint('said', file=sys.stderr)\nopen({str(tmp_path)!r} + f'/{{rank}}', 'w')")
    assert _in(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-"], "pass", path).returncode == 0
    assert {"0", "1"} <= {*os.listdir(tmp_path)}


def test_a_sandbox_that_refuses_pidfd_open(script):
    path = script("if rank == 1: sys.exit(3)\ntime.sleep(1000)")
    done = _in(
        [], "os.pidfd_open = lambda *_: (_ for _ in ()).throw(PermissionError(1, 'Operation not permitted'))", path
    )
    assert done.returncode == 3 and "rank 1 failed first: exit code 3" in last_line(done), done.stderr
    assert not alive(script.pids())


@pytest.mark.skipif(not hosts.possible(), reason="lacks root")
def test_loopback_that_is_down(script):
    begin = time.monotonic()
    done = _in([lacking.program("unshare", "util-linux"), "--net"], "pass", script("pass"))
    assert done.returncode == 2 and "loopback is down" in last_line(done) and "ip link set lo up" in last_line(done)
    assert time.monotonic() - begin < 15 and not script.pids()
