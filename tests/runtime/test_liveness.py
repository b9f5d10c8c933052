"""Requests of ranks to the store, with as many ranks as a cluster has; and how a watchdog reports a process that has ended."""

import datetime
import json
import signal
import subprocess
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.variants import nightly
from tilescale_net.errors import PeerLost, WaitTimeout
from tilescale_net.runtime import control, liveness, this_host
from tilescale_net.runtime.job_store import SignedStore
from tilescale_net.runtime.liveness import Watchdog
from tilescale_net.trace import reporter

PER_HOST = 8


class Counted:
    """A store that counts requests."""

    def __init__(self, store):
        self.raw, self.requests = store, 0

    def __getattr__(self, name):
        function = getattr(self.raw, name)

        def counted(*args):
            self.requests += 1
            return function(*args)

        return counted


class Job:
    """The heartbeats of all ranks of a job, whose rounds come one after the other."""

    def __init__(self, size, timeout=15.0):
        limit = datetime.timedelta(seconds=10)
        self.counted = Counted(dist.TCPStore("127.0.0.1", 0, 1, True, limit, wait_for_workers=False))
        self.store = SignedStore(self.counted, "job", b"secret")
        self.now = 0.0
        self.stopped = {r: [] for r in range(size)}
        hosts = [f"host{r // PER_HOST}" for r in range(size)]
        self.beats = {
            r: liveness.Heartbeats(r, hosts, timeout, lambda r=r: self.stopped[r], lambda: self.now)
            for r in range(size)
        }
        self.news = {}

    def run(self, seconds, without=()):
        end = self.now + seconds
        while self.now < end:
            for rank, beat in self.beats.items():
                if rank not in without:
                    self.news[rank] = beat.round(self.store)
            self.now += beat.interval

    def found(self, what, without=()):
        return {getattr(news, what) for rank, news in self.news.items() if rank not in without}


@pytest.mark.parametrize("size", [256, 512])
def test_requests_of_a_large_job(size):
    job = Job(size)
    job.run(1)
    before, seconds = job.counted.requests, 2
    job.run(seconds)
    assert (job.counted.requests - before) / seconds <= 2000
    assert job.found("failed") == job.found("silent") == {None}
    # A report was requested, as by SIGUSR1: each looks closer once, and not from then on.
    job.store.count_up("alarms")
    job.run(1)
    before = job.counted.requests
    job.run(seconds)
    assert (job.counted.requests - before) / seconds <= 2000
    # A failure is heard of in the next round nevertheless.
    job.store.set("failed", json.dumps([3, "failed: it says why"]))
    job.store.count_up("alarms")
    job.run(job.beats[0].interval / 2)
    assert job.found("failed", [3]) == {"rank 3 failed: it says why"}


def test_every_rank_learns_of_the_failure_of_another():
    job = Job(24, timeout=5.0)
    job.run(2)
    assert job.found("silent") == {None}
    # The rank that sends for its host is stopped: the next one sends instead, and reports it.
    for rank in range(9, 16):
        job.stopped[rank] = [8]
    job.run(8, without=[8])
    assert job.found("silent", [8]) == {None}
    assert all(8 in n.stopped and n.stopped[8] > 2 for r, n in job.news.items() if r != 8)
    # A whole host is cut off.
    gone = range(8, 16)
    job.run(7, without=gone)
    for first, why in job.found("silent", gone):
        assert first == 8 and "no heartbeat" in why and "ranks 9 to 15" in why
    # The first failure written is the one that all report.
    store = job.store
    for rank, why in ((3, "failed: first"), (20, "failed: second")):
        store.set_once("failed", json.dumps([rank, why]))
    job.run(1, without=gone)
    assert job.found("failed", [*gone, 3]) == {"rank 3 failed: first"}
    assert job.news[3].failed is None


def test_a_host_that_is_cut_off_before_its_first_heartbeat_is_named_alone():
    job = Job(24, timeout=5.0)
    gone = range(8, 16)
    job.run(8, without=gone)
    assert {(news.silent[0], *sorted(news.lost)) for news in job.news.values()} == {(8, *gone)}


def test_of_two_silent_hosts_the_one_that_was_silent_first_is_named():
    job = Job(24, timeout=5.0)
    job.run(2)
    first, later = range(8, 16), range(16, 24)
    job.run(2, without=first)
    job.run(7, without=[*first, *later])
    assert {r for r, _ in job.found("silent", [*first, *later])} == {8}
    assert job.news[0].lost == {*first, *later}


@pytest.mark.parametrize("where", ["between looks", "between asking and judging"])
def test_a_rank_that_got_no_processor_itself_blames_nobody(where):
    job = Job(24, timeout=5.0)
    job.run(2)
    if where == "between looks":  # and is the first to go on
        for _ in range(4):
            job.beats[0].round(job.store)
        job.now += 8
        for _ in range(5):
            assert job.beats[0].round(job.store).silent is None
    else:

        class Slow:
            def __getattr__(self, name):
                return getattr(job.store, name)

            def get_all(self, keys):
                values = job.store.get_all(keys)
                job.now += 8
                return values

        for _ in range(5):
            assert job.beats[0].round(Slow()).silent is None
    job.run(3)
    assert job.found("silent") == {None}


def test_writes_of_a_foreign_process_are_ignored():
    """A process that reaches the port of the store can read the keys, and write."""
    job, word = Job(16, timeout=5.0), json.dumps([1, "failed: a foreign process says so"])
    job.run(1)
    job.counted.set("failed", word)
    job.counted.set("ended/8", "1")
    job.counted.set("failed in another place", job.counted.get("beat/0"))
    job.store.count_up("alarms")
    job.run(1)
    assert job.found("failed") == job.found("silent") == {None}
    assert not job.store.check(["ended/8"]) and not job.store.check(["failed in another place", "beat/0"])
    # A rank is heard nevertheless, and a host is not kept alive.
    assert json.loads(job.store.set_once("failed", json.dumps([2, "failed: a rank says so"])))[0] == 2
    assert json.loads(job.store.set_once("failed", word))[0] == 2
    gone = range(8, 16)
    for turn in range(7):
        job.counted.set("beat/8", json.dumps([8, turn, []]))
        job.run(1, without=gone)
    assert job.found("failed", [2, *gone]) == {"rank 2 failed: a rank says so"}
    assert {r for r, _ in job.found("silent", gone)} == {8}
    # Of another meeting, or of another job.
    for prefix, secret in (("job/2", b"secret"), ("job", b"other")):
        assert SignedStore(job.counted, prefix, secret).get("failed") is None
    assert SignedStore(job.counted).get("ended/8") == b"1"
    # The same key by another prefix.
    job.store.set("2/failed", word)
    inner = SignedStore(dist.PrefixStore("2", job.counted.raw), "job/2", b"secret")
    assert inner.get("failed") == word.encode()


@pytest.mark.parametrize("garbage", ["", "[]", "null", "{}", "[1]", '["x", 2, 3]', "[1,2,[\x00]]", "9" * 5000])
def test_garbage_in_the_store_is_survived(garbage):
    job = Job(16, timeout=5.0)
    job.run(1)
    job.store.set("beat/8", garbage)
    assert liveness._stopped_in(garbage) == []
    job.run(1, without=[8])
    said = control.announced(garbage, 0)
    assert said is None or "cannot be read" in said
    assert control.last_call(garbage)[0] == 0


def test_messages_of_others_do_not_control_the_terminal():
    escape = "\x1b[2J\x9b1mx\r\u202e"
    assert control.announced(json.dumps([1, f"failed: {escape}\n  at a.py:3"]), 0) == (
        "rank 1 failed: ?[2J?1mx??\n  at a.py:3"
    )
    assert control.last_call(json.dumps([1, escape])) == (1, "?[2J?1mx??")
    state = {"kernel": [escape, 1.0], "waits": 0, "host": [escape, 1.0], "place": escape, "waiting": [], "sent": []}
    lines = reporter.text("why", {0: state}, 1).split("\n")
    assert "?[2J" in lines[-1] and all(line.isprintable() for line in lines)


class Posts:
    """The part of a job's store that calls are compared through; posts complete at once."""

    def __init__(self, store):
        self._store = store

    def post(self, action):
        done = Future()
        done.set_result(action(self._store))
        return done


@pytest.mark.parametrize("size", [256, nightly(512)])
def test_requests_of_a_large_job_whose_calls_wait(size):
    """With heartbeats: ranks that are idle after a call ask for the arguments of another rank's call."""
    job = Job(size)
    posts, members, logs = Posts(job.store), list(range(size)), []
    for rank in members:
        logs.append(
            control.CallLog(
                SimpleNamespace(rank=rank, members=members, generation=0, store=posts, calls=1, last_call="called it")
            )
        )
        logs[-1].track("AllGather").note("x of shape {}", 3 if rank == 1 else 4)
    found, most = {}, 0
    for _ in range(5):
        before, end = job.counted.requests, job.now + 2
        while job.now < end:
            begin = job.now
            job.run(job.beats[0].interval / 2)  # one round
            assert job.now - begin == job.beats[0].interval
            for rank, log in enumerate(logs):
                if error := log.difference():
                    found[rank] = str(error)
        most = max(most, (job.counted.requests - before) / 2)
    assert 1000 < most <= 2000
    assert set(found) == {0, 1} and "rank 1 with x of shape 3" in found[0], found


@pytest.mark.parametrize("secret", [b"secret", None])
def test_counters_survive_foreign_writes(secret):
    raw = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    first, second = (SignedStore(raw, "job", secret) for _ in range(2))
    assert first.count("alarms") == 0 and first.count_up("alarms") == 1 and second.count_up("alarms") == 2
    for spoil in (
        lambda: raw.set("alarms", "much"),
        lambda: raw.set("alarms", ""),
        lambda: raw.delete_key("alarms"),
        lambda: raw.set("alarms", "nothing is written here"),
    ):
        known = first.count("alarms")
        spoil()
        assert first.count("alarms") == known
        assert first.count_up("alarms") == known + 1 == second.count("alarms") == second.count_up("alarms") - 1


def _logs(calls: str) -> list:
    """Logs of two ranks that have made calls: "0A" is one of rank 0 of object A, "1-" one of the host of rank 1."""
    posts = Posts(SignedStore(dist.HashStore(), "job", b"secret"))
    controls = [
        SimpleNamespace(rank=r, members=[0, 1], generation=0, store=posts, calls=5, last_call="called b()")
        for r in (0, 1)
    ]
    logs = [control.CallLog(one) for one in controls]
    tracks = [{name: log.track(name) for name in "AB"} for log in logs]
    for rank, name in zip(map(int, calls[::2]), calls[1::2]):
        if name == "-":
            controls[rank].calls += 1
        else:
            tracks[rank][name].note("x of shape {}", len(calls))
    return logs


@pytest.mark.parametrize(
    "calls, words",
    [
        ("0A1A0B1B", None),
        ("0A0B0A1A", None),  # rank 1 is behind
        ("0A1B", "rank 1 has not (A: x of shape 4), and rank 1 one that rank 0 has not (B: x of shape 4)"),
        ("0A1A0A1-", "rank 1 has not (A: x of shape 8), and rank 1 one that rank 0 has not (called b())"),
        ("0-1A1A", "rank 1 has not (called b()), and rank 1 one that rank 0 has not (A: x of shape 6)"),
    ],
)
def test_ranks_that_wait_in_calls_of_different_objects(calls, words):
    logs, found = _logs(calls), []
    for _ in range(8):
        found += [str(error) for error in (log.difference() for log in logs) if error]
    assert bool(found) == bool(words) and (not words or any(words in text for text in found)), found
    logs[0].on_mismatch()
    assert logs[0].difference() is None  # they may be a call apart then


class SlowStore:
    """Answers nothing for some seconds, then that every rank has left in good order, or (`words` false) without a word."""

    kept_by, lost = None, None
    keeper = "a process outside of this group, which keeps the store of the job,"

    def __init__(self, slow: float, words: bool):
        self._end, self._words, self.answered = time.monotonic() + slow, words, 0

    def post(self, question) -> Future:
        answer: Future = Future()
        if time.monotonic() > self._end:
            self.answered += 1
            try:
                answer.set_result(question(self))
            except Exception as err:
                answer.set_exception(PeerLost(str(err)))
        return answer

    def check(self, keys) -> bool:
        return self._words and keys[0].startswith("ended/")

    def get(self, key):
        return None


class Control:
    """The part of a control plane that a watchdog uses."""

    rank, size, generation, lost, failed_key = 0, 2, 0, set(), "failed"

    def __init__(self, store: SlowStore, process: tuple[int, int]):
        self.store, self.said = store, []
        self.hosts, self.processes = ["here"] * 2, [(0, 0), process]

    def announce_failure(self, text, rank=None, seconds=1.0, key=None) -> None:
        self.said.append((rank, text))


def _started(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


@pytest.mark.parametrize(
    "slow, words, blamed", [(1.5, True, False), (0.0, False, True), (60.0, True, True)],
    ids=["slow, in good order", "without a word", "silent"],
)  # fmt: skip
def test_a_process_has_ended(slow, words, blamed):
    process = subprocess.Popen(["sleep", "0.2"])
    control = Control(SlowStore(slow, words), (process.pid, _started(process.pid)))
    reasons = []
    watchdog = Watchdog(control, 30.0, lambda: None, lambda: reasons.append(watchdog.reason()), lambda _: None)
    end = time.monotonic() + (30 if blamed else 4)
    while not reasons and time.monotonic() < end:
        time.sleep(0.05)
    watchdog.close()
    process.wait()
    assert reasons == (["rank 1 (process ended without a report) is gone"] if blamed else []), reasons
    assert bool(control.said) == blamed


def test_an_error_of_this_rank_is_not_taken_for_the_loss_of_a_peer():
    """The watchdog meets the error while another thread is about to ask why it met the same one."""
    own = WaitTimeout("rank 0: wait in block 0 waited 2 s")
    seen, control = [], Control(SlowStore(0.0, True), this_host.own_process())
    watchdog = Watchdog(control, 30.0, lambda: own, lambda: seen.append(watchdog.loss), lambda _: None)
    end = time.monotonic() + 30
    while not seen and time.monotonic() < end:
        time.sleep(0.05)
    assert seen == [(str(own), own)]
    assert watchdog.explanation_of(own) is None
    watchdog.close()


def test_a_foreign_process_is_no_rank():
    """A process that has the number of a rank, but began at another time, is neither watched nor ended."""
    foreign = subprocess.Popen(["sleep", "60"])
    losses = []
    control = Control(SlowStore(0.0, False), (foreign.pid, _started(foreign.pid) - 1))
    watchdog = Watchdog(control, 30.0, lambda: None, lambda: losses.append(watchdog.reason()), lambda _: None)
    foreign.send_signal(signal.SIGSTOP)
    assert watchdog.end_processes({1}) == {1}
    time.sleep(1.2)
    assert watchdog.lost_ranks() == set()
    foreign.send_signal(signal.SIGCONT)
    assert foreign.poll() is None
    foreign.kill()
    foreign.wait()
    time.sleep(0.6)
    watchdog.close()
    assert not losses


@pytest.mark.parametrize("refused", [False, True], ids=["", "where pidfd_send_signal is refused"])
def test_a_rank_is_ended(refused, monkeypatch):
    if refused:
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: (_ for _ in ()).throw(PermissionError()))
    process = subprocess.Popen(["sleep", "60"])
    found = this_host.Process(process.pid, _started(process.pid))
    assert not found.ended() and not found.stopped()
    found.kill()
    end = time.monotonic() + 10
    while not found.ended() and time.monotonic() < end:
        time.sleep(0.01)
    assert found.ended(), "as a zombie, too"
    assert process.wait() == -signal.SIGKILL and found.ended()
    found.kill()
    found.close()
    with pytest.raises(OSError):
        this_host.Process(process.pid, 0)
