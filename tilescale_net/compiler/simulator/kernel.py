"""Kernels that run on the CPU: argument checks, launch geometry, seeds, and errors as exceptions."""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tvm.tirx import PrimFunc

from tilescale_net import errors
from tilescale_net.compiler.kernel import BadArguments, Kernel
from tilescale_net.compiler.simulator import host_compiler, host_source, host_stub
from tilescale_net.compiler.simulator.cache import CachedKernel, Lowered
from tilescale_net.errors import KernelError
from tilescale_net.runtime import context as context_layout
from tilescale_net.runtime import simulator, worlds
from tilescale_net.runtime.context import ContextHeader
from tilescale_net.runtime.launch_args import unresolved

if TYPE_CHECKING:
    from tilescale_net.runtime.world import World

_LOGGER = logging.getLogger("tilescale_net")
# Limits of an SM of an H100 or H200.
_SM_THREADS, _SM_BLOCKS, _SM_SHARED, _BLOCK_SHARED = 2048, 32, 228 * 1024, 227 * 1024
_RESERVED_SHARED = 1024  # taken by the system per resident block
_FAILURES = {1: KernelError, 2: errors.OutOfBounds, 3: errors.SimulatorDeadlock, 5: errors.DataRace}
_PACK = {
    "float": "<f", "double": "<d", "int": "<i", "unsigned": "<I", "uint": "<I", "unsigned int": "<I", "int64_t": "<q",
    "uint64_t": "<Q", "long": "<q", "long long": "<q", "unsigned long long": "<Q", "short": "<h", "ushort": "<H",
    "signed char": "<b", "char": "<b", "uchar": "<B", "int8_t": "<b", "uint8_t": "<B", "int16_t": "<h",
    "uint16_t": "<H", "int32_t": "<i", "uint32_t": "<I", "bool": "<?",
}  # fmt: skip


def resident_blocks(threads: int, shared_bytes: int) -> int:
    """Resident blocks of the simulated GPU, with SMs like an H200's."""
    per_sm = min(_SM_BLOCKS, _SM_THREADS // threads, _SM_SHARED // (shared_bytes + _RESERVED_SHARED))
    return max(1, per_sm) * simulator.num_sms()


class SimulatedFunction:
    """A kernel of tilelang as a function of all its arguments, compiled for the host and callable with CPU tensors.

    Args:
        name: the kernel's name.
        lowered: for an architecture without asynchronous copies (sm_70).
        context_index: which argument is the context (see device/context.h), or None.
        lines: source lines of the author's primitives, with their names or names of ranges that begin there, see
            sites.py.

    Calls take the kernel's arguments in order (torch CPU tensors, ints, floats; None for an optional tensor), run the
    kernel to its end, and raise: KernelError for arguments that do not fit or for a kernel that misuses a primitive,
    OutOfBounds, DataRace, SimulatorDeadlock, and errors in the kernel's context (WaitTimeout, PeOutOfRange, …). Every
    error names the seed that repeats the schedule.

    Raises:
        SimulatorUnsupported: the compiler refuses the kernel.
        ConfigurationError: no C++ compiler, or no CUDA headers.
    """

    def __init__(
        self, name: str, lowered: Lowered, context_index: int | None = None, lines: Sequence[str] = ()
    ) -> None:
        from tilescale_net import _simulator

        self.name = name
        self.context_index = context_index
        self._lines = [line.partition("\t")[0] for line in lines]
        self._names = [line.partition("\t")[2] for line in lines]
        self._communicates = context_index is not None
        self.n_arguments = lowered.n_arguments
        unit = lowered.unit
        self.host_source = unit.text
        self._kernels = unit.kernels
        self._dynamic_shared = unit.dynamic_shared
        self._host = host_stub.load(name, lowered.host_function)
        self._simulator = _simulator
        self._library = host_compiler.load(name, unit.text)

    def __call__(self, *args: Any) -> None:
        """Run the kernel to its end."""
        for i, value in enumerate(args):
            if not isinstance(value, torch.Tensor):
                continue
            if value.device.type != "cpu":
                raise BadArguments(
                    f"kernel {self.name}: argument {i} is on {value.device}, but the simulator runs on CPU tensors"
                )
            if lazy := unresolved(value):
                raise BadArguments(f"kernel {self.name}: argument {i} {lazy}")
        if len(args) != self.n_arguments:
            raise KernelError(f"kernel {self.name} takes {self.n_arguments} arguments, got {len(args)}")
        context = self._context(args)
        if context:
            worlds.refuse_child()
        self._simulator.set_visibility(simulator.visibility())
        if context:
            simulator.before_launch()
            self._simulator.register_heap(
                context.heap_base, context.heap_bytes, simulator.is_followed(context.heap_base)
            )
        with simulator.running.one(context.heap_base if context else 0):
            for launch in self._host(args):
                self._launch(launch, context)
        if context:
            simulator.after_launch()

    def _launch(self, launch: host_stub.Launch, context: ContextHeader | None) -> None:
        parameters = self._kernels[launch.kernel]
        words = b"".join(map(self._pack, parameters, launch.values))
        extents = [int(v) for v in launch.values[len(parameters) :]]
        shared = extents.pop() if launch.kernel in self._dynamic_shared else 0
        grid, block = (extents[:-3] + [1, 1, 1])[:3], extents[-3:]
        if not extents or 0 in grid:
            return  # as on a GPU: nothing to do; a body without statements is lowered to one without threads
        self._check_geometry(grid, block, shared)
        resident = resident_blocks(block[0] * block[1] * block[2], shared)
        made = self._simulator.Launch(
            self._library, launch.kernel, words, grid=grid, block=block, shared_bytes=shared, resident_blocks=resident,
            communicates=self._communicates, lines=self._lines, names=self._names,
        )  # fmt: skip
        if simulator.recorded_launches is not None:
            tensors = [v.tensor for p, v in zip(parameters, launch.values) if p.pointer and v is not None]
            blocks = grid[0] * grid[1] * grid[2]
            simulator.recorded_launches.append(simulator.RecordedLaunch(made, tensors, blocks, resident))
            return
        timeout = context.timeout_ns * 1e-9 if context else 0.0
        if context and context.n_pes > 1:
            time.sleep(simulator.start_delay(context.my_pe, context.n_pes))
        failure, message, line, remark, limits, _ = made.run(
            seed=simulator.next_launch_seed(context.my_pe if context else 0),
            stall_seconds=simulator.stall_seconds(timeout),
            race_seconds=(timeout or simulator.stall_seconds(0)) / 2,
            stack_bytes=simulator.stack_bytes(),
            races=simulator.races(),
            heap=context.heap_base if context else 0,
        )
        if limits:
            _warn_of_limits(self.name, limits)
        # In an aborted job waits return at once: later accesses are no races.
        if failure and not (_FAILURES[failure] is errors.DataRace and context and self._aborted(context)):
            rank = f"rank {context.my_pe}: " if context else ""
            self._give_up(context, _FAILURES[failure](f"{rank}{message} [{self._where(line)}]"))
        if context and context.error:
            record = context_layout.error_record_at(context.error)
            world = worlds.world_at(context.heap_base)
            heap = world.heap.describe if world is not None else None
            outside = self._ordinary_argument_at(record.address, parameters, launch.values, context)
            error = context_layout.describe_error(
                record, context.my_pe, context.n_pes, context.heap_base, timeout, heap, outside,
                world.awaited if world is not None else [],
            )  # fmt: skip
            if error is not None:
                line = self._lines[record.line - 1] if 0 < record.line <= len(self._lines) else ""
                known = "".join(f"; {r}" for r in (self._simulator.live_state()["deadlock"], remark) if r)
                self._give_up(context, type(error)(f"{error} [{self._where(line)}{known}]"))
            if world is not None:
                world.check()

    @staticmethod
    def _aborted(context: ContextHeader) -> bool:
        aborted = ctypes.c_uint32.from_address(context.abort_word).value if context.abort_word else 0
        return bool(aborted) or (bool(context.error) and context_layout.error_record_at(context.error).kind != 0)

    def _where(self, line: str) -> str:
        """The author's line, if known, the kernel, and the settings that repeat its schedule."""
        schedule = f"seed {simulator.seed()}, visibility {simulator.visibility()}"
        return f"{line}, " * bool(line) + f"kernel {self.name} (simulated, {schedule})"

    @staticmethod
    def _ordinary_argument_at(
        address: int, parameters: Sequence[host_source.Parameter], values: tuple[Any, ...], context: ContextHeader
    ) -> str | None:
        """The name of the argument outside of the symmetric heap whose memory holds an address."""
        for parameter, value in zip(parameters, values):
            if parameter.pointer and value is not None:
                begin = value.tensor.data_ptr()
                symmetric = 0 <= begin - context.heap_base < context.heap_bytes
                if not symmetric and begin <= address < begin + max(_extent(value.tensor), 1):
                    return parameter.name
        return None

    def _give_up(self, context: ContextHeader | None, error: errors.TileScaleError) -> None:
        """Raise `error`; in a world, every rank learns of it, and the loss of a peer is the better explanation."""
        world = worlds.world_at(context.heap_base) if context else None
        if world is None:
            raise error
        world.fail(error)

    def _check_geometry(self, grid: list[int], block: list[int], shared: int) -> None:
        threads = block[0] * block[1] * block[2]
        if not 0 < threads <= 1024:
            raise KernelError(f"kernel {self.name}: {threads} threads per block; a GPU allows 1 to 1024")
        if shared > _BLOCK_SHARED:
            raise KernelError(
                f"kernel {self.name}: {shared} bytes of shared memory per block; a GPU has {_BLOCK_SHARED}"
            )
        if any(g < 0 for g in grid) or grid[0] > 2**31 - 1 or max(grid[1:]) > 65535:
            raise KernelError(f"kernel {self.name}: a grid of {grid} blocks; limits are 2^31-1, 65535, 65535")

    def _pack(self, parameter: host_source.Parameter, value: Any) -> bytes:
        if parameter.pointer:
            if value is None:
                return struct.pack("<QQ", 0, 0)
            tensor = value.tensor
            return struct.pack("<QQ", tensor.data_ptr(), _extent(tensor))
        form = _PACK.get(parameter.ctype)
        if form is None:
            value = torch.tensor([value], dtype=_torch_type(self.name, parameter), device="cpu")
            raw = bytes(value.view(torch.uint8).tolist())
        else:
            try:
                raw = struct.pack(form, value)
            except struct.error as err:
                raise BadArguments(
                    f"kernel {self.name}: {parameter.name}={value!r} does not fit {parameter.ctype}: {err}"
                ) from None
        return raw.ljust(16, b"\0")

    def _context(self, args: Sequence[Any]) -> ContextHeader | None:
        """The header of the kernel's world; None without one. A kernel without primitives runs in none, except if races
        are checked: then in the world whose heap holds the first of its tensors in a heap, because the kernel may read
        data that have not arrived, or write data still being sent."""
        if self.context_index is not None:
            context = args[self.context_index]
        elif simulator.races():
            addresses = (value.data_ptr() for value in args if isinstance(value, torch.Tensor))
            world = next(filter(None, map(worlds.world_at, addresses)), None)
            context = world and world.context_tensor
        else:
            return None
        if not isinstance(context, torch.Tensor):
            return None
        header = context_layout.ContextHeader.from_address(context.data_ptr())
        return header if header.version == context_layout.VERSION else None


class SimulatedKernel(Kernel):
    """A kernel that the simulator runs. `cached`: its data. `prim_func`: returns the traced and rewritten function;
    called after a wrong call, to find the error."""

    def __init__(self, cached: CachedKernel, prim_func: Callable[[], PrimFunc]) -> None:
        super().__init__(cached.name, cached, cached.lowered.kernel_source, "simulator")
        index = None if cached.context_index is None else 0  # prepared kernels take it first
        self._simulated = SimulatedFunction(self.name, cached.lowered, index, cached.lines)
        self.cached = cached
        self._prim_func = prim_func

    @functools.cached_property
    def prim_func(self) -> PrimFunc:
        return self._prim_func()

    def _function(self) -> Callable[..., None]:
        return self._simulated

    @property
    def integers(self) -> list[tuple[int, int, int]]:
        """None: the translated host function checks all of them."""
        return []

    def _supervised(self, function: Callable[..., Any], present: Sequence[World]) -> Callable[..., None]:
        """Reject freed tensors, whose memory may be reused; on a GPU the check would cost every launch."""

        heaps = [weakref.ref(world.heap) for world in present]  # a kernel outlives its worlds

        def launch(*args: Any) -> None:
            alive = [heap for ref in heaps if (heap := ref()) is not None]
            for name, value in zip(self.parameters, args[len(args) - len(self.parameters) :]):
                if isinstance(value, torch.Tensor) and any(heap.is_freed(value) for heap in alive):
                    raise KernelError(f"kernel {self.name}: argument {name} was freed by tilescale_net.free")
            function(*args)

        return launch

    def ptx(self) -> str:
        raise KernelError(f"kernel {self.name} was built for the simulator, which has no PTX; see compiler.inspect")

    sass = ptx


@functools.cache
def _warn_of_limits(kernel: str, limits: str) -> None:
    """Once for each kernel and limit of a process."""
    _LOGGER.warning("kernel %s is not checked for races as a whole: %s", kernel, limits)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def _torch_type(kernel: str, parameter: host_source.Parameter) -> torch.dtype:
    types = {
        "half_t": torch.float16, "bfloat16_t": torch.bfloat16, "fp8_e4_t": torch.float8_e4m3fn,
        "fp8_e5_t": torch.float8_e5m2,
    }  # fmt: skip
    if parameter.ctype not in types:
        raise errors.SimulatorUnsupported(f"kernel {kernel}: a scalar parameter of type {parameter.ctype}")
    return types[parameter.ctype]
