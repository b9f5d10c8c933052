"""More memory for a heap that is full, agreed by its ranks, at the addresses that it has already.

The address space behind a heap is reserved when it is made (TSN_HEAP_LIMIT). So the base of every rank's heap stays, and
kernels, whose peer addresses are base + offset, go on as they are.
"""

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
    _all_or_none(world, before, lambda: _map(world, handles))
    _tell_kernels(world)
    if world.proxy is not None:
        try:
            _renew_proxy(world)
        except TileScaleError as err:
            world.fail(err)
    control.agree(_CALL, f"{memory.size} bytes")


def level(world, live: dict[int, int]) -> None:
    """After a loss in the middle of `grow`: heaps of one size again, that of before where nothing `live` lies beyond.

    Collective; the proxies begin anew afterwards.

    Args:
        live: blocks of the heap of any rank, offset -> bytes.

    Raises:
        TileScaleError, OSError: this rank has no memory for what lies in others' heaps.
    """
    memory, control = world.memory, world.control
    sizes = control.gather(_CALL, memory.size)
    needed = max((offset + size for offset, size in live.items()), default=0)
    size = min(sizes) if needed <= min(sizes) else max(sizes)
    if size < max(sizes):
        memory.take_back(size)
    elif memory.size < size:
        memory.grow(size)
    if memory.limit > size or min(sizes) < max(sizes):
        _map(world, control.gather(_CALL, memory.grown_handle()))
    _tell_kernels(world)


def _map(world, handles: list) -> None:
    """Map what the other members of the node have added."""
    for pe, handle in zip(world.control.members, handles):
        if pe != world.rank and world.topology.is_direct(pe):
            world.memory.map_grown(pe, handle)


def _tell_kernels(world) -> None:
    world.write_context(context.ContextHeader.heap_bytes.offset, world.memory.size.to_bytes(8, "little"))


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
