"""TSN_TRACE writes one timeline of all ranks: its contents, its bounds, and the trace of a killed rank."""

import errno
import json
import os
import random
import signal
import time
from types import SimpleNamespace

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.shorthand import f32, u64
from tests.trace import chrome_format
from tilescale_net import cli
from tilescale_net.errors import ConfigurationError
from tilescale_net.trace import events as trace_events
from tilescale_net.trace import recorder, timeline
from tilescale_net.trace.events import NO_WORD, Event, Kind

ROUNDS = 4
QUICK = {"VIRTUAL_NODES": "2", "TSN_DEVICE": "simulator"}


@tsn.jit
def swap(n, threads=64):
    @T.prim_func
    def main(ctx: N.Context(), x: f32(n), y: f32(n), flag: u64(1), turn: T.int64):
        with T.Kernel(1, threads=threads):
            with N.range("swap data"):
                N.put_signal_block(y, x, (N.my_pe() + 1) % N.n_pes(), flag[0], turn)
                with N.range("for them"):
                    N.wait_slot_block(flag[0], turn - 1, 2)
            N.barrier_node()

    return main


def rounds(slow, die=False):
    x, y, flag = tsn.zeros(1000), tsn.zeros(1000), tsn.zeros(1, torch.uint64)
    kernel = swap(1000)
    for i in range(1, ROUNDS + 1):
        tsn.barrier()
        with tsn.range("a step"):
            time.sleep(0.3 if tsn.rank() == slow else 0)
            kernel(x, y, flag, i)
    tsn.barrier()
    if die and tsn.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def of(events, **wanted):
    return [e for e in events if all(e.get(key) == value for key, value in wanted.items())]


def test_a_timeline_of_two_nodes(tmp_path, capsys):
    path = tmp_path / "t.json"
    ranks.run(2, rounds, 1, env=QUICK | {"TSN_TRACE": str(path)})
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    found = chrome_format.load(path.read_text())
    assert chrome_format.problems(found) == []
    events = found["traceEvents"]
    for rank in (0, 1):
        names = {e["name"] for e in of(events, pid=timeline.process_of(rank))}
        assert {"N.put_signal_block", "N.wait_slot_block", "N.barrier_node", "swap", "tilescale_net.barrier"} <= names
        assert not any(
            "bytes" in e["args"] for e in of(events, pid=timeline.process_of(rank), name="N.wait_slot_block")
        )
        assert len(of(events, pid=timeline.process_of(rank), cat="kernel")) == ROUNDS
        assert len(of(events, pid=timeline.process_of(rank), name="a step", cat="range")) == ROUNDS
        for name in ("swap data", "for them"):
            drawn = of(events, pid=timeline.process_of(rank), name=name, cat="range")
            assert len(drawn) == 2 * ROUNDS  # a block of two warps
            assert all(e["args"]["line"].startswith("test_timeline.py:") for e in drawn)
            assert len({e["tid"] for e in drawn}) == 2
        # The proxy: descriptors taken, posted and completed, and operations applied.
        assert len(of(events, pid=timeline.process_of(rank), cat="proxy", ph="i", name="put_signal")) == ROUNDS
        assert len(of(events, pid=timeline.process_of(rank), name="signal delivered")) >= ROUNDS
        begun, ended = (of(events, pid=timeline.process_of(rank), cat="proxy", ph=ph) for ph in "be")
        assert len(begun) == len(ended) >= ROUNDS and {e["id"] for e in begun} == {e["id"] for e in ended}
    # Arrows lead from a put_signal of the other rank to the wait that saw it.
    starts, ends = of(events, ph="s"), of(events, ph="f")
    assert len(starts) == len(ends) == 2 * ROUNDS
    for start, end in zip(starts, ends):
        assert start["id"] == end["id"] and start["pid"] != end["pid"] and start["ts"] <= end["ts"]
        for arrow, name in ((start, "N.put_signal_block"), (end, "N.wait_slot_block")):
            on_track = of(events, pid=arrow["pid"], tid=arrow["tid"], name=name)
            (slice,) = [e for e in on_track if e["ts"] - 0.002 <= arrow["ts"] <= e["ts"] + e["dur"] + 0.002]
            assert (
                slice["args"]["line"].startswith("test_timeline.py:")
                and "zeros([1], torch.uint64)" in slice["args"]["word"]
            )
    # Rank 1 came late by 0.3 s a round: rank 0 has waited for it.
    total = timeline.waiting(found)
    assert total[0, 1] > 0.1e6 * ROUNDS and total[0, 1] > total.get((1, 0), 0)
    assert cli.main(["trace", str(path), "--longest", "3"]) == 0
    said = capsys.readouterr().out
    assert "rank 1: others waited" in said and said.count("for rank 1  at") == 3 and "not known" not in said


SLICE = {"name": "a", "cat": "c", "ph": "X", "ts": 1.0, "dur": 9.0, "pid": 1, "tid": 1}
FLOW = {**SLICE, "id": 1, "name": "flow"}
del FLOW["dur"]


@pytest.mark.parametrize(
    "changes, said",
    [
        ([{}], ""),
        ([{"ts": float("nan")}], "ts"),
        ([{"ph": "Z"}], "phase"),
        ([{"pid": 0}], "pid"),
        ([{"dur": -1.0}], "dur"),
        ([{"colour": "red"}], "not documented"),
        ([{"tid": 2}], "has no name"),
        ([{}, {"ts": 5.0}], "ends after"),
        ([{"ph": "B", "dur": None}], "B without E"),
        ([{"ph": "i", "dur": None}], "scope"),
        ([{"ph": "b", "dur": None, "id": 7}], "not one b and a later e"),
        ([{}, {**FLOW, "ph": "s", "dur": None}], "not one s and a later f"),
        ([{}, {**FLOW, "ph": "s", "dur": None}, {**FLOW, "ph": "f", "ts": 10.0, "dur": None}], "in no slice"),
        ([{}, {**FLOW, "ph": "s", "dur": None}, {**FLOW, "ph": "f", "ts": 9.999, "dur": None}], ""),
    ],
)
def test_the_format_is_checked(changes, said):
    """Each rule finds what breaks it."""
    named = [
        {"name": f"{kind}_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "x"}} for kind in ("process", "thread")
    ]
    events = [{k: v for k, v in {**SLICE, **change}.items() if v is not None} for change in changes]
    found = chrome_format.problems({"traceEvents": named + events})
    assert said in " ".join(found) and bool(found) == bool(said), found


def test_a_killed_rank_leaves_its_part(tmp_path, capsys):
    path = tmp_path / "t.json"
    env = QUICK | {"TSN_TRACE": str(path), "TSN_TRACE_EVENTS": "16"}
    outcomes = ranks.launch(2, rounds, 0, True, env=env, timeout=100)
    assert outcomes[1].exitcode == -signal.SIGKILL and not outcomes[0].ok
    assert not path.exists() and len(timeline.part_files(str(path), 1)) == 3
    assert cli.main(["trace", str(path)]) == 0
    said = capsys.readouterr().out
    assert "together from the 6 parts" in said
    found = json.loads(path.read_text())
    assert found["otherData"]["ranks"] == 2 and all(n > 0 for n in found["otherData"]["dropped"].values())
    assert (
        "oldest events were dropped" in said
        and len(of(found["traceEvents"], pid=timeline.process_of(1), cat="call")) > 3
    )


def test_files_that_are_not_traces_are_refused(tmp_path, capsys):
    path = tmp_path / "t.json"
    assert cli.main(["trace", str(path)]) == 2 and "cannot be read" in capsys.readouterr().err
    path.write_text("[]")
    assert cli.main(["trace", str(path)]) == 2 and "not a trace" in capsys.readouterr().err
    path.unlink()
    for raw in (b"", b"x" * 4096):
        part = timeline.part_path(str(path), 0, "host")
        with open(part, "wb") as file:
            file.write(raw)
        assert cli.main(["trace", str(path)]) == 2 and "no trace" in capsys.readouterr().err


def made(tmp_path, rank, events, capacity=64, part="kernels"):
    """The part of a rank with these events, by way of its file."""
    path = timeline.part_path(str(tmp_path / "t"), rank, part)
    one = trace_events.Ring(path, rank, 4, capacity)
    for event in events:
        one.add(Event(name=one.name("N.call"), **event))
    one.close()
    return trace_events.read_file(path, part)


def test_times_can_be_corrected(tmp_path):
    """When a ring has come round, too, and only of the kind that was told wrong."""
    one = trace_events.Ring(str(tmp_path / "r.part"), 0, 1, 4)
    for n in range(6):
        one.add(Event(kind=Kind.KERNEL if n % 2 else Kind.HOST, begin_ns=100 * n, end_ns=100 * n + 10))
    one.correct(Kind.KERNEL, lambda ns: ns + 1000)
    one.close()
    found = trace_events.read_file(str(tmp_path / "r.part"), "host").events
    assert [event.begin_ns for event in found] == [200, 1300, 400, 1500]
    assert [event.end_ns for event in found] == [210, 1310, 410, 1510]


def test_a_trace_has_its_room_on_the_disk_from_the_start(tmp_path, monkeypatch):
    """Files were sparse: on a full disk the first event ended the process with SIGBUS."""
    made(tmp_path, 0, [], capacity=1 << 16)
    found = os.stat(timeline.part_files(str(tmp_path / "t"))[0])
    assert found.st_blocks * 512 >= found.st_size > 1 << 22

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    world = SimpleNamespace(rank=0, size=1, device_kind="simulator", control=SimpleNamespace(hosts=["here"]))
    with pytest.raises(ConfigurationError, match="No space left on device.*TSN_TRACE_EVENTS"):
        recorder.Recorder(world, str(tmp_path / "u"))
    assert not list(tmp_path.glob("u*"))


def test_a_damaged_part_is_refused_or_cut(tmp_path):
    made(tmp_path, 0, [dict(kind=Kind.CALL, begin_ns=5, end_ns=9)] * 3)
    raw = open(timeline.part_files(str(tmp_path / "t"))[0], "rb").read()
    assert len(trace_events.read_part(raw, "t", "kernels").events) == 3
    lot = random.Random(1)
    for _ in range(300):
        hurt = bytearray(raw)
        for _ in range(3):
            hurt[lot.choice([lot.randrange(128), lot.randrange(len(raw))])] = lot.randrange(256)
        try:
            trace_events.read_part(bytes(hurt), "t", "kernels")
        except ValueError as err:
            assert str(err).startswith("t is ")


def test_packed_traces_are_not_believed(monkeypatch):
    raw = random.Random(0).randbytes(1000)
    assert trace_events.unpacked(trace_events.packed(raw), "a trace") == raw
    for damaged in (b"", b"no trace", trace_events.packed(raw)[:-5]):
        with pytest.raises(ValueError, match="a trace is (damaged|cut short)"):
            trace_events.unpacked(damaged, "a trace")
    monkeypatch.setattr(trace_events, "_MAX_UNPACKED", 999)
    with pytest.raises(ValueError, match="more than"):
        trace_events.unpacked(trace_events.packed(raw), "a trace")


def test_arrows_follow_word_value_and_time(tmp_path):
    send = dict(kind=Kind.CALL, operation=5, word=512, pe=0)
    early = made(
        tmp_path, 1, [dict(send, begin_ns=10, end_ns=11, value=1), dict(send, begin_ns=30, end_ns=31, value=2)]
    )
    other = made(
        tmp_path, 2, [dict(send, begin_ns=12, end_ns=13, value=9), dict(send, begin_ns=90, end_ns=91, value=1)]
    )
    wait = dict(kind=Kind.CALL, operation=6, word=512, pe=-2, begin_ns=5)
    waits = made(
        tmp_path, 0, [dict(wait, end_ns=20, value=1), dict(wait, end_ns=40, value=7), dict(wait, end_ns=9, value=1)]
    )
    sends = [(part, e) for part in (early, other) for e in part.events]
    matched = timeline.match(sends, [(waits, e) for e in waits.events])
    found = {w.end_ns: (p.rank, s.begin_ns) for w in waits.events if id(w) in matched for p, s in [matched[id(w)]]}
    assert found == {20: (1, 10), 40: (1, 30)}  # by value; else the latest; nothing that came later


@pytest.mark.parametrize("seed", range(3))
def test_clocks_of_hosts(seed):
    """Two hosts whose clocks differ by seconds, and messages that take up to 2 ms."""
    lot, skew = random.Random(seed), random.Random(seed).randrange(-(10**10), 10**10)
    now, sent, first_sent, first_ended = 0, [], [], []
    for _ in range(recorder.ROUNDS):
        here, there = now + lot.randrange(10**5), now + lot.randrange(10**5)
        first_sent.append(here)
        sent.append(there - skew)
        now = max(here, there) + lot.randrange(10**4, 2 * 10**6)
        first_ended.append(now)
        now += lot.randrange(10**4)
    offset, error = recorder.from_rounds(sent, first_sent, first_ended)
    assert abs(offset - skew) <= error < 10**6


def test_parts_of_another_host_are_not_believed(caplog):
    """Their subjects, and kinds of events that do not fit; a damaged part is left out."""
    for source in ("host", "proxy²", "proxy", "proxy-1", ""):
        part = trace_events.Part(1, 2, source, [Event(begin_ns=1, end_ns=2, kind=Kind.ENTRY, pe=-1, word=NO_WORD)])
        assert timeline.merged([part])["otherData"]["ranks"] == 2
    store = SimpleNamespace(
        get=lambda key: b"host\n" + trace_events.packed(b"nonsense") if key == "trace/1/0" else None
    )
    mine = recorder.Recorder.__new__(recorder.Recorder)
    mine._hosts, mine._path = ["here", "there"], "timeline.json"
    mine._world = SimpleNamespace(control=SimpleNamespace(store=SimpleNamespace(ask=lambda question: question(store))))
    assert mine._parts_of(1) == []
    assert "the trace of rank 1 is no trace" in caplog.text and "left out of timeline.json" in caplog.text
