"""A kernel in a world with those of its arguments that never change."""

import operator
from collections.abc import Callable, Mapping, Sequence

import torch

from tilescale_net.kernels.moe.config import as_words
from tilescale_net.runtime import launch_args
from tilescale_net.runtime.launch_args import constant


class Launch:
    """A kernel in a world, with those of its arguments that are the same in every call; a call gives the others.

    So the order of a kernel's arguments stands in its signature alone.

    Args:
        fixed: arguments by name; what the kernel does not take is left out.
        given: names of the others, in the order in which a call gives them.
        words: of those, tensors that the kernel takes as int32 rows of so many words. columns: of those, tensors that it takes
            as rows of so many elements.
        stand_ins: of those, what the kernel gets in the place of None and of a tensor without elements.

    Raises:
        TypeError: the others are not exactly these.
    """

    def __init__(
        self, kernel, fixed: Mapping[str, object], given: Sequence[str], world, *, words: Mapping[str, int] | None = None,
        columns: Mapping[str, int] | None = None, stand_ins: Mapping[str, torch.Tensor] | None = None,
    ):  # fmt: skip
        names = [name for name in kernel.parameters if name in fixed]
        places = {name: i for i, name in enumerate((*names, *given))}
        if places.keys() != set(kernel.parameters) or len(places) != len(names) + len(given):
            others = ", ".join(name for name in kernel.parameters if name not in fixed)
            raise TypeError(f"kernel {kernel.name} takes {others}, not {', '.join(given)}")
        self._kernel, self._world, self._function = kernel, world, None
        self._values = {name: fixed[name] for name in names}
        values = list(self._values.values())
        # One stays a torch tensor: the launch takes its stream from it where a call gives none.
        kept = next((i for i, value in enumerate(values) if isinstance(value, torch.Tensor)), None)
        self._fixed = tuple(value if i == kept else constant(value) for i, value in enumerate(values))
        self._in_order = operator.itemgetter(*(places[name] for name in kernel.parameters))
        words, stand_ins = words or {}, stand_ins or {}
        rows = (columns or {}) | words
        self._given = {name: (rows.get(name, 0), name in words, stand_ins.get(name)) for name in given}
        self._converts = any(count or stand_in is not None for count, _, stand_in in self._given.values())
        self._run = kernel.launcher(world)

    def __call__(self, *given) -> None:
        """Launch on the current stream."""
        if self._converts:
            given = tuple(map(self._converted, given, self._given.values()))
        self._run(*self._in_order(self._fixed + given))

    @staticmethod
    def _converted(value, how: tuple[int, bool, torch.Tensor | None]):
        columns, words, stand_in = how
        if stand_in is not None and (value is None or not value.numel()):
            return stand_in
        if words:
            return as_words(value, columns)
        return value.view(-1, columns) if columns else value

    def quick(self) -> Callable[..., None]:
        """The same with fewer steps between a call and the driver, where that can be; it holds this object, and not the
        other way round.
        """
        first = int(self._kernel.takes_context)  # in front of all others
        places = {name: i for i, name in enumerate(self._kernel.parameters, first)}
        fixed = [(places[name], value) for name, value in self._values.items()]
        if first:
            fixed.append((0, self._world.context_tensor))
        given = [(places[name], *how) for name, how in self._given.items()]
        integers = {first + place: (low, high) for place, low, high in self._kernel.integers}
        return launch_args.native_launch(fixed, given, self._plain_function, self, integers)

    def _plain_function(self):
        self._function = self._kernel.plain_function(self._world)
        return self._function
