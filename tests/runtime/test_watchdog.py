"""What a watchdog makes of a process that has ended while the store of the job is slow to say whether it may."""

import signal
import subprocess
import time
from concurrent.futures import Future

import pytest

from tilescale_net.errors import PeerLost, WaitTimeout
from tilescale_net.runtime import this_host
from tilescale_net.runtime.liveness import Watchdog


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
    """As much of a control plane as a watchdog needs."""

    rank, size, generation, lost, failed_key = 0, 2, 0, set(), "failed"

    def __init__(self, store: SlowStore):
        self.store, self.said = store, []

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
    reasons, control = [], Control(SlowStore(slow, words))
    watchdog = Watchdog(
        control,
        ["here"] * 2,
        [(0, 0), (process.pid, _started(process.pid))],
        30.0,
        lambda: None,
        lambda why, _: reasons.append(why),
        lambda _: None,
    )
    end = time.monotonic() + (30 if blamed else 4)
    while not reasons and time.monotonic() < end:
        time.sleep(0.05)
    watchdog.close()
    process.wait()
    assert reasons == (["rank 1 (process ended without a word) is gone"] if blamed else []), reasons
    assert bool(control.said) == blamed


def test_an_error_of_this_rank_is_not_taken_for_the_loss_of_a_peer():
    """The watchdog meets the error while another thread is about to ask why it met the same one."""
    own = WaitTimeout("rank 0: wait in block 0 waited 2 s")
    seen, control = [], Control(SlowStore(0.0, True))
    watchdog = Watchdog(
        control,
        ["here"] * 2,
        [(0, 0), this_host.own_process()],
        30.0,
        lambda: own,
        lambda *_: seen.append(watchdog.loss()),
        lambda _: None,
    )
    end = time.monotonic() + 30
    while not seen and time.monotonic() < end:
        time.sleep(0.05)
    assert seen == [(str(own), own)]
    assert watchdog.explanation_of(own) is None
    watchdog.close()


def test_a_stranger_is_no_rank():
    """A process that has the number of a rank, but began at another time, is neither watched nor ended."""
    stranger = subprocess.Popen(["sleep", "60"])
    losses = []
    watchdog = Watchdog(
        Control(SlowStore(0.0, False)),
        ["here"] * 2,
        [(0, 0), (stranger.pid, _started(stranger.pid) - 1)],
        30.0,
        lambda: None,
        lambda why, _: losses.append(why),
        lambda _: None,
    )
    stranger.send_signal(signal.SIGSTOP)
    assert watchdog.end_processes({1}) == {1}
    time.sleep(1.2)
    assert watchdog.lost_ranks() == set()
    stranger.send_signal(signal.SIGCONT)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
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
