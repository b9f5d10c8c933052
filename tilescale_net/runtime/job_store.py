"""The store of the job, through which ranks report facts that collective calls cannot: arrivals, failures, reasons.

Values travel as JSON, signed with the secret of the job. If the host of torch's store is cut off, a request waits
without a limit. So only one thread queries the store; other threads wait for its answer up to a deadline, and count
silence as a failure.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import queue
import reprlib
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

from tilescale_net.errors import PeerLost

T = TypeVar("T")

# -- encoding ------------------------------------------------------------------------------------------------------------

# Values that ranks send each other, as JSON: decoding foreign input yields plain data only.

_BYTES = "\0bytes"  # the only key of an object that encodes bytes


def encode(value: object) -> bytes:
    """Bytes of None, a bool, int, float, str, bytes, list, tuple or dict with str keys, nested at will. Raises
    TypeError: a value of another type."""
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """The value that `encode` was given, tuples as lists. Raises ValueError for anything else."""
    return parse_json(data, _object)


def parse_json(data: bytes | str, object_hook: Callable[[dict[str, Any]], object] | None = None) -> Any:
    """The value of foreign JSON. Raises ValueError for invalid text, however deep it nests."""
    try:
        return json.loads(data.decode() if isinstance(data, bytes) else data, object_hook=object_hook)
    except (UnicodeDecodeError, RecursionError) as err:
        raise ValueError(f"not a value that a rank has sent: {err}") from None


def read(text: str | None, convert: Callable[[Any], T], otherwise: T) -> T:
    """`convert` of another process's JSON; `otherwise` if it is missing or has another shape."""
    try:
        return convert(parse_json(text)) if text else otherwise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError):
        return otherwise


def printable(text: str) -> str:
    """Another process's text without control characters, except line breaks and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def _plain(value: object) -> object:
    if isinstance(value, bytes | bytearray):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == _BYTES:
                raise TypeError(f"a dict with the key {key!r} cannot be sent to other ranks")
        return {k: _plain(v) for k, v in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks")


def _object(fields: dict[str, Any]) -> object:
    if list(fields) != [_BYTES]:
        return fields
    try:
        return base64.b64decode(fields[_BYTES], validate=True)
    except (TypeError, binascii.Error) as err:
        raise ValueError(f"not bytes that a rank has sent: {err}") from None


def check_alike(mine: object, theirs: object) -> None:
    """Raise ValueError unless a value of another rank has the types of this rank's own, and numbers of 64 bits."""
    if isinstance(mine, list | tuple):
        if not isinstance(theirs, list) or len(theirs) != len(mine):
            raise ValueError(f"{reprlib.repr(theirs)} instead of {len(mine)} values")
        for a, b in zip(mine, theirs):
            check_alike(a, b)
    elif type(mine) is not type(theirs):
        raise ValueError(f"a {type(theirs).__name__} instead of a {type(mine).__name__}")
    elif isinstance(theirs, int) and not -(1 << 63) <= theirs < 1 << 64:
        raise ValueError("a number of more than 64 bits")


# -- signed store --------------------------------------------------------------------------------------------------------

# Every process that reaches the port of the store can write there, at least processes of other users of the host. So a
# value counts only with a code that needs the job's secret, for this key of this job; any other counts as not written.
# Other writers can still remove keys, and repeat values under the same key. Counters are such values too: a non-number
# in a counter of torch's own (`add`) ends the connection of each rank that asks.

_CODE = 16  # bytes
_TURNS = 16  # attempts of a rank to write first before it gives up
_NOTHING = "nothing is written here"  # no key holds this value: a comparison with it reads without waiting for the key


class SignedStore:
    """A store of torch in which values count only when they are signed. `store`: torch's, under the prefix of the job.
    `prefix`: that prefix, so that words of one meeting count in no other. `secret`: that the ranks share; None:
    everything counts, and nothing is signed."""

    def __init__(self, store: dist.Store, prefix: str = "", secret: bytes | None = None):
        self._store: Any = store  # whose stubs know no bytes as values
        self._prefix, self._secret = prefix, secret
        self._known: set[str] = set()  # keys that a rank of the job has written; none is ever removed
        self._counts: dict[str, int] = {}  # of counters, when this rank looked last
        self._name = secrets.token_hex(4)  # distinguishes this rank's counts from others'

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value under `key`, replacing an earlier one."""
        self._store.set(key, self._signed(key, value))

    def get(self, key: str) -> bytes | None:
        """The value that a rank has written under `key`; None if none has."""
        return self._read(key, self._store.get(key)) if self._store.check([key]) else None

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """As `get`, with one request; waits until each key has a value."""
        return [self._read(key, word) for key, word in zip(keys, self._store.multi_get(list(keys)))]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether ranks have written each of `keys`."""
        new = [key for key in keys if key not in self._known]
        if not new:
            return True
        if not self._store.check(new):
            return False
        if self._secret is None:
            return True
        return None not in self.get_all(new)

    def set_once(self, key: str, value: str) -> bytes:
        """Write a value under `key` unless a rank has written one; returns its value."""
        mine, stands = self._signed(key, value), b""
        for _ in range(_TURNS):
            stands = self._store.compare_set(key, stands, mine)
            if (said := self._read(key, stands)) is not None:
                return said
        return value.encode()

    def count(self, key: str) -> int:
        """The number of times that ranks have counted `key` up, with one request."""
        return self._number(key, self._store.compare_set(key, _NOTHING, _NOTHING))

    def count_up(self, key: str) -> int:
        """Count `key` up; returns the number. Simultaneous increments may count once."""
        mine = stands = b""
        for _ in range(_TURNS):
            mine = self._signed(key, f"{self._number(key, stands) + 1} {self._name}")
            found = self._store.compare_set(key, stands, mine)
            if found == mine:
                break
            stands = b"" if found == stands else found  # the earlier value may have been removed
        return self._number(key, mine)

    def _number(self, key: str, word: bytes) -> int:
        """The number in a counter's value; the last known one if no rank has written the value."""
        text = (self._read(key, word) or b"").partition(b" ")[0]
        said = int(text) if text.isdigit() and len(text) < 16 else 0
        self._counts[key] = max(said, self._counts.get(key, 0))
        return self._counts[key]

    def _code(self, key: str, value: bytes) -> bytes:
        text = f"{self._prefix}/{key}".encode() + b"\0" + value  # the whole key, wherever the prefix ends
        return hmac.digest(self._secret or b"", text, hashlib.sha256)[:_CODE]

    def _signed(self, key: str, value: str | bytes) -> bytes:
        value = value.encode() if isinstance(value, str) else value
        return value if self._secret is None else self._code(key, value) + value

    def _read(self, key: str, word: bytes) -> bytes | None:
        if self._secret is None:
            return word
        value = word[_CODE:]
        if not hmac.compare_digest(word[:_CODE], self._code(key, value)):
            return None
        self._known.add(key)
        return value


# -- job store -----------------------------------------------------------------------------------------------------------

ALARMS = "alarms"  # key of the number of alarms: failures, and requests for reports
_STEP = 0.25  # seconds; time is counted in steps, so a process that was itself stopped does not blame the store


class JobStore:
    """A part of torch's store, under a prefix of its own.

    Args:
        store: torch's.
        prefix: put before every key, with a slash.
        rank: of this process, for messages.
        silence: seconds without an answer after which the store counts as lost.
        kept_by: the rank whose process keeps the store, in whose numbers `rank` is; None: none of these ranks.
        secret: shared by the ranks, signs their values; None without one.

    Attributes:
        rank, silence, kept_by, secret: the same.
        raw: torch's, under the prefix; for groups of torch, which use it directly.
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
        self._questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked = self._answered = 0
        self._asking = threading.Lock()
        self._lost: str | None = None
        threading.Thread(target=self._serve, name="tilescale_net-store", daemon=True).start()

    def within(self, name: str) -> JobStore:
        """The part of this store under a further name."""
        prefix = f"{self._prefix}/{name}"
        return JobStore(self._store, prefix, self.rank, self.silence, self.kept_by, self.secret)

    def post(self, question: Callable[[SignedStore], T]) -> Future[T]:
        """Have `question(store)` run in its turn. The answer's `result()` raises PeerLost when the store is gone."""
        answer: Future[T] = Future()
        with self._asking:
            self._asked += 1
            self._questions.put((question, answer))
        return answer

    def ask(self, question: Callable[[SignedStore], T], seconds: float | None = None) -> T:
        """The answer to `question(store)`. `seconds`: how long to wait for it; default: until the store counts as lost.
        Raises PeerLost: no answer in time, or the store is gone; names the rank that kept it."""
        answer, seconds = self.post(question), self.silence if seconds is None else seconds
        if not _is_done(answer, seconds):
            raise PeerLost(f"rank {self.rank}: {self.keeper} does not answer (waited {seconds:g} s)")
        return answer.result()

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
        """Number of answered questions; None while none is pending. Constant while the store is silent."""
        done = self._answered
        return done if self._asked > done else None

    @property
    def lost(self) -> str | None:
        """The reason why the store is lost, or None."""
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


def _is_done(answer: Future[Any], seconds: float) -> bool:
    """Whether an answer is there within `seconds`; waits in steps, so that Ctrl-C works and a pause does not count."""
    while not answer.done() and seconds > 0:
        wait([answer], min(_STEP, seconds))
        seconds -= _STEP
    return answer.done()


def has_agent() -> bool:
    """Whether the store outlives rank 0: the launcher keeps it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def get_text(store: SignedStore, key: str) -> str | None:
    """The value written under `key`; None if none was."""
    word = store.get(key)
    return None if word is None else word.decode(errors="replace")


def failed_key(generation: int) -> str:
    """Key of the first failure, as [rank, text]; `generation`: how often lost ranks were given up."""
    return f"failed in generation {generation}" if generation else "failed"


def run_with_timeout(seconds: float, run: Callable[[], T]) -> T:
    """The result of `run()`, in a thread that is abandoned if it takes longer.

    Raises:
        TimeoutError: it takes longer.
        Any exception of `run`.
    """
    answer: Future[T] = Future()

    def body() -> None:
        try:
            answer.set_result(run())
        except BaseException as err:
            answer.set_exception(err)

    threading.Thread(target=body, name="tilescale_net-join", daemon=True).start()
    if not _is_done(answer, seconds):
        raise TimeoutError
    return answer.result()


def first_line(err: BaseException) -> str:
    """The message of torch's error, without its stack."""
    text = str(err).strip()
    return text.splitlines()[0] if text else type(err).__name__
