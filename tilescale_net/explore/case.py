"""A job to explore: kernels that a function launches on every rank, and the checks of their results."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from tilescale_net import _simulator
from tilescale_net.errors import ConfigurationError, TileScaleError
from tilescale_net.runtime import context, settings, simulator, worlds
from tilescale_net.runtime.context import Records
from tilescale_net.runtime.control import CallLog
from tilescale_net.runtime.heap import Heap
from tilescale_net.runtime.placement import Topology
from tilescale_net.runtime.simulator import SharedMemory, SimulatorMemory
from tilescale_net.runtime.world import World

# -- ranks of a job in one process, run in sequence: their worlds and collective calls
# ----------------------------------


TIMEOUT = 30.0  # of waits, during which time stands still


class SameCalls:
    """The collective calls of ranks that run in sequence: each must make the same calls as the first one. No rank
    learns anything from another: a call that gathers values returns a rank's own value for all."""

    def __init__(self, rank: int, size: int, made: list[tuple[str, object]]):
        self.rank, self.size, self.job_ranks = rank, size, list(range(size))
        self.members, self.excluded, self.generation, self.lost = list(range(size)), False, 0, set[int]()
        self.on_collective_begin, self.on_collective_done = (lambda: None), (lambda: None)
        self._made, self._at = made, 0

    def agree(self, call: str, arguments: str = "", described_as: str | None = None) -> None:
        self._compare(call, arguments)

    def gather(self, what: str, value: object) -> list:
        self._compare(what, value)
        return [value] * self.size

    def broadcast(self, what: str, value: str) -> str:
        self._compare(
            what, value if self.rank == 0 else self._made[self._at][1] if self._at < len(self._made) else value
        )
        return str(self._made[self._at - 1][1])

    def keep(self, members: list[int], call: str) -> None:
        self._compare(call, members)

    def _compare(self, call: str, value: object) -> None:
        if self.rank == 0:
            self._made.append((call, value))
        elif self._at >= len(self._made) or self._made[self._at] != (call, value):
            other = self._made[self._at] if self._at < len(self._made) else "nothing more"
            raise ConfigurationError(
                f"rank {self.rank} calls {call} with {value!r}, where rank 0 called {other}: in a check ranks are set up one "
                "after the other, so they must make equal calls, and cannot learn anything from each other before the kernels run"
            )
        self._at += 1


class RankWorld(World):
    """A World of a rank whose peers are in the same process."""

    def __init__(self, rank: int, size: int, heap_bytes: int, made: list[tuple[str, object]]):
        self.timeout, self.proxy, self.recorder, self.closed = TIMEOUT, None, None, False
        control: Any = SameCalls(rank, size, made)  # instead of a Control
        self.control = control
        self.calls = CallLog(self.control)
        self.group, self.job_ranks, self.rank, self.size = None, tuple(range(size)), rank, size
        self.topology = Topology(rank, size, rank, 0, 1, rank, size, True, (size,))
        self.memory = SimulatorMemory(heap_bytes)
        self.device_kind, self.device = self.memory.device_kind, self.memory.device
        self.page = context.AbortPage()
        self.page.address = self.memory.pinned(context.ABORT_PAGE_BYTES)
        self.records = Records(self.memory.pinned)
        self.heap = Heap(self.memory, self.control.agree, rank)
        self.races = SharedMemory(_simulator.race_memory_bytes(heap_bytes))

    def connect(self, worlds: list[RankWorld]) -> None:
        """Make the context after all ranks are set up."""
        self.peer_base = [w.memory.base for w in worlds]
        pages = [w.races.base for w in worlds]
        _simulator.attach_race_memory(self.rank, self.memory.base, self.memory.size, pages, self.peer_base)
        self._make_context()

    @property
    def failure(self) -> None:
        """None: errors are raised at once."""
        return None

    def check(self) -> None:
        """No kernel runs before the check."""

    def synchronize(self) -> None:
        """Nothing runs."""

    def barrier(self) -> None:
        self.control.agree("tilescale_net.barrier")

    def fail(self, error: TileScaleError) -> NoReturn:
        raise error

    def error(self) -> str:
        """The error of a kernel that gave up; "" without one."""
        record = self.page.record()
        if record is None:
            return ""
        base, name_of = self.memory.base, self.heap.describe
        return str(context.describe_error(record, self.rank, self.size, base, self.timeout, name_of) or "")

    def used(self) -> list[tuple[int, int]]:
        """Address and bytes of memory that a launch may change besides its tensors: the heap's used part, context,
        page."""
        end = max([context.SYSTEM_BYTES, *(at + size for at, size in self.heap.live.items())])
        return [(self.memory.base, end), *self.unseen()]

    def unseen(self) -> list[tuple[int, int]]:
        """Address and bytes of the abort page."""
        bytes_of_context: torch.Tensor = self._context_bytes
        return [(self.page.address, context.ABORT_PAGE_BYTES), (bytes_of_context.data_ptr(), bytes_of_context.numel())]

    def close(self, described_as: str | None = None) -> None:
        self.closed = True
        self.page.close()
        self.memory.close()
        self.races.close()


def make_worlds(size: int, heap_bytes: int) -> list[RankWorld]:
    """The worlds of all ranks of a job."""
    made: list[tuple[str, object]] = []
    worlds = [RankWorld(rank, size, heap_bytes, made) for rank in range(size)]
    for world in worlds:
        world.connect(worlds)
    return worlds


# -- the case ----------------------------------------------------------------------------------------------------------


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
            f"{path} cannot be imported: {_last_line(error)}; code that starts a job belongs below `if __name__ == "
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
        function: called once for each rank. It makes tensors, and returns a function that launches the rank's kernels,
            or that one and another that checks the results: it raises, or returns False, if they are wrong. All three
            may use `tilescale_net` as a rank does, but ranks cannot communicate on the host.
        size: number of ranks.
        heap_bytes: of the symmetric heap of each rank; default TSN_HEAP_SIZE.
        races: whether races count as wrong.

    Raises:
        ConfigurationError: too few or many ranks, or an unsuitable function.
    """

    def __init__(self, function: Callable, size: int = 2, heap_bytes: int | None = None, races: bool = True):
        if not 1 <= size <= MOST_RANKS:
            raise ConfigurationError(f"a check has 1 to {MOST_RANKS} ranks, not {size}")
        self.name = getattr(function, "__name__", "function")
        self.native: Any = None
        self.worlds = make_worlds(size, settings.heap_bytes(heap_bytes, on_gpu=False))
        self._checks: list[Callable | None] = []
        self._kept: list = []  # tensors that launches refer to by address
        self.launches: list[list] = []
        # The native part refers to their memory by address, so it must be notified when they die.
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
        """Address and bytes of all memory that an execution may change, ascending, in separate pieces."""
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
        """The checks' report of the current memory."""
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
        """Release the memory."""
        self.native = None
        self._end()


def _close(made: list[RankWorld]) -> None:
    for world in made:
        world.close()


def worlds_of(made: list[RankWorld], address: int) -> RankWorld | None:
    """The world whose heap has an address."""
    return next((w for w in made if 0 <= address - w.memory.base < w.memory.size), None)


@contextlib.contextmanager
def _on_the_simulator() -> Iterator[None]:
    """Compile kernels for the simulator, also on a machine with a GPU."""
    saved = os.environ.get(settings.DEVICE.name)
    os.environ[settings.DEVICE.name] = "simulator"
    try:
        yield
    finally:
        if saved is None:
            del os.environ[settings.DEVICE.name]
        else:
            os.environ[settings.DEVICE.name] = saved
