"""Kernel launches with mostly constant arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from tilescale_net.runtime import launch_args
from tilescale_net.runtime.launch_args import constant

if TYPE_CHECKING:
    from tilescale_net.runtime.world import World

Form: TypeAlias = tuple[tuple[int, ...], torch.dtype | None]  # shape and dtype as which a kernel takes a tensor
FLAT: Form = ((-1,), None)
VECTORS: Form = ((-1, 4), torch.int32)  # of 16 bytes


class Launch:
    """A kernel in a world with its constant arguments; a call gives the others.

    Only the kernel's signature has the order of its arguments.

    Args:
        fixed: arguments by name; those that the kernel lacks are ignored.
        given: names of the others, in the order in which a call gives them.
        words: those that the kernel takes as int32 rows of this many words. columns: those that it takes as rows of
            this many elements. forms: those that it takes in another shape, as for `torch.Tensor.view`, of their own
            dtype (None) or another one.
        stand_ins: placeholders for None and for empty tensors.
        turned: those of `forms` whose last two axes are exchanged first.

    Raises:
        TypeError: the others are not exactly these.
    """

    def __init__(
        self, kernel: Any, fixed: Mapping[str, object], given: Sequence[str], world: World, *, words: Mapping[str, int] | None = None,
        columns: Mapping[str, int] | None = None, forms: Mapping[str, Form] | None = None,
        stand_ins: Mapping[str, torch.Tensor] | None = None, turned: Sequence[str] = (),
    ):  # fmt: skip
        names = [name for name in kernel.parameters if name in fixed]
        places = {name: i for i, name in enumerate((*names, *given))}
        if places.keys() != set(kernel.parameters) or len(places) != len(names) + len(given):
            others = ", ".join(name for name in kernel.parameters if name not in fixed)
            raise TypeError(f"kernel {kernel.name} takes {others}, not {', '.join(given)}")
        self._kernel, self._world, self._function = kernel, world, None
        self._values = {name: fixed[name] for name in names}
        values = list(self._values.values())
        # One stays a torch tensor: the launch takes its stream from it if a call gives none.
        kept = next((i for i, value in enumerate(values) if isinstance(value, torch.Tensor)), None)
        self._fixed = tuple(value if i == kept else constant(value) for i, value in enumerate(values))
        self._in_order = operator.itemgetter(*(places[name] for name in kernel.parameters))
        as_is: Form = ((), None)
        rows: dict[str, Form] = {name: ((-1, count), None) for name, count in (columns or {}).items()}
        rows |= {name: ((-1, count), torch.int32) for name, count in (words or {}).items()} | dict(forms or {})
        self._given = {name: (*rows.get(name, as_is), (stand_ins or {}).get(name), name in turned) for name in given}
        self._converts = any(shape or stand_in is not None for shape, _, stand_in, _ in self._given.values())
        self._run = kernel.launcher(world)

    def __call__(self, *given: Any) -> None:
        """Launch on the current stream."""
        if self._converts:
            given = tuple(map(self._converted, given, self._given.values()))
        self._run(*self._in_order(self._fixed + given))

    @staticmethod
    def _converted(value: Any, how: tuple[tuple[int, ...], torch.dtype | None, torch.Tensor | None, bool]) -> Any:
        shape, dtype, stand_in, turned = how
        if stand_in is not None and (value is None or not value.numel()):
            return stand_in
        if not shape:
            return value
        value = value.transpose(-1, -2) if turned else value
        if dtype is not None and value.dtype != dtype:
            # A last axis of one element may have any stride, and one of few too few bytes, for a view of another size.
            whole = value.dim() and value.stride(-1) == 1 and value.shape[-1] * value.itemsize % dtype.itemsize == 0
            value = (value if whole else value.as_strided((value.numel(),), (1,))).view(dtype)
        return value.view(shape)

    def quick(self) -> Callable[..., None]:
        """A faster form with fewer steps between a call and the driver, if available; it refers to this object, not the
        reverse."""
        first = int(self._kernel.takes_context)  # goes first
        places = {name: i for i, name in enumerate(self._kernel.parameters, first)}
        fixed = [(places[name], value) for name, value in self._values.items()]
        if first:
            fixed.append((0, self._world.context_tensor))
        arguments = [(places[name], *how) for name, how in self._given.items()]
        integers = {first + place: (low, high) for place, low, high in self._kernel.integers}
        return launch_args.native_launch(fixed, arguments, self._plain_function, self, integers)

    def _plain_function(self) -> Callable[..., None]:
        self._function = found = self._kernel.plain_function(self._world)
        return found
