"""Plans that are used again once no caller holds them, so that a dispatch neither allocates nor converts their tensors."""

import copy
import weakref
from collections.abc import Callable, Hashable
from dataclasses import fields

import torch

from tilescale_net.kernels.moe.handle import ReceivedRows, RoutingPlan
from tilescale_net.runtime.launch_args import kept

# Plans that are kept for each stream; more at a time are made anew.
KEPT = 4


class _Tensors:
    """The tensors of a plan, by the names of its fields; `arguments` holds them as launches take them.

    Args:
        shapes: field -> shape and dtype.
    """

    __slots__ = ("_device", "_shapes", "_taken", "_tensors", "arguments")

    def __init__(self, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device):
        self._shapes, self._device = shapes, device
        self._tensors: dict[str, torch.Tensor] = {}
        self._taken = list(shapes)
        self.renew()

    def take(self, name: str) -> torch.Tensor:
        """A tensor that the caller may keep."""
        self._taken.append(name)
        return self._tensors[name]

    def renew(self) -> None:
        """Make new ones for those that were taken."""
        if not self._taken:
            return
        with torch.inference_mode(False):
            for name in set(self._taken):
                shape, dtype = self._shapes[name]
                self._tensors[name] = torch.empty(shape, dtype=dtype, device=self._device)
        self._taken.clear()
        self.arguments = tuple(kept(self._tensors[name]) for name in self._shapes)


class _Kept:
    """Half of a plan: fields other than `tokens` are there when they are asked for, and are the caller's from then on."""

    _of: _Tensors
    tokens: int

    def __init__(self, tokens: int, tensors: _Tensors):
        self.__dict__.update(tokens=tokens, _of=tensors)

    def __copy__(self):
        return self  # nothing of it changes, and a reference to it keeps the tensors from being used again

    def __deepcopy__(self, memo: dict):
        return self._apart(clone=True)

    def __reduce__(self):
        return copy.copy, (self._apart(clone=False),)

    def _apart(self, clone: bool):
        """A plan of the same kind, whose tensors belong to no AllToAll."""
        kind = next(k for k in (RoutingPlan, ReceivedRows) if isinstance(self, k))
        tensors = {name: getattr(self, name) for name in self._of._shapes}
        return kind(self.tokens, **{name: t.clone() if clone else t for name, t in tensors.items()})

    @property
    def arguments(self) -> tuple:
        return self._of.arguments

    def __getattr__(self, name: str) -> torch.Tensor:
        of = self.__dict__.get("_of")
        if of is None or name not in of._shapes:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return self.__dict__.setdefault(name, of.take(name))


class _KeptRoutingPlan(_Kept, RoutingPlan):
    pass


class _KeptReceivedRows(_Kept, ReceivedRows):
    pass


class Plans:
    """The plans of one AllToAll. They may be held for any time, and their tensors longer.

    A plan is used again on the stream on which it was made, as torch would give out its memory; in a CUDA graph that is
    being captured none is.

    Args:
        kind: RoutingPlan or ReceivedRows. shapes: of its fields but `tokens`, with their dtypes.
        stream: gives what stands for the current stream, or None where none may be used again.

    Attributes:
        stream: what stood for it when the last plan was given out.
    """

    def __init__(
        self, kind: type, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], device, stream: Callable[[], Hashable]
    ):
        assert [f.name for f in fields(kind)] == ["tokens", *shapes]
        self._make = _KeptRoutingPlan if kind is RoutingPlan else _KeptReceivedRows
        self._shapes, self._device, self._stream_now = shapes, device, stream
        self.stream: Hashable = None
        self._kept: dict[Hashable, list[tuple[_Tensors, weakref.ref]]] = {}

    def next(self, tokens: int):
        """A plan for so many tokens, without another holder."""
        stream = self.stream = self._stream_now()
        if stream is None:
            return self._make(tokens, _Tensors(self._shapes, self._device))
        kept = self._kept.setdefault(stream, [])
        for i, (tensors, user) in enumerate(kept):
            if user() is None:
                del kept[i]
                tensors.renew()
                break
        else:
            tensors = _Tensors(self._shapes, self._device)
        plan = self._make(tokens, tensors)
        kept.append((tensors, weakref.ref(plan)))
        del kept[:-KEPT]
        return plan
