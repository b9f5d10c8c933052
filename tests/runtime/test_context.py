"""The Python mirror of the context is the C++ definition; the words in which a record of the device reaches the user."""

import ctypes
import os
import re
import subprocess

import pytest

import tilescale_net
from tilescale_net import errors
from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import context, placement
from tilescale_net.runtime.context import COMPARISONS, OPERATIONS, ErrorKind, ErrorRecord

DEVICE = os.path.join(os.path.dirname(tilescale_net.__file__), "device")
CONSTANTS = {
    "kContextVersion": context.VERSION, "kSystemBytes": context.SYSTEM_BYTES, "kMaxPes": context.MAX_PES,
    "kInlineBases": context.INLINE_BASES,
}  # fmt: skip


def test_layout_matches_the_header(tmp_path):
    lines = ["#include <cstdio>", '#include "context.h"', "using namespace tsn;", "int main() {"]
    for cls, name in ((context.ContextHeader, "Context"), (context.ErrorRecord, "ErrorRecord")):
        for field, _ in cls._fields_:
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));'
            )
    lines.append('printf("Context.peer_base %zu\\n", offsetof(Context, peer_base));')
    for name in CONSTANTS:
        lines.append(f'printf("{name} %llu\\n", (unsigned long long){name});')
    shares = '"share[%u] %llu\\n", n, (unsigned long long)queue_share_of(n)'
    lines.append('printf("kMaxQueues %d\\n", kMaxQueues);')
    lines.append(f"for (unsigned n = 0; n <= kMaxQueues; n++) printf({shares});")
    lines.append("}")
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(lines))
    subprocess.run(["g++", "-std=c++17", f"-I{DEVICE}", str(source), "-o", str(tmp_path / "layout")], check=True)
    out = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout
    seen = dict(line.split(" ", 1) for line in out.splitlines())
    for cls, name in ((context.ContextHeader, "Context"), (context.ErrorRecord, "ErrorRecord")):
        for field, _ in cls._fields_:
            d = getattr(cls, field)
            assert seen[f"{name}.{field}"] == f"{d.offset} {d.size}", field
    assert int(seen["Context.peer_base"]) == context.HEADER_BYTES
    assert {name: int(seen[name]) for name in CONSTANTS} == CONSTANTS
    for n in range(int(seen["kMaxQueues"]) + 1):
        header = context.ContextHeader(n_queues=n)
        context.pack(header, [])
        assert int(seen[f"share[{n}]"]) == header.queue_share


def test_names_of_errors_and_operations_match_the_header():
    with open(os.path.join(DEVICE, "context.h")) as f:
        text = f.read()
    kinds = re.search(r"enum ErrorKind.*?\{(.*?)\};", text, re.S).group(1)
    operations = re.search(r"enum Operation.*?\{(.*?)\};", text, re.S).group(1)
    in_header = {name.upper(): int(value) for name, value in re.findall(r"k(\w+) = (\d+)", kinds)}
    assert in_header == {name.replace("_", ""): value for name, value in context.ErrorKind.__members__.items()}
    names = re.findall(r"kOp(\w+) = (\d+)", operations)
    assert [int(v) for _, v in names] == list(range(len(context.OPERATIONS)))
    for (name, _), ours in zip(names, context.OPERATIONS):
        assert name.lower() == ours.replace("_", ""), name


def test_pack_is_header_then_peers():
    data = context.pack(context.ContextHeader(my_pe=3, n_pes=2), [7, 9])
    assert len(data) == context.HEADER_BYTES + 8 * context.INLINE_BASES
    assert ctypes.c_uint64.from_buffer_copy(data, context.HEADER_BYTES + 8).value == 9
    assert not any(data[context.HEADER_BYTES + 16 :])
    assert len(context.pack(context.ContextHeader(), [1] * 200)) == context.HEADER_BYTES + 8 * 200


def test_a_job_has_no_more_ranks_than_descriptors_can_name():
    most = context.MAX_PES
    assert placement.job_topology(most - 1, most, ["host"] * most).size == most
    with pytest.raises(ConfigurationError, match=f"at most {most} ranks, but this one has {most + 1}"):
        placement.job_topology(0, most + 1, ["host"] * (most + 1))


BASE = 1 << 40


def said(kind: str, operation: str, name_of=None, argument=None, **fields) -> errors.TileScaleError:
    numbers = {
        name: value % (1 << 64) if name in ("expected", "observed", "bytes") else value
        for name, value in fields.items()
    }
    kind = ErrorKind[kind.upper().replace(" ", "_")]
    record = ErrorRecord(kind=kind, operation=OPERATIONS.index(operation), **numbers)
    return context.describe_error(record, 2, 4, BASE, 4.0, name_of, argument)


@pytest.mark.parametrize("compare", COMPARISONS)
def test_a_wait_names_its_comparison(compare):
    comparison = 1 + COMPARISONS.index(compare)
    error = said("wait timeout", "wait", comparison=comparison, address=BASE + 512, expected=-3, observed=-9)
    assert isinstance(error, errors.WaitTimeout)
    words = f"waited 4 s for {compare} -3 on the signal at heap offset 512; last seen -9; check that the peer"
    assert words in str(error)


WORD = dict(address=BASE + 512, expected=1)
# Kind, operation, fields of the record; words that its message has, and words that it has not.
MESSAGES = [
    ("wait timeout", "wait", dict(WORD, comparison=3, name_of=lambda at: f"word of {at}"),
     ["on the signal word of 512 (heap offset 512); last seen 0"], []),
    ("wait timeout", "wait", dict(WORD, comparison=1, observed=4),
     ["for eq 1", "last seen 4; the word went past that value", "wait with ge"], []),
    ("wait timeout", "barrier", dict(comparison=3, pe=1, address=BASE + 8, expected=2, observed=1),
     ["for PE 1 at barrier 2; it has come to barrier 1", "several blocks of a PE"], ["sends this signal"]),
    ("wait timeout", "barrier_grid", dict(expected=8, observed=3),
     ["waited 4 s for all blocks of the launch; 3 of 8 have come; all blocks of the launch must call it"], []),
    ("barriers overlap", "barrier", {}, ["barrier in block 0 met another one in flight; one block of a PE at a time"], []),
    ("not direct", "put_signal", dict(pe=1), ["failed: not direct; a source in shared memory"], []),
    ("not direct", "remote", dict(pe=1), ["N.is_direct(pe)"], []),
    ("not symmetric", "put", dict(pe=1, address=BASE + 4096, bytes=-20),
     ["put in block 0 towards PE 1: a size of -20 bytes; a count that is computed at run time was negative"], []),
    ("not symmetric", "put", dict(pe=1, address=BASE - 16, bytes=8),
     [f"8 bytes at address {BASE - 16:#x} are not in the symmetric heap; pass tensors made with"], []),
    ("not symmetric", "put", dict(pe=1, address=BASE + (1 << 33), bytes=8, argument="y"),  # ordinary memory above the heap
     ["towards PE 1: argument y is not symmetric; pass tensors made with"], ["heap offset"]),
]  # fmt: skip


@pytest.mark.parametrize("kind, operation, fields, words, others", MESSAGES)
def test_messages(kind, operation, fields, words, others):
    text = str(said(kind, operation, **fields))
    assert all(word in text for word in words) and not any(word in text for word in others), text
