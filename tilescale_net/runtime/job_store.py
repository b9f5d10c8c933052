"""The store of the job, through which ranks report what collective calls cannot: which rank came, which failed, and
why.

torch's store waits for an answer without a limit when the host that keeps it is cut off. So one thread alone queries
it, and a thread that needs an answer waits for that one, up to a deadline: no answer is a reason too.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerYet  # another class than the built-in one before Python 3.11

import torch.distributed as dist

from tilescale_net.errors import PeerLost
from tilescale_net.runtime.signed_store import SignedStore

ALARMS = "alarms"  # key of the number of reasons to look closer: failures, and requests for what the ranks do
_STEP = 0.25  # seconds; time is counted in steps, so that a process that was stopped itself does not blame the store


class JobStore:
    """A part of torch's store, under a prefix of its own.

    Args:
        store: torch's.
        prefix: put before every key, with a slash.
        rank: of this process, for messages.
        silence: seconds without an answer after which the store counts as lost.
        kept_by: the rank whose process keeps the store, in whose numbers `rank` is; None: none of these ranks.
        secret: that the ranks share, with which they sign what they say; None where they share none.

    Attributes:
        rank, silence, kept_by, secret: the same.
        raw: torch's, under the prefix; for groups of torch, which ask by themselves.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        rank: int,
        silence: float,
        kept_by: int | None,
        secret: bytes | None = None,
    ):
        self.rank, self.silence, self.kept_by, self.secret = rank, silence, kept_by, secret
        self.raw = dist.PrefixStore(prefix, store)
        self._store, self._prefix = store, prefix
        self._signed = SignedStore(self.raw, prefix, secret)
        self._questions: queue.SimpleQueue = queue.SimpleQueue()
        self._asked = self._answered = 0
        self._asking = threading.Lock()
        self._lost: str | None = None
        threading.Thread(target=self._serve, name="tilescale_net-store", daemon=True).start()

    def within(self, name: str) -> JobStore:
        """The part of this one under a further name."""
        prefix = f"{self._prefix}/{name}"
        return JobStore(self._store, prefix, self.rank, self.silence, self.kept_by, self.secret)

    def post(self, question: Callable[[SignedStore], object]) -> Future:
        """Have `question(store)` run in its turn. The answer's `result()` raises PeerLost when the store is gone."""
        answer: Future = Future()
        with self._asking:
            self._asked += 1
            self._questions.put((question, answer))
        return answer

    def ask(self, question: Callable[[SignedStore], object], seconds: float | None = None):
        """The answer to `question(store)`.

        Args:
            seconds: how long to wait for it; default: until the store counts as lost.

        Raises:
            PeerLost: no answer in time, or the store is gone; names the rank that kept it.
        """
        answer, left = self.post(question), self.silence if seconds is None else seconds
        while not answer.done() and left > 0:
            try:
                return answer.result(min(_STEP, left))
            except NoAnswerYet:
                left -= _STEP
        if not answer.done():
            raise self.silent(self.silence if seconds is None else seconds)
        return answer.result()

    def silent(self, seconds: float) -> PeerLost:
        """The error for no answer in so many seconds."""
        return PeerLost(f"rank {self.rank}: {self.keeper} does not answer (waited {seconds:g} s)")

    @property
    def keeper(self) -> str:
        """The keeper of the store, as text."""
        if self.kept_by is not None:
            who = f"rank {self.kept_by}"
        else:
            who = "torchrun's agent" if has_agent() else "a process outside of this group"
        return f"{who}, which keeps the store of the job,"

    @property
    def answered(self) -> int | None:
        """How many questions were answered; None while none is waiting. Stands still while the store is silent."""
        done = self._answered
        return done if self._asked > done else None

    @property
    def lost(self) -> str | None:
        """Why the store is gone for good, or None."""
        return self._lost

    def close(self) -> None:
        """Let the thread end when it has sent the waiting questions."""
        self._questions.put(None)

    def _serve(self) -> None:
        while (item := self._questions.get()) is not None:
            question, answer = item
            try:
                if self._lost:
                    raise PeerLost(f"rank {self.rank}: {self._lost}")
                answer.set_result(question(self._signed))
            except PeerLost as err:
                answer.set_exception(err)
            except Exception as err:  # torch raises several classes
                self._lost = f"{self.keeper} is gone. Look at its output ({first_line(err)})"
                answer.set_exception(PeerLost(f"rank {self.rank}: {self._lost}"))
            self._answered += 1


def has_agent() -> bool:
    """Whether the store outlives rank 0: the launcher keeps it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def get(store: SignedStore, key: str) -> str | None:
    """What was written under `key`, None when nothing was."""
    word = store.get(key)
    return None if word is None else word.decode(errors="replace")


def failed_key(era: int) -> str:
    """Key of the first failure, as [rank, text]. Era: how often lost ranks were given up, after which others count."""
    return f"failed in era {era}" if era else "failed"


def within(seconds: float, run: Callable[[], object]):
    """The result of `run()`, which is left behind in a thread of its own when it takes longer.

    Raises:
        TimeoutError: it does.
        Any exception of `run`.
    """
    answer: Future = Future()

    def body():
        try:
            answer.set_result(run())
        except BaseException as err:
            answer.set_exception(err)

    threading.Thread(target=body, name="tilescale_net-join", daemon=True).start()
    end = time.monotonic() + seconds
    while not answer.done() and time.monotonic() < end:
        try:
            return answer.result(0.5)  # short, so that Ctrl-C is heard
        except NoAnswerYet:
            if answer.done():
                break
    if not answer.done():
        raise TimeoutError
    return answer.result()


def first_line(err: BaseException) -> str:
    """The message of an error of torch, without the stack that follows."""
    text = str(err).strip()
    return text.splitlines()[0] if text else type(err).__name__
