"""The world of a Buffer, and the AllToAll objects that its calls need, made when they are first asked for.

All ranks of a group make the same calls, so they make the same objects in the same order. DeepEP takes any number of
tokens; an AllToAll is made for the largest. The first dispatch agrees on it, and a dispatch of more tokens is refused on
all ranks, which then agree on a larger object and repeat the call.
"""

from __future__ import annotations

import torch

import tilescale_net as tsn
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.runtime import settings, worlds

# Worlds that buffers have made, and how many of them use each.
_users: dict = {}


def join(group, nbytes: int):
    """The world of a group; made, with a heap of at least `nbytes` bytes, where there is none."""
    try:
        world = tsn.world(group)
    except tsn.ConfigurationError:
        raise
    except tsn.TileScaleError:
        on_gpu = settings.device_kind() == "cuda"
        world = tsn.init(max(settings.heap_bytes(None, on_gpu), nbytes), group=group)
        _users[world] = 0
    if world in _users:
        _users[world] += 1
    return world


def leave(world) -> None:
    """Give a world back; the last buffer ends one that a buffer has made."""
    if world in _users:
        _users[world] -= 1
        if not _users[world]:
            del _users[world]
            if world in worlds.alive():
                tsn.finalize(world)


class Objects:
    """The AllToAll objects of a Buffer.

    Attributes:
        max_tokens, top_k: of the high-throughput object that new routings use; 0 before the first.
    """

    def __init__(self, world):
        self.world = world
        self.max_tokens = self.top_k = 0
        self._made: dict[tuple, AllToAll] = {}

    def high_throughput(self, num_experts: int, max_tokens: int, hidden: int, top_k: int, dtype, num_sms: int):
        """For dispatches that give each token once per rank, and their combines in BF16."""
        tuning = Tuning(blocks=num_sms) if self.world.device.type == "cuda" else None
        options = dict(layout="rank", combine_dtype=torch.bfloat16, tuning=tuning)
        return self._object((num_experts, max_tokens, hidden, top_k, dtype, "throughput"), options)

    def low_latency(self, num_experts: int, max_tokens: int, hidden: int, top_k: int, dtype):
        """For low-latency dispatches of one dtype and their combines in BF16."""
        return self._object(
            (num_experts, max_tokens, hidden, top_k, dtype, "latency"), dict(combine_dtype=torch.bfloat16)
        )

    def _object(self, sizes: tuple, options: dict) -> AllToAll:
        key = (*sizes, options.get("tuning"))
        if key not in self._made:
            self._made[key] = AllToAll(*sizes, **options, group=self.world)
        return self._made[key]

    def grow(self, tokens: int) -> bool:
        """Agree with all ranks on room for the most tokens that one of them has; False where there was room."""
        most = max(self.world.control.gather("deep_ep.Buffer.dispatch: tokens", tokens))
        if most <= self.max_tokens:
            return False
        self.max_tokens = 1 << max(6, (most - 1).bit_length())
        return True

    def free(self) -> None:
        """Free all objects; collective."""
        made, self._made = self._made, {}
        for op in made.values():
            if op.alive:
                op.free()
