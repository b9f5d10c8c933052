"""Machine code with its schedule: which instruction waits for which.

The upper bits of an instruction hold what the hardware does not detect: the counter ("scoreboard", 0 to 5) that
the instruction raises until its result is there, another until its operands have been read, and the counters that must be
zero before it is issued. The encoding, the same since Volta, is from Jia, Maggioni, Staiger and Scarpazza, "Dissecting the
NVIDIA Volta GPU Architecture via Microbenchmarking" (arXiv:1804.06826), section 2.1.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilescale_net.compiler import inspect

NONE = 7


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        text: as disassembled, with its predicate.
        result: counter that is raised until the result is there, or None.
        waits: counters that must be zero first.
    """

    text: str
    result: int | None
    waits: frozenset[int]

    @property
    def is_load(self) -> bool:
        return re.match(r"(@!?U?P\w+ +)?LDG", self.text) is not None


@functools.lru_cache(maxsize=16)  # nvdisasm takes seconds for a cubin of ten kernels
def _functions(cubin: bytes) -> dict[str, str]:
    """nvdisasm's output for each kernel of a cubin."""
    _, *sections = re.split(r"\.section\s+\.text\.(\w+)", inspect.disassemble(cubin, "-c", "-hex"))
    return dict(zip(sections[::2], sections[1::2]))


def names(cubin: bytes, entry: str) -> list[str]:
    """The instructions of a kernel, with their suffixes but without operands; needs nvdisasm."""
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", _functions(cubin)[entry])


def schedule(cubin: bytes, entry: str) -> list[Instruction]:
    """All instructions of a kernel in a cubin; needs nvdisasm."""
    listing = _functions(cubin)[entry]
    found = []
    # Two lines each: address, text and lower half; upper half.
    pattern = r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/\n\s*/\* 0x([0-9a-f]{16}) \*/"
    for text, upper in re.findall(pattern, listing):
        control = int(upper, 16) >> 41
        result, mask = control >> 5 & 7, control >> 11 & 63
        waits = frozenset(counter for counter in range(6) if mask >> counter & 1)
        found.append(Instruction(text, None if result == NONE else result, waits))
    return found


def held_up(code: Sequence[Instruction], loads: Sequence[Instruction]) -> list[str]:
    """Instructions that wait for one of `loads`, some of those in `code`, that was issued before them."""
    found, under_way = [], set()
    for instruction in code:
        if instruction.waits & under_way:
            found.append(instruction.text)
        if any(instruction is load for load in loads):
            under_way.add(instruction.result)
    return found
