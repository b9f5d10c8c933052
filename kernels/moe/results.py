"""New tensors for results, made for less than torch.empty takes to understand its arguments."""

from collections.abc import Hashable

import torch

# Vectors that are made at a time.
MANY = 64


class Empty:
    """Makes tensors [rows, *tail]."""

    def __init__(self, tail: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self._tail = tail
        with torch.inference_mode(False):
            self._one = torch.empty(1, dtype=dtype, device=device)
        self._samples: dict[int, torch.Tensor] = {}

    def __call__(self, rows: int) -> torch.Tensor:
        sample = self._samples.get(rows)
        if sample is None:
            with torch.inference_mode(False):
                sample = self._samples[rows] = self._one.expand(rows, *self._tail)  # takes no memory
        return torch.empty_like(sample)


class Vectors:
    """Makes short vectors of int32, many at a time: parts of one tensor, each given out once."""

    def __init__(self, length: int, device: torch.device):
        self._length, self._device = length, device
        self._left: dict[Hashable, list[torch.Tensor]] = {}

    def next(self, stream: Hashable) -> torch.Tensor:
        """A vector for work of a stream; None stands for one that is captured into a CUDA graph."""
        if stream is None or self._length % 4:  # others would not begin at a multiple of 16 bytes
            return torch.empty(self._length, dtype=torch.int32, device=self._device)
        left = self._left.setdefault(stream, [])
        if not left:
            with torch.inference_mode(False):
                left.extend(torch.empty((MANY, self._length), dtype=torch.int32, device=self._device).unbind(0))
        return left.pop()
