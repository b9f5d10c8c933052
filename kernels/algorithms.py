"""Table of all-reduce algorithms. A file in the package or outside has a kernel and registers a row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# Symmetric memory to allocate: shape and dtype by name.
BufferSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]
# Repeats a launch for another `out` and `x`; None: not possible.
Again = Callable[[torch.Tensor, torch.Tensor], None] | None


class Call(NamedTuple):
    """The tensors of one launch.

    Attributes:
        out, x: contiguous [count] of one dtype, disjoint or the same; `count` is equal on all ranks.
        tag: encodes the arguments on which the ranks have agreed; see `collective.call_word`.
        zero_copy: `x` has the same offset in every PE's heap, and so has `out` unless `overwrite_x`.
        overwrite_x: the kernel may use `x`, which is not `out`, as scratch.
    """

    out: torch.Tensor
    x: torch.Tensor
    tag: int
    zero_copy: bool
    overwrite_x: bool


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of all-reduce. Functions get the `AllReduce` (`n_pes`, `threads`, `blocks`, `status_record`, …) as `op`.

    Args:
        name: for `AllReduce(algorithm=name)`.
        launch: `(op, memory, call)` launches the kernel on the current stream. `memory` has the tensors of `buffers` and
            `counters` by name. It may return `again(out, x)`, which repeats the launch for other tensors of this size,
            dtype, alignment to 16 bytes, tag and options; at other offsets only if `call` is not zero_copy.
        capacity: `(op)` -> largest tensor of a launch in bytes; larger ones are reduced in pieces. A multiple of 16.
        buffers: `(op)` -> shape and dtype, by name, of zeroed symmetric memory.
        counters: `(op)` -> number, by name, of zeroed uint64 words in local memory.
        auto_up_to: `(op)` -> bytes up to which "auto" chooses the row; the last registered one wins. 0: only by name.
        zero_copy: launches use whole tensors in place, if their offset is the same in all heaps (`Call.zero_copy`).
        dtypes: supported dtypes; None: all of `AllReduce.DTYPES`.
        across_nodes: supports PEs that are not mapped; otherwise AllReduce(algorithm=name) sums by node there.
        is_exact: sums are in float32, in the order of the PEs, and rounded once, like all other rows. Inexact rows are
            chosen only by name, and raise between PEs that are not mapped, unless `across_nodes`.
    """

    name: str
    launch: Callable[[Any, dict[str, torch.Tensor], Call], Again]
    capacity: Callable[[Any], int]
    buffers: Callable[[Any], BufferSpecs]
    counters: Callable[[Any], dict[str, int]]
    auto_up_to: Callable[[Any], int] = lambda op: 0
    zero_copy: bool = False
    dtypes: tuple[torch.dtype, ...] | None = None
    across_nodes: bool = False
    is_exact: bool = True


# By name, in the order of registration.
ALGORITHMS: dict[str, Algorithm] = {}


def register_algorithm(row: Algorithm) -> None:
    """Register an algorithm of all-reduce for later constructors of `AllReduce`; on all ranks.

    Args:
        row: the algorithm.

    Raises:
        ValueError: the name is taken.
    """
    if row.name == "auto" or row.name in ALGORITHMS:
        raise ValueError(f"register_algorithm: there is an algorithm {row.name!r}; take another name")
    ALGORITHMS[row.name] = row
