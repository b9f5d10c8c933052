"""What one rank does right now, as a value that can be sent to other ranks."""

import time

from tilescale_net.runtime import context, profiling
from tilescale_net.trace import events, traced_calls

MOST_WAITS = 64  # that are sent to others, besides the number of all
MOST_SENT = 512


def of_rank(world) -> dict:
    """The state of this process in `world`.

    Returns:
        rank; host: [call, seconds] or None; step: that takes long, or ''; place: in the user's program; kernel: [name, seconds] or None; waits: how many
        threads wait; waiting: of the longest, a dict each with block, thread, line, operation, pe, offset, name, compare,
        wants, has, seconds; sent: [pe, offset, count, value, seconds ago, line] of signals sent, the latest last.
    """
    call = profiling.outermost()
    state = {
        "rank": world.rank,
        "host": list(call) if call else None,
        "step": profiling.current_step(),
        "place": profiling.python_place(),
        "kernel": None,
        "waits": 0,
        "waiting": [],
        "sent": [],
    }
    if getattr(world, "heap", None) is None:
        return state  # it is being made
    if world.device_kind == "simulator":
        _add_simulated(state, world)
    elif not _add_traced(state, world):
        _add_record(state, world)
    return state


def _add_simulated(state: dict, world) -> None:
    from tilescale_net import _simulator

    live, now = _simulator.live_state(), time.monotonic_ns()
    if live["kernel"]:
        state["kernel"] = [live["kernel"].removesuffix("_kernel"), (now - live["began_ns"]) * 1e-9]
    waits = sorted(live["waits"], key=lambda wait: wait["since_ns"])
    state["waits"] = len(waits)
    for wait in waits[:MOST_WAITS]:
        found = _subject(world, wait["operation"], wait["word"], wait["comparison"], wait["wanted"], wait["has"])
        found |= {key: wait[key] for key in ("block", "thread", "line", "pe")}
        state["waiting"].append(found | {"seconds": (now - wait["since_ns"]) * 1e-9})
    state["sent"] = [
        [pe, word - world.memory.base, count, value, (now - at) * 1e-9, line]
        for pe, word, count, value, at, line in _simulator.sent_signals(MOST_SENT)
        if 0 <= word - world.memory.base < world.memory.size
    ]


def _add_traced(state: dict, world) -> bool:
    """What kernels on a GPU have noted in its trace; False where none is written, or no thread waits."""
    gpu = world.recorder.gpu_calls if world.recorder is not None else None
    if gpu is None:
        return False
    calls, now = gpu.calls(), time.monotonic_ns()

    def since(gpu_ns: int) -> float:
        return (now - gpu.process_ns(gpu_ns)) * 1e-9

    sent: dict[tuple[int, int], list] = {}
    for known in traced_calls.signals(calls.ended):
        call = known.call
        count = sent.pop((call.pe, call.word), (0, 0, 0))[2]
        sent[call.pe, call.word] = [call.pe, call.word, count + 1, call.value, since(call.end_ns), known.site.line]
    state["sent"] = [*sent.values()][-MOST_SENT:]
    if not calls.waits:
        return False
    state["kernel"] = [calls.waits[0].kernel, since(calls.waits[0].call.begin_ns)]
    state["waits"] = len(calls.waits)
    for known in calls.waits[:MOST_WAITS]:
        call, site = known.call, known.site
        has_word = call.word != events.NO_WORD
        found = _subject(
            world,
            context.OPERATIONS.index(site.operation),
            world.memory.base + call.word if has_word else 0,
            1 + context.COMPARISONS.index(site.compare) if site.compare else 0,
            call.value,
            gpu.word(call.word) if has_word else 0,
        )
        found |= {"block": call.block, "thread": call.thread, "line": site.line, "pe": call.pe}
        state["waiting"].append(found | {"seconds": since(call.begin_ns)})
    return True


def _add_record(state: dict, world) -> None:
    """What a GPU leaves behind: the first thread that gave up."""
    record = world.page.record()
    if record is None or record.kind not in (1, 2, 3):
        return
    found = _subject(world, record.operation, record.address, record.comparison, record.expected, record.observed)
    found |= {"block": record.block, "thread": None, "line": "", "pe": record.pe, "seconds": world.timeout}
    state["waits"], state["waiting"] = 1, [found]


def _subject(world, operation: int, word: int, comparison: int, wanted: int, has: int) -> dict:
    known = operation < len(context.OPERATIONS)
    offset = word - world.memory.base if word else None
    wanted, has = (value - (1 << 64) if value >= 1 << 63 else value for value in (wanted, has))
    return {
        "operation": context.OPERATIONS[operation] if known else f"operation {operation}",
        "offset": offset,
        "name": world.heap.describe(offset) if offset is not None else None,
        "compare": context.COMPARISONS[comparison - 1] if 0 < comparison <= len(context.COMPARISONS) else "",
        "wants": wanted if word else None,
        "has": has if word else None,
    }
