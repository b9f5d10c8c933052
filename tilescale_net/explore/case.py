"""What is explored: kernels that a function launches on every rank, and what must hold when they have ended."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tilescale_net import _simulator
from tilescale_net.errors import ConfigurationError
from tilescale_net.explore import ranks
from tilescale_net.runtime import settings, simulator, worlds

MOST_RANKS = 8


def load(where: str) -> Callable:
    """The function that "script.py::function" names. Raises ConfigurationError: there is no such file or function, or
    the file cannot be imported."""
    path, _, name = where.partition("::")
    if not name or not path:
        raise ConfigurationError(f"{where!r} names no function; write script.py::function")
    if not Path(path).is_file():
        raise ConfigurationError(f"{path} is no file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigurationError(
            f"{path} cannot be imported: {_last_line(error)}; what starts a job belongs below `if __name__ == "
            '"__main__":`'
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        defined = [
            key for key, value in vars(module).items() if callable(value) and value.__module__ == module.__name__
        ]
        raise ConfigurationError(f"{path} has no function {name}; it has {', '.join(sorted(defined)) or 'none'}")
    return function


def _last_line(error: BaseException) -> str:
    """Kind, text and place of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    line = f": {frames[-1].line}" if frames and isinstance(error, AssertionError) and not str(error) else ""
    return f"{type(error).__name__}{': ' if str(error) else ''}{error}{line}{place}"


class Case:
    """A job of `size` ranks in this process, whose kernels are known and have not run.

    Args:
        function: called once for each rank. It makes tensors, and returns a function that launches the rank's kernels, or
            that and one that checks the results: it raises, or returns False, where they are wrong. All three may use
            `tilescale_net` as a rank does, but ranks cannot learn anything from each other on the host.
        size: number of ranks.
        heap_bytes: of the symmetric heap of each rank; default TSN_HEAP_SIZE.
        races: whether what the race detector finds is wrong.

    Raises:
        ConfigurationError: too few or many ranks, or a function that does not do this.
    """

    def __init__(self, function: Callable, size: int = 2, heap_bytes: int | None = None, races: bool = True):
        if not 1 <= size <= MOST_RANKS:
            raise ConfigurationError(f"a check has 1 to {MOST_RANKS} ranks, not {size}")
        self.name = getattr(function, "__name__", "function")
        self.native: Any = None
        self.worlds = ranks.make(size, settings.heap_bytes(heap_bytes, on_gpu=False))
        self._checks: list[Callable | None] = []
        self._kept: list = []  # tensors that launches name by their address
        self.launches: list[list] = []
        # The native part names their memory by its address, so it must be notified when they go.
        self._end = weakref.finalize(self, _close, self.worlds)
        try:
            with _on_the_simulator():
                for world in self.worlds:
                    with worlds.only(world):
                        self._set_up(function)
        except BaseException:
            self.close()
            raise
        self.native = _simulator.Exploration(
            [(w.memory.base, w.page.record_address) for w in self.worlds],
            self._memory(),
            [(at, at + size) for w in self.worlds for at, size in w.unseen()],
            simulator.stack_bytes(),
            races,
            self._wrong,
        )
        for rank, launches in enumerate(self.launches):
            for launch in launches:
                self.native.add_kernel(rank, launch)

    def _set_up(self, function: Callable) -> None:
        try:
            made = function()
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise ConfigurationError(f"{self.name} must be callable without arguments: {error}") from None
            raise
        launch, check = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not callable(launch) or not (check is None or callable(check)):
            raise ConfigurationError(
                f"{self.name} returned {made!r}; it must return a function that launches kernels, or that one and another "
                "that checks their results"
            )
        kept: list[Any] = []
        simulator.recorded_launches = kept
        try:
            launch()
        finally:
            simulator.recorded_launches = None
        if not kept:
            raise ConfigurationError(f"{self.name} launches no kernel on rank {len(self.launches)}")
        self.launches.append([k.launch for k in kept])
        self._kept += [tensor for k in kept for tensor in k.tensors]
        self._checks.append(check)
        for k in kept:
            if k.blocks > k.resident_blocks:
                raise ConfigurationError(
                    f"{self.name}: all {k.blocks} blocks of a kernel must run at a time; {k.resident_blocks} do"
                )

    def _memory(self) -> list[tuple[int, int]]:
        """Address and bytes of all that an execution may change, ascending, in pieces that do not touch."""
        pieces = [piece for world in self.worlds for piece in world.used()]
        for tensor in self._kept:
            storage = tensor.untyped_storage()
            if worlds_of(self.worlds, storage.data_ptr()) is None:
                pieces.append((storage.data_ptr(), storage.nbytes()))
        found: list[tuple[int, int]] = []
        for at, size in sorted(pieces):
            if not size:
                continue
            if found and at <= sum(found[-1]):
                found[-1] = (found[-1][0], max(sum(found[-1]), at + size) - found[-1][0])
            else:
                found.append((at, size))
        return found

    def _wrong(self) -> str:
        """What the checks report of the memory as it is."""
        for rank, (world, check) in enumerate(zip(self.worlds, self._checks)):
            if check is None:
                continue
            with _on_the_simulator(), worlds.only(world):
                try:
                    answer = check()
                except Exception as error:
                    return f"rank {rank}: {_last_line(error)}"
            if answer is False or (isinstance(answer, torch.Tensor) and not bool(answer.all())):
                return f"rank {rank}: the check of {self.name} returned False"
        return ""

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the memory."""
        self.native = None
        self._end()


def _close(made: list[ranks.RankWorld]) -> None:
    for world in made:
        world.close()


def worlds_of(made: list[ranks.RankWorld], address: int) -> ranks.RankWorld | None:
    """The world in whose heap an address lies."""
    return next((w for w in made if 0 <= address - w.memory.base < w.memory.size), None)


@contextlib.contextmanager
def _on_the_simulator() -> Iterator[None]:
    """Kernels are compiled for the simulator, also on a machine with a GPU."""
    saved = os.environ.get(settings.DEVICE.name)
    os.environ[settings.DEVICE.name] = "simulator"
    try:
        yield
    finally:
        if saved is None:
            del os.environ[settings.DEVICE.name]
        else:
            os.environ[settings.DEVICE.name] = saved
