"""How a call begins: every rank sends every rank the number of the call and a tag.

The number (uint64, from 1) lives in device memory, so that a call captured in a CUDA graph can be replayed. The tag
shares the word with it and stands for what must be equal on both ranks: ranks that differ find out before anything
moves.
"""

import ctypes

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

# Bits of a tag, the lower ones of the word; a word of a later call is greater, with any tag.
TAG_BITS = 24
# The words of a status record: code (written last), rank, value, and one that makes 32 bytes of it.
STATUS_WORDS = 4
# The code of the one fault that `compare` reports: another rank makes another call.
OTHER_CALL = 1


@tsn.macro
def report(status, code, rank, value):
    """Write what is wrong with a call where the host sees it, the code last.

    Args:
        status: int64 [STATUS_WORDS].
        code: int32, not 0. rank: whose fault it is. value: of the fault.
    """
    status[1] = T.cast(rank, "int64")
    status[2] = T.cast(value, "int64")
    N.st(status[0], T.cast(code, "int64"), sem="release")


def announcement(call, tag):
    """The word of a rank that has begun call `call` (uint64); with tag 0 the least such word."""
    return (call << T.uint64(TAG_BITS)) | T.cast(tag, "uint64")


@tsn.macro
def announce(ready, index, call, tag, pe):
    """Set word `index` of `ready` at `pe`: this rank has begun call `call`."""
    N.signal(ready[index], announcement(call, tag), pe)


@tsn.macro
def report_other_call(status, rank, call, tag, word):
    """Report that `rank`, whose announcement `word` is, makes another call than this rank.

    A word of an earlier call does not concern this one: the job was aborted during the wait for it.
    """
    if word >= announcement(call, 0):
        theirs = T.cast(word & T.uint64((1 << TAG_BITS) - 1), "int64")
        known = T.if_then_else(word >> T.uint64(TAG_BITS) == call, theirs, T.int64((1 << TAG_BITS) - 1))
        report(status, OTHER_CALL, rank, (T.cast(tag, "int64") << T.int64(TAG_BITS)) | known)


@tsn.macro
def compare(same: T.Ref, rank, call, tag, word, status, reports):
    """same = whether `rank`, whose announcement `word` is, makes the call that this rank makes.

    Args:
        same: int32 variable.
        word: at least that of call `call`; a rank with another call may be through with it and have begun the next one.
        reports: whether this thread reports the one that does not.
    """
    same = T.cast(word == announcement(call, tag), "int32")
    if same == 0 and reports:
        report_other_call(status, rank, call, tag, word)


@tsn.macro
def compare_one(same: T.Ref, rank, call, tag, word, status, reports):
    """As `compare`, where nothing holds up a rank that has finished the call: a word of a later one shows it."""
    same = T.cast(word == announcement(call, tag) or word >= announcement(call + T.uint64(1), 0), "int32")
    if same == 0 and reports:
        report_other_call(status, rank, call, tag, word)


@tsn.macro
def all_agree(agreed: T.Ref, agrees, n_pes):
    """agreed = whether all of agrees [n_pes] are 1. By all threads of a block."""
    agreed = 1
    for p in T.unroll(n_pes):
        agreed = agreed & agrees[p]


class StatusRecord:
    """A record in host memory that kernels write when they refuse a call; reading it does not wait for the GPU."""

    def __init__(self, world):
        nbytes = STATUS_WORDS * 8
        self._records = world.records
        self._address = self._records.take()
        raw = (ctypes.c_char * nbytes).from_address(self._address)
        if world.device.type == "cuda":
            from tilescale_net.runtime.cuda_memory import tensor_at

            self.tensor = tensor_at(self._address, nbytes, world.device).view(torch.int64)
        else:
            self.tensor = torch.frombuffer(raw, dtype=torch.int64)
        self._words = (ctypes.c_int64 * STATUS_WORDS).from_address(self._address)

    def close(self) -> None:
        """Give the record back: no kernel writes it any more."""
        self._words = (ctypes.c_int64 * STATUS_WORDS)()
        del self.tensor
        self._records.give_back(self._address)

    @property
    def written(self) -> bool:
        """Whether there is something to take."""
        return self._words[0] != 0

    def take(self) -> tuple[int, int, int]:
        """Code, rank and value, once; the code is 0 when nothing is wrong."""
        found = self._words[0], self._words[1], self._words[2]
        if found[0]:
            self._words[0] = 0
        return found


class Agreement:
    """The arguments on which ranks have agreed, each with a number that stands for it in the tag of a call.

    Args:
        name: of the collective, shown in errors.
        world: its ranks.
    """

    # Of these tags each stands for a call's arguments; after so many they are given again.
    _TAGS = (1 << TAG_BITS) - 1

    def __init__(self, name: str, world):
        self._name, self._world = name, world
        self._numbers: dict[tuple, int] = {}
        self._texts: list[str] = []
        self._record: StatusRecord | None = None

    @property
    def status(self) -> torch.Tensor:
        """The record that kernels report to, int64 [STATUS_WORDS]; made when it is needed."""
        if self._record is None:
            with torch.inference_mode(False):
                self._record = StatusRecord(self._world)
        return self._record.tensor

    def number(self, describe: str, *arguments) -> int:
        """The tag of a call with these arguments, which ranks compare when they are new: collective then.

        Args:
            describe: text with a `{}` for each argument.
            arguments: hashable.

        Raises:
            RankMismatch: names two ranks whose arguments differ.
        """
        key = (describe, *arguments)
        number = self._numbers.get(key)
        if number is None:
            shown = (list(a) if isinstance(a, torch.Size) else a for a in arguments)
            text = describe.format(*shown)
            self._world.control.agree(self._name, text)
            number = self._numbers[key] = len(self._texts) % self._TAGS
            self._texts.append(text)
        return number

    def has_reported(self) -> bool:
        """Whether kernels have found something that `error` has not taken yet."""
        return self._record is not None and self._record.written

    def close(self) -> None:
        """Give the record back: no kernel writes it any more."""
        record, self._record = self._record, None
        if record is not None:
            record.close()

    def error(self) -> tsn.RankMismatch | None:
        """What kernels found since the last look; does not wait for them."""
        if self._record is None:
            return None
        code, rank, value = self._record.take()
        if code == 0:
            return None
        mine, theirs = value >> TAG_BITS, value & self._TAGS
        other = f"{self._texts[theirs]}" if theirs < len(self._texts) else "something else, and has gone on since"
        return tsn.RankMismatch(
            f"{self._name}: rank {self._world.rank} was called with {self._texts[mine]}; rank {rank} with {other}; nothing "
            "moved between the two: all ranks make the same calls in the same order"
        )
