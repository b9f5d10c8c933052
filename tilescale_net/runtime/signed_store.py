"""What ranks write to the store of the job, signed with the secret that the ranks of the job share.

Every process that reaches the port of the store can write there: at least those of other users of the host. So a value
counts only with a code that cannot be made without the secret, for this key of this job; any other counts as not
written. Other writers can still remove keys, and repeat what was written under the same key. Counters are such values,
too: torch's own, which `add` counts, end the connection of each rank that asks when one holds no number.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence

import torch.distributed as dist

_CODE = 16  # bytes
_TURNS = 16  # how often another writer may come in between before a rank gives up being the first to write
_NOTHING = "nothing is written here"  # what no key holds: a comparison with it reads, and does not wait for a key


class SignedStore:
    """A store of torch in which values count only when they are signed.

    Args:
        store: torch's, under the prefix of the job.
        prefix: that prefix, so that words of one meeting count in no other.
        secret: that the ranks share; None: everything counts, and nothing is signed.
    """

    def __init__(self, store: dist.Store, prefix: str = "", secret: bytes | None = None):
        self._store, self._prefix, self._secret = store, prefix, secret
        self._known: set[str] = set()  # keys under which a rank of the job has written; none is ever removed
        self._counts: dict[str, int] = {}  # of counters, when this rank looked last
        self._name = secrets.token_hex(4)  # tells this rank's counting from that of others

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value under `key`, in the place of an earlier one."""
        self._store.set(key, self._signed(key, value))

    def get(self, key: str) -> bytes | None:
        """What a rank has said under `key`; None when none has."""
        return self._read(key, self._store.get(key)) if self._store.check([key]) else None

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """As `get`, with one request; waits until something is there under each key."""
        return [self._read(key, word) for key, word in zip(keys, self._store.multi_get(list(keys)))]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether ranks have said something under each of `keys`."""
        new = [key for key in keys if key not in self._known]
        if not new:
            return True
        if not self._store.check(new):
            return False
        if self._secret is None:
            return True
        return None not in self.get_all(new)

    def set_once(self, key: str, value: str) -> bytes:
        """Write a value under `key` unless a rank has written one; returns what is there now."""
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
        """Count `key` up; the number then. Ranks that do so at the same time may be counted once."""
        mine = stands = b""
        for _ in range(_TURNS):
            mine = self._signed(key, f"{self._number(key, stands) + 1} {self._name}")
            found = self._store.compare_set(key, stands, mine)
            if found == mine:
                break
            stands = b"" if found == stands else found  # what stood there may have been removed
        return self._number(key, mine)

    def _number(self, key: str, word: bytes) -> int:
        """The number in what a counter holds; the last one that is known where no rank has written that."""
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
