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

Form: TypeAlias = tuple[tuple[int, ...], torch.dtype | None]  # shape and dtype in which a kernel takes a tensor
FLAT: Form = ((-1,), None)
VECTORS: Form = ((-1, 4), torch.int32)  # of 16 bytes


class Launch:
    """A kernel in a world with its constant arguments; a call passes the others.

    The order of the kernel's arguments is defined by its signature alone.

    Args:
        constants: constant arguments by name; names that the kernel lacks are ignored.
        varying: names of the other arguments, in the order of a call.
        words: arguments that the kernel takes as int32 rows of this many words. columns: as rows of this many elements.
            forms: in another shape, as for `torch.Tensor.view`, and another dtype unless None.
        placeholders: replace None and empty tensors.
        transposed: arguments whose last two axes are exchanged first.

    Raises:
        TypeError: the arguments of the kernel differ.
    """

    def __init__(
        self, kernel: Any, constants: Mapping[str, object], varying: Sequence[str], world: World, *,
        words: Mapping[str, int] | None = None, columns: Mapping[str, int] | None = None, forms: Mapping[str, Form] | None = None,
        placeholders: Mapping[str, torch.Tensor] | None = None, transposed: Sequence[str] = (),
    ):  # fmt: skip
        names = [name for name in kernel.parameters if name in constants]
        positions = {name: i for i, name in enumerate((*names, *varying))}
        if positions.keys() != set(kernel.parameters) or len(positions) != len(names) + len(varying):
            expected = ", ".join(name for name in kernel.parameters if name not in constants)
            raise TypeError(f"kernel {kernel.name} takes {expected}, not {', '.join(varying)}")
        self._kernel, self._world, self._function = kernel, world, None
        self._values = {name: constants[name] for name in names}
        values = list(self._values.values())
        # One remains a torch tensor: the launch takes its stream from it if a call passes no tensor.
        first_tensor = next((i for i, value in enumerate(values) if isinstance(value, torch.Tensor)), None)
        self._constants = tuple(value if i == first_tensor else constant(value) for i, value in enumerate(values))
        self._in_order = operator.itemgetter(*(positions[name] for name in kernel.parameters))
        as_is: Form = ((), None)
        rows: dict[str, Form] = {name: ((-1, count), None) for name, count in (columns or {}).items()}
        rows |= {name: ((-1, count), torch.int32) for name, count in (words or {}).items()} | dict(forms or {})
        self._conversions = {
            name: (*rows.get(name, as_is), (placeholders or {}).get(name), name in transposed) for name in varying
        }
        self._converts = any(
            shape or placeholder is not None for shape, _, placeholder, _ in self._conversions.values()
        )
        self._run = kernel.launcher(world)

    def __call__(self, *arguments: Any) -> None:
        """Launch on the current stream."""
        if self._converts:
            arguments = tuple(map(self._converted, arguments, self._conversions.values()))
        self._run(*self._in_order(self._constants + arguments))

    @staticmethod
    def _converted(
        value: Any, conversion: tuple[tuple[int, ...], torch.dtype | None, torch.Tensor | None, bool]
    ) -> Any:  # fmt: skip
        shape, dtype, placeholder, transposed = conversion
        if placeholder is not None and (value is None or not value.numel()):
            return placeholder
        if not shape:
            return value
        value = value.transpose(-1, -2) if transposed else value
        if dtype is not None and value.dtype != dtype:
            # A last axis of one element may have any stride, and a short one too few bytes, for a view of another size.
            whole = value.dim() and value.stride(-1) == 1 and value.shape[-1] * value.itemsize % dtype.itemsize == 0
            value = (value if whole else value.as_strided((value.numel(),), (1,))).view(dtype)
        return value.view(shape)

    def quick(self) -> Callable[..., None]:
        """A native launch with less overhead, if available; it refers to this object, not the reverse."""
        first = int(self._kernel.takes_context)  # the context is argument 0
        positions = {name: i for i, name in enumerate(self._kernel.parameters, first)}
        constants = [(positions[name], value) for name, value in self._values.items()]
        if first:
            constants.append((0, self._world.context_tensor))
        arguments = [(positions[name], *conversion) for name, conversion in self._conversions.items()]
        integers = {first + position: (low, high) for position, low, high in self._kernel.integers}
        return launch_args.native_launch(constants, arguments, self._plain_function, self, integers)

    def _plain_function(self) -> Callable[..., None]:
        self._function = function = self._kernel.plain_function(self._world)
        return function
