"""Objects that ranks have made together, in modules that are copied, pickled or saved whole."""

from __future__ import annotations

import inspect
import itertools
import os
import secrets
import weakref
from collections.abc import Callable

from tilescale_net.errors import TileScaleError

_TOKEN = secrets.token_hex(8)
_numbers = itertools.count()
_pickled: weakref.WeakValueDictionary[int, MadeByRanks] = weakref.WeakValueDictionary()


def process() -> str:
    """This process among all that there are, those that it was forked from too."""
    return f"{_TOKEN}-{os.getpid()}"


class MadeByRanks:
    """Base of such objects: a copy is the object itself, since all ranks share what it stands for.

    What is pickled are the arguments. Loaded while the object is alive, in its process, it is the object; else another one is
    made of them, on the world of the same group: collective, as making the first was.

    Attributes:
        factory: makes another one of the same arguments.
    """

    factory: Callable
    _pickled_as: int | None = None

    def __new__(cls, *args, **named):
        self = super().__new__(cls)
        self.factory, self._given = cls, (args, named)
        return self

    @property
    def alive(self) -> bool:
        """Whether it was neither freed nor ended with its world."""
        raise NotImplementedError

    @property
    def _made_in(self) -> object:
        """The world whose ranks made it."""
        raise NotImplementedError

    def __copy__(self):
        return self

    def __deepcopy__(self, memo: dict):
        return self

    def __reduce_ex__(self, protocol):
        if not self.alive:
            raise TileScaleError(f"{type(self).__name__}: saved after free() or finalize()")
        if self._pickled_as is None:
            self._pickled_as = next(_numbers)
            _pickled[self._pickled_as] = self
        args, named = self._given
        signature = inspect.signature(self.factory)
        bound = signature.bind(*args, **named)
        if "group" in signature.parameters:
            bound.arguments["group"] = self._made_in
        return _load, (process(), self._pickled_as, self.factory, bound.args, bound.kwargs)


def _load(saved_by: str, number: int, factory: Callable, args: tuple, named: dict):
    found = _pickled.get(number) if saved_by == process() else None
    return found if found is not None and found.alive else factory(*args, **named)
