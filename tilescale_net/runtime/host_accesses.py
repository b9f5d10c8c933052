"""What the host does with symmetric tensors between launches, for the simulator's check for races.

While the check is on, every operator of torch passes here, in the threads that call the package or that are started
meanwhile: modes of torch belong to a thread. One that reads or writes symmetric memory is compared with the transfers of all
ranks, as a kernel's loads and stores are; the threads of a rank count as one. `numpy()` and `tolist()`, which are no
operators, are replaced by functions that say what they read. Ranks meet on the host in the package's collective calls and in
those of torch.distributed.
"""

import functools
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from tilescale_net import errors
from tilescale_net.runtime import simulator

_MAX_RUNS = 4096  # of a tensor that is not in one piece; of one with more only the first ones are looked at
_LOGGER = logging.getLogger("tilescale_net")
_READERS = ("numpy", "tolist")  # methods of tensors
_WITHOUT_DATA = ("new_", "empty", "is_pinned", "_has_compatible")
_thread = threading.local()  # `inside`: whether the mode is on the stack of this thread


def runs(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Address and bytes of each piece that a tensor's elements lie in."""
    if tensor.numel() == 0:
        return []
    dims = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride()) if n > 1 and s > 0)
    inner = 1
    while dims and dims[0][0] == inner:
        inner *= dims.pop(0)[1]
    size, begin = tensor.element_size(), tensor.data_ptr()
    starts = itertools.product(*(range(0, n * s, s) for s, n in reversed(dims)))
    return [(begin + sum(start) * size, inner * size) for start in itertools.islice(starts, _MAX_RUNS)]


class HostAccesses(TorchDispatchMode):
    """Looks at the tensors of each operator that lie in `heaps`, and forgets what is no symmetric memory."""

    def __init__(self):
        super().__init__()
        self.heaps: dict[int, int] = {}  # bytes, by base
        self.met = True  # by torch.distributed, since the last access or launch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave torch.compile as it is without the check; torch before 2.11 ignores this, and compiles nothing."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        meets = "c10d" in func.namespace
        if self.heaps and simulator.races():
            self._look(func, args, kwargs, meets)
        self.met = self.met or meets
        return func(*args, **kwargs)

    def _look(self, func, args, kwargs, meets: bool) -> None:
        name = func._schema.name.split("::")[-1]
        if name.endswith("_like") or name.startswith(_WITHOUT_DATA):
            return
        given = itertools.zip_longest(func._schema.arguments, args)
        for argument, value in [*given, *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)]:
            if argument is None:
                continue
            alias = argument.alias_info
            if alias is not None and not alias.is_write:
                continue  # a view of it is made
            store = _is_filled(argument.name, name, args) if meets else alias is not None
            for tensor in _tensors(value):
                self.access(tensor, store, name)

    def access(self, tensor: torch.Tensor, store: bool, name: str) -> None:
        """The host reads or writes a tensor, by torch's function of this name."""
        from tilescale_net import _simulator

        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return
        begin = tensor.untyped_storage().data_ptr()
        base = next((b for b, size in self.heaps.items() if 0 <= begin - b < size), None)
        if base is None:
            return
        self.settle()
        wrong = _simulator.host_access(base, runs(tensor), store, f"torch's {name} on the host")
        if wrong:
            report(base, wrong)
        if name == "numpy":
            _tell_of_arrays()

    def settle(self) -> None:
        """What other ranks had done when torch.distributed was called comes before what follows."""
        if self.met:
            host_meets()
        self.met = False


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Those of an argument."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _is_filled(argument: str, name: str, args: tuple) -> bool:
    """Whether a collective operator of torch writes its argument, which its schema does not say."""
    if argument != "tensors":
        return argument.startswith("output")
    if name == "broadcast_":
        return torch.distributed.ProcessGroup.unbox(args[1]).rank() != args[2]
    return name != "send"


@functools.cache
def _tell_of_arrays() -> None:
    _LOGGER.warning(
        "numpy() of a symmetric tensor: the check for races has compared what it reads now; what is read or written through "
        "the array later is not followed"
    )


def _reader(name: str) -> Callable:
    inherited = getattr(torch.Tensor, name)

    @functools.wraps(inherited)
    def read(self, *args, **kwargs):
        if _mode.heaps and simulator.races():
            _mode.access(self, False, name)
        return inherited(self, *args, **kwargs)

    return read


class _Hooks:
    """What is put in the place of others while a heap is followed."""

    def __init__(self):
        self.readers: dict[str, Callable] = {}
        self.profile = None  # of threads, before

    def install(self) -> None:
        self.profile = threading.getprofile()
        threading.setprofile(self.begin_thread)
        self.readers = {name: _reader(name) for name in _READERS}
        for name, reader in self.readers.items():
            setattr(torch.Tensor, name, reader)

    def remove(self) -> None:
        if threading.getprofile() == self.begin_thread:
            threading.setprofile(self.profile)
        for name, reader in self.readers.items():
            if torch.Tensor.__dict__.get(name) is reader:
                delattr(torch.Tensor, name)
        self.readers = {}

    def begin_thread(self, frame, event, arg) -> None:
        """The first event of a new thread."""
        sys.setprofile(self.profile)
        if self.profile is not None:
            self.profile(frame, event, arg)
        _follow_thread()


def _raise(base: int, error: errors.DataRace) -> None:
    raise error


# Raises the error of a race in the heap at `base`. worlds.py reports it to the other ranks.
give_up: Callable[[int, errors.DataRace], None] = _raise


def report(base: int, wrong: str) -> None:
    """Raise DataRace; in a world, every rank learns of it."""
    give_up(base, errors.DataRace(f"{wrong} (simulated, seed {simulator.seed()}, visibility {simulator.visibility()})"))


def follow(base: int, size: int) -> None:
    """Look at the host's accesses to a heap from now on, where the check for races is on."""
    if not _mode.heaps:
        _hooks.install()
    _mode.heaps[base] = size
    _follow_thread()


def _follow_thread() -> None:
    """Look at what this thread does, too."""
    if _mode.heaps and not getattr(_thread, "inside", False):
        _below_others(_mode.__enter__)
        _thread.inside = True


def _below_others(change: Callable[[], object]) -> None:
    """Enter or leave at the bottom of the stack: the user's modes end in an order of their own."""
    others = []
    while (top := _get_current_dispatch_mode()) is not None and top is not _mode:
        others.append(_pop_mode(getattr(top, "_mode_key", None)))
    try:
        change()
    finally:
        for mode in reversed(others):
            _push_mode(mode)


def forget(base: int) -> None:
    """The heap is gone. Where it was the last one, other threads keep a mode that looks at nothing."""
    if _mode.heaps.pop(base, None) is None or _mode.heaps:
        return
    _hooks.remove()
    if getattr(_thread, "inside", False):
        _below_others(lambda: _mode.__exit__(None, None, None))
        _thread.inside = False


def is_followed(base: int) -> bool:
    """Whether the host's accesses to a heap are looked at, and so its meetings are known."""
    return base in _mode.heaps


def host_meets(base: int | None = None) -> None:
    """The host of this rank has met those of the others.

    Args:
        base: the heap of the ranks that have met by a call of the package; None where they met by one of torch.distributed,
            after which a rank that has gone on may have finished more than it had then, which is taken to come before, too.
    """
    from tilescale_net import _simulator

    _follow_thread()
    if base is None:
        _simulator.host_meets()
    else:
        _simulator.host_has_met(base)
        if list(_mode.heaps) == [base]:
            _mode.met = False  # a meeting by torch.distributed was before this one, of which is known what came before


def before_launch() -> None:
    """A launch is requested."""
    _follow_thread()
    if _mode.heaps:
        _mode.settle()


def frees(base: int, address: int, size: int) -> None:
    """The host gives back memory of a heap, which may have another use then."""
    from tilescale_net import _simulator

    if not is_followed(base) or not simulator.races():
        return
    _mode.settle()
    if wrong := _simulator.host_access(base, [(address, size)], True, "tilescale_net.free"):
        report(base, wrong)


_mode = HostAccesses()
_hooks = _Hooks()
