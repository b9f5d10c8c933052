"""A rank alone that takes itself for one of several whose peers are always ahead of it, for timing its share of a call.

Its peers' heaps are the upper half of its own, so what it sends crosses this GPU's memory instead of NVLink, at about the
rate that the blocks that send reach there; what peers would send is never written, and their signals are there from the
beginning. So this says what a fused call costs a rank beside its product, not what waiting for real peers costs.
"""

from __future__ import annotations

import torch

from tilescale_net.kernels.collective import Collective
from tilescale_net.runtime import context

SOON = 1 << 60  # no call has so high a number


def pretend(world, ranks: int) -> None:
    """Make `world`, of one rank on a GPU, rank 0 of `ranks`; before any kernel is launched. Its heap is half as large then."""
    memory = world.memory
    half = memory.size // 2
    bases = [memory.base] + [memory.base + half] * (ranks - 1)
    header = context.ContextHeader(
        my_pe=0, n_pes=ranks, node_pe=0, n_node_pes=ranks, n_queues=0, flags=0, heap_base=memory.base, heap_bytes=half,
        abort_word=world.page.address, error=world.page.record_address, timeout_ns=int(world.timeout * 1e9), queues=0,
    )  # fmt: skip
    words = torch.frombuffer(bytearray(context.pack(header, bases)), dtype=torch.int64)
    world.context_tensor.as_strided(words.shape, (1,)).copy_(words)  # the bases lie behind what kernels take
    world.size, world.peer_base = ranks, bases
    Collective.works_with_some = True  # with one member of the job: its peers have not left, they were never there


def hurry(*signals: torch.Tensor) -> None:
    """All that peers could signal has been signalled."""
    for words in signals:
        words.view(torch.int64).fill_(SOON)
