"""Kernels of this package as an earlier process has left them, without tracing them again.

Tracing and preparing a kernel takes each rank up to half a second, several times what running it takes. Everything that a
kernel of `tilescale_net.kernels` is traced from lies in this package, so a hash of its files and the arguments of the
factory tell whether the kernel is the same. Kernels of other modules are traced every time: what they depend on is unknown.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from tilescale_net.compiler.simulator import cache
from tilescale_net.compiler.simulator.lowered_cache import Lowered
from tilescale_net.runtime import job_store


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a simulated kernel is made of, except for its traced function.

    Attributes:
        name: the kernel's.
        context_index, names, ring_bytes: see passes.Prepared.
        lines: where its primitives stand, see sites.py.
        lowered: the code.
    """

    name: str
    context_index: int | None
    names: tuple[str, ...]
    ring_bytes: int
    lines: tuple[str, ...]
    lowered: Lowered

    def text(self) -> str:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps(fields | {"lowered": self.lowered.text()})

    @classmethod
    def parse(cls, text: str) -> Kept:
        """From `text()`. Raises ValueError, KeyError or TypeError for anything else."""
        fields = job_store.parse_json(text)
        if not isinstance(fields, dict):
            raise TypeError("it is no kernel")
        for name in ("names", "lines"):
            fields[name] = tuple(fields[name])
        return cls(lowered=Lowered.parse(fields.pop("lowered")), **fields)


def get_or_build(name: str, key: str, make: Callable[[], Kept]) -> Kept:
    """The kernel that is kept under `key`, made now if none is."""
    return cache.get_or_write(name, key, ".kept", make, Kept.parse)
