"""More memory for a heap that is full, agreed by its ranks, at the addresses that it has already.

The address space behind a heap is reserved when it is made (TSN_HEAP_LIMIT). So the base of every rank's heap stays, and
kernels, whose peer addresses are base + offset, go on as they are.
"""

from __future__ import annotations

from tilescale_net.errors import HeapError, TileScaleError
from tilescale_net.runtime import context

_CALL = "tilescale_net: a heap that is full"


def grow(world, size: int) -> None:
    """Give the heap of every member `size` bytes. Collective; waits for the kernels of all of them.

    Raises:
        HeapError: a rank has no memory left, on all ranks alike; nothing has changed then.
        TileScaleError: a kernel or a peer has failed.
    """
    memory, control = world.memory, world.control
    memory.finish_kernels()
    world.check()
    before = memory.size
    _all_or_none(world, before, lambda: memory.grow(size))
    handles = control.gather(_CALL, memory.grown_handle())
    direct = [
        (pe, handle)
        for pe, handle in zip(control.members, handles)
        if pe != world.rank and world.topology.is_direct(pe)
    ]
    _all_or_none(world, before, lambda: [memory.map_grown(pe, handle) for pe, handle in direct])
    at = context.ContextHeader.heap_bytes.offset
    world.write_context(at, memory.size.to_bytes(8, "little"))
    if world.proxy is not None:
        _renew_proxy(world)
    control.agree(_CALL, f"{memory.size} bytes")


def _all_or_none(world, before: int, step) -> None:
    """Take a step that all ranks take, or on all ranks none."""
    error = ""
    try:
        step()
    except (TileScaleError, OSError, MemoryError) as err:
        error = str(err) or type(err).__name__
    said = world.control.gather(_CALL, error)
    failed = [(pe, text) for pe, text in zip(world.control.members, said) if text]
    if failed:
        world.memory.take_back(before)
        pe, text = failed[0]
        raise HeapError(
            f"rank {world.rank}: the symmetric heap of {before} bytes is full and cannot grow, because rank {pe} has no "
            f"memory for it: {text}; free tensors, or set TSN_HEAP_SIZE (or init(heap_bytes=…)) before the memory is taken"
        )


def _renew_proxy(world) -> None:
    """What was sent arrives, then the proxy begins anew with the whole heap."""
    world.proxy.drain()
    world.control.agree(_CALL, "drained")
    if world.proxy.settle():
        world.control.agree(_CALL, "settled")
    world.proxy.pause()
    world.control.agree(_CALL, "paused")
    world.heap.clear_system_area()
    world.memory.synchronize()
    world.proxy.restart(_CALL)
