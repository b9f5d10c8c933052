"""Fresh random data for every measurement, and the proof that they arrived: nothing missing, nothing beyond."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # arguments are checked before torch, which takes seconds, is imported
    import torch


class WrongData(RuntimeError):
    """What was measured did not deliver what was sent."""


GUARD = 256  # bytes behind the destination that must stay as they are
POISON = 0xA5


def random_bytes(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """`count` random bytes (uint8), equal on all ranks for the same seed and kind of device."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    words = torch.randint(
        -(2**63), 2**63 - 1, ((count + 7) // 8,), dtype=torch.int64, generator=generator, device=device
    )
    return words.view(torch.uint8)[:count]


def prepare(src: torch.Tensor, dst: torch.Tensor, count: int, seed: int) -> None:
    """Fill `count` bytes of `src` (uint8) with this seed's data and poison `dst` that far and GUARD bytes beyond."""
    src[:count] = random_bytes(count, seed, src.device)
    dst[: count + GUARD] = POISON


def difference(dst: torch.Tensor, count: int, seed: int) -> str | None:
    """What is wrong with `dst` after `count` bytes of this seed's data were copied to it; None when nothing is."""
    import torch

    expected = random_bytes(count, seed, dst.device)
    if not torch.equal(dst[:count], expected):
        wrong = (dst[:count] != expected).nonzero().flatten()
        first = int(wrong[0])
        state = "was not written" if int(dst[first]) == POISON else f"is {int(dst[first])}"
        return f"{len(wrong)} of {count} bytes are wrong; byte {first} {state}, expected {int(expected[first])}"
    beyond = (dst[count : count + GUARD] != POISON).nonzero().flatten()
    if len(beyond):
        return f"byte {count + int(beyond[0])}, beyond the {count} bytes of the copy, was overwritten"
    return None
