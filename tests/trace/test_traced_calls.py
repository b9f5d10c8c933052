"""Calls of primitives by kernels for GPUs in the trace: how kernels record them, and how the trace is read."""

import contextlib
import json
import os
import random
import re
import signal
import threading
import time

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.compiler.test_device_code import everything
from tests.native.builder import build, run
from tests.trace.test_hang_report import caught, exchange, line_of
from tests.trace.test_timeline import ROUNDS, of, rounds
from tilescale_net.compiler import inspect, jit, lowering
from tilescale_net.compiler.toolchain import SM_90
from tilescale_net.runtime import context
from tilescale_net.trace import events as trace_events
from tilescale_net.trace import timeline
from tilescale_net.trace import traced_calls as reader
from tilescale_net.trace.events import Kind
from tilescale_net.trace.traced_calls import CallSite, KernelSites

needs_gpus = pytest.mark.skipif(ranks.gpus() < 2, reason="needs two GPUs; the simulator has a trace of its own")
SITES = KernelSites(
    7,
    "demo",
    (
        CallSite("N.put_signal", "put_signal", "", "demo.py:1"),
        CallSite("N.wait", "wait", "ge", "demo.py:2"),
        CallSite("N.quiet", "quiet", "", "demo.py:3"),
        CallSite("N.put_thread", "put", "", "demo.py:4"),
        CallSite("a part", "range_begin", "", "demo.py:5"),
        CallSite("N.range_end", "range_end", "", "demo.py:5"),
        CallSite("demo", "kernel", "", ""),
    ),
)


@pytest.fixture(scope="module")
def program():
    return build("traced_calls", ["tests/device/traced_calls.cpp"], flags=("-fsanitize=address,undefined",))


def test_every_primitive_is_traced(monkeypatch):
    monkeypatch.setenv("TSN_TRACE", "t.json")
    kernel = jit.compile(everything(), target=SM_90, name="everything_traced")
    called = set(re.findall(r"TSN_TRACED\((?:[\w:-]+, ){8}tsn::(\w+)[<)]", kernel.source))
    there = set(re.findall(r"tsn::(\w+)[<(]", inspect.cuda_source(everything())))
    assert called == {row.name for row in lowering._TRACED.values()} & there - {"get_rows", "fence"}
    numbers = {int(number) for number in re.findall(r"TSN_TRACED\((\d+),", kernel.source)}
    (found,) = [sites for sites in reader._kernels.values() if sites.name == "everything_traced"]
    # The rows that warps and threads send and fetch are left out, and fences.
    rows = {n for n, site in enumerate(found.calls) if re.fullmatch(r"N.((put|get)_(warp|thread)|fence)", site.name)}
    *calls, itself = found.calls
    assert rows and numbers == set(range(len(calls))) - rows and 0 < found.identity < 1 << 16
    assert all(re.fullmatch(r"test_device_code.py:\d+", site.line) for site in calls)
    assert {site.operation for site in calls} <= {*context.OPERATIONS, "range_begin", "range_end"}
    assert (itself.operation, itself.name) == ("kernel", "everything_traced")
    assert kernel.source.count(f"TSN_TRACED_KERNEL({len(calls)})(") == kernel.source.count("TSN_TRACED_KERNEL") == 1
    assert "some words" in {site.name for site in found.calls}
    assert {"N.put_block", "N.put_signal_warp", "N.wait", "N.wait_block", "N.barrier_all", "N.atomic_add"} <= {
        site.name for site in found.calls
    }
    assert "globaltimer" in kernel.ptx()
    assert {site.compare for site in found.calls if site.operation == "wait"} <= set(context.COMPARISONS)


@tsn.jit
def signals(n):
    @T.prim_func
    def signals(ctx: N.Context(), words: T.Tensor((8,), "uint64"), pe: T.int32):
        with T.Kernel(1, threads=64):
            for i in T.serial(n):
                N.signal_warp(words[0], i, pe)

    return signals


@pytest.mark.nightly
def test_claiming_a_place_waits_for_nothing(monkeypatch):
    """The assembler adds up for the lanes of a warp where it can, and then waits for the result at once."""
    func = signals.trace(9)
    plain = jit.compile(func, target=SM_90).sass()
    monkeypatch.setenv("TSN_TRACE", "t.json")
    traced = jit.compile(func, target=SM_90).sass()
    assert plain.count("GLOBALTIMER") < traced.count("GLOBALTIMER")
    assert traced.count("ATOMG") > plain.count("ATOMG") and traced.count("SHFL") == plain.count("SHFL")


def calls_of(program, tmp_path, capacity, n):
    reader.register_kernel(SITES)
    run(program, str(capacity), str(n), str(tmp_path / "buffer"))
    return reader.read((tmp_path / "buffer").read_bytes(), 0)


def test_calls_are_read_as_they_were_made(program, tmp_path):
    found = calls_of(program, tmp_path, 64, 3)
    assert found.dropped == 0 and len(found.ended) == 3 * 3 + 3 + 2 + 1
    calls = [known for known in found.ended if not known.site.operation.startswith(("range", "kernel"))]
    assert [known.site.name for known in calls] == ["N.put_signal", "N.wait", "N.put_thread"] * 3 + [
        "N.wait",
        "N.quiet",
    ]
    del calls[9:]
    first, word = calls[:3], calls[0].call.word
    assert (first[0].call.pe, first[0].call.bytes, first[0].call.value) == (1, 64, 1)
    assert (first[1].call.word, first[1].call.value) == (word + 8, 2)  # as the wait has seen it
    assert (first[2].call.pe, first[2].call.bytes) == (1, 3 * 16)
    times = [time for known in calls for time in (known.call.begin_ns, known.call.end_ns)]
    assert times == sorted(times)
    # The wait in vain was cut short; later calls of its thread do not count.
    (waits,) = found.waits
    assert waits.call.word == word + 16 and waits.call.value == 5 and waits.site.compare == "ge"
    assert [known.call.value for known in reader.signals(calls)] == [1, 2, 3]


def test_the_oldest_calls_go_first(program, tmp_path):
    found = calls_of(program, tmp_path, 8, 5)
    made = 3 * 5 + 3 + 2 + 1
    assert found.dropped == made - 8
    assert [known.call.number for known in found.ended] == list(range(made - 8, made))


def written(tmp_path, write) -> trace_events.Part:
    """The part that `write` makes of a ring."""
    path = str(tmp_path / "part")
    ring = trace_events.Ring(path, 1, 2, 64)
    write(ring)
    ring.dropped(3)
    ring.close()
    return trace_events.read_file(path, "kernels")


def test_calls_become_events(program, tmp_path):
    found = calls_of(program, tmp_path, 64, 2)
    calls, late = [*found.ended, *found.waits], found.waits[0].call.begin_ns + 10**9
    part = written(tmp_path, lambda ring: reader.write_calls(calls, ring, lambda ns: ns + 5, late + 5))
    # The wait in vain ended, too, and four are waits.
    assert part.dropped == 3 and len(part.events) == 2 * 3 + 1 + 2 + 1 + 4
    waits = [event for event in part.events if event.kind == Kind.WAIT]
    assert waits[-1].end_ns == late + 5 and waits[0].begin_ns == found.ended[1].call.begin_ns + 5
    assert timeline.is_send(part.events[0]) and part.text(part.events[0].line) == "demo.py:1"
    (drawn,) = [event for event in part.events if event.kind == Kind.KERNEL_RANGE]  # the second end has no beginning
    (begun,) = [known.call for known in found.ended if known.site.name == "a part"]
    assert part.text(drawn.name) == "a part" and part.text(drawn.line) == "demo.py:5"
    assert drawn.begin_ns == begun.begin_ns + 5 and drawn.end_ns > drawn.begin_ns
    shown = timeline.merged([part])["traceEvents"]
    assert {"N.put_signal", "N.wait", "waiting"} <= {event["name"] for event in shown}


def test_kernels_are_noted(program, tmp_path):
    found = calls_of(program, tmp_path, 64, 2)
    (launch,) = reader.launches(found.ended)
    calls = [known.call for known in found.ended]
    assert (launch.name, launch.blocks) == ("demo", 1) and calls[-1].begin_ns == launch.begin_ns
    assert launch.begin_ns <= min(c.begin_ns for c in calls) and launch.end_ns >= max(c.end_ns for c in calls)
    (event,) = written(tmp_path, lambda ring: reader.write_launches(found.ended, ring, lambda ns: ns + 5)).events
    assert (event.kind, event.begin_ns, event.end_ns) == (Kind.KERNEL, launch.begin_ns + 5, launch.end_ns + 5)


def block_of(kernel, block, begin, end, blocks=2):
    call = reader.TracedCall(begin_ns=begin, end_ns=end, block=block, value=blocks)
    return reader.KnownCall(kernel, CallSite(kernel, "kernel", "", ""), call)


def test_launches_of_several_blocks(tmp_path):
    blocks = [
        block_of("a", 1, 0, 1),  # its other block is gone
        block_of("a", 0, 2, 6),
        block_of("b", 1, 3, 13),
        block_of("a", 0, 5, 11),  # the same kernel by another stream
        block_of("a", 1, 5, 8),
        block_of("b", 0, 7, 10),
        block_of("a", 1, 9, 12),
    ]
    random.shuffle(blocks)
    found = reader.launches(blocks)
    assert [(one.name, one.begin_ns) for one in found] == [("a", 0), ("a", 2), ("b", 3), ("a", 5)]
    assert {one.end_ns for one in found} == {1, 8, 13, 12} and found[2].end_ns == 13
    part = written(tmp_path, lambda ring: reader.write_launches(blocks, ring, lambda ns: ns))
    assert [event.thread for event in part.events] == [0, 0, 1, 2]


@needs_gpus
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_timeline_of_gpus(tmp_path, nodes):
    path = tmp_path / "t.json"
    ranks.run(2, rounds, 1, env={"VIRTUAL_NODES": nodes, "TSN_TRACE": str(path)})
    found = json.loads(path.read_text())
    events = found["traceEvents"]
    for rank in (0, 1):
        mine = of(events, pid=timeline.process_of(rank))
        for name in ("N.put_signal_block", "N.wait_block", "N.barrier_all"):
            assert len(of(mine, name=name, cat="call")) == ROUNDS
        kernels = of(mine, cat="kernel", name="swap")
        assert len(kernels) == ROUNDS
        slack = 2  # the first thread may leave before others do
        for call in of(mine, cat="call"):
            assert any(
                k["ts"] - slack <= call["ts"] and call["ts"] + call["dur"] <= k["ts"] + k["dur"] + slack
                for k in kernels
            ), "\n".join(f"{e['name']} {e['ts']:.0f} {e['ts'] + e['dur']:.0f}" for e in (call, *kernels))
    starts, ends = of(events, ph="s"), of(events, ph="f")
    assert len(starts) == len(ends) == 2 * ROUNDS and all(s["pid"] != e["pid"] for s, e in zip(starts, ends))


@needs_gpus
def test_the_latest_calls_of_gpus_are_kept(tmp_path):
    path = tmp_path / "t.json"
    ranks.run(2, replay, 40, env={"TSN_TRACE": str(path), "TSN_TRACE_EVENTS": "32"})
    found = json.loads(path.read_text())
    kernels = of(found["traceEvents"], cat="kernel", name="halves")
    assert all(dropped > 100 for dropped in found["otherData"]["dropped"].values()), found["otherData"]
    for rank in (0, 1):
        last = [k for k in kernels if k["pid"] == timeline.process_of(rank)]
        assert 1 <= len(last) <= 32, found["otherData"]


@tsn.jit
def halves(n):
    @T.prim_func
    def halves(ctx: N.Context(), x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(2, threads=64) as block:
            with N.range("half a copy"):
                N.put_block(
                    y[block * n // 2 : (block + 1) * n // 2], x[block * n // 2 : (block + 1) * n // 2], N.my_pe()
                )

    return halves


def replay(times):
    x, y = tsn.zeros(256), tsn.zeros(256)
    kernel = halves(256)
    kernel(x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, y)
    for _ in range(times):
        graph.replay()
    tsn.barrier()


@needs_gpus
def test_kernels_and_ranges_inside_of_graphs(tmp_path):
    path = tmp_path / "t.json"
    ranks.run(2, replay, 3, env={"TSN_TRACE": str(path)})
    events = json.loads(path.read_text())["traceEvents"]
    for rank in (0, 1):
        mine = of(events, pid=timeline.process_of(rank))
        kernels, parts = of(mine, cat="kernel", name="halves"), of(mine, cat="range", name="half a copy")
        assert len(kernels) == 1 + 3 and len(parts) == 2 * 2 * len(kernels)  # by each of two warps of two blocks
        puts = of(mine, cat="call", name="N.put_block")
        assert len(puts) == 2 * len(kernels)
        for put in puts:
            assert any(part["ts"] <= put["ts"] and put["ts"] + put["dur"] <= part["ts"] + part["dur"] for part in parts)


def hang():
    tsn.init("4M")
    flags = tsn.zeros(4, torch.uint64)
    kernel = exchange()

    def ask():
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGUSR1)

    def body():
        tsn.barrier()
        if tsn.rank() == 0:  # whose launch may return when the kernel has ended
            threading.Thread(target=ask).start()
        for i in (1, 2, 3):
            kernel(flags, 3 if i == 3 and tsn.rank() == 1 else 2, i)
        tsn.barrier()

    outcome = caught(body)
    with contextlib.suppress(tsn.TileScaleError):
        tsn.finalize()
    return outcome


@needs_gpus
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_hang_on_gpus_names_line_signal_and_sender(tmp_path, nodes):
    env = {"VIRTUAL_NODES": nodes, "TSN_TRACE": str(tmp_path / "t.json"), "TSN_TIMEOUT": "4"}
    waiting, _ = ranks.launch(2, hang, env=env, init=False, timeout=100)
    error, _, said = waiting.value
    assert error.startswith("WaitTimeout")
    asked, _, late = said.partition("\nrank 1: ")
    for text, seconds in ((asked, 1), (said.rpartition("tilescale_net: ")[2], 4)):
        row = re.search(r"^0 +0 +0 +(\S+) +wait +\[2\] of zeros.* +2 +ge 3 +([\d.]+) s +rank 1$", text, re.M)
        assert row and row[1] == line_of("the wait") and abs(float(row[2]) - seconds) < 1.5, said
    assert "asked by SIGUSR1" in asked and "rank 1 has sent it 2 times, the last time 2" in said
