"""Compiled kernels as callables: the context is bound in front of the arguments, with next to no cost per launch.

The host functions that tilelang generates check every argument, but report errors in terms of their own conventions.
They run first, because they cost nothing; when one of them refuses, `mismatch` finds the reason in the author's terms.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import tvm_ffi
from tilelang import tvm
from tvm.tirx import PrimFunc

from tilescale_net.compiler import lowering, toolchain
from tilescale_net.compiler.ir import kernel_name
from tilescale_net.compiler.passes import Prepared
from tilescale_net.errors import KernelError, TileScaleError
from tilescale_net.runtime import profiling, worlds
from tilescale_net.runtime.context import HEADER_WORDS

if TYPE_CHECKING:
    from tilescale_net.runtime.world import World
import numbers
from collections.abc import Sequence

from tvm import tirx

from tilescale_net.runtime.launch_args import unresolved


class Kernel:
    """A compiled kernel. Call it with its arguments, in order or by name, without the context (or with it, at its place).

    Attributes:
        name: the kernel's name.
        source: generated CUDA source.
        target: "simulator" or tilelang's target dict.
        parameters: names of the arguments, without the context.
        prim_func: the rewritten function; its first parameter is the context.

    Args:
        made_of: has the `context_index`, `names` and `ring_bytes` of `Prepared`.
    """

    prim_func: PrimFunc

    def __init__(self, name: str, made_of: Any, source: str, target: Any) -> None:
        self.name = name
        self.source = source
        self.target = target
        self.ring_bytes = made_of.ring_bytes
        self._context_index = made_of.context_index
        names = list(made_of.names)
        if self._context_index is not None:
            names.pop(self._context_index)
        self.parameters = tuple(names)
        self._n = len(names)
        self._bound_to: object = None  # the worlds for which `_launch` is valid
        self._launch: Callable[..., None] | None = None
        # By world, for several worlds.
        self._launches: weakref.WeakKeyDictionary[World, Callable[..., None]] = weakref.WeakKeyDictionary()

    def _function(self) -> Callable[..., None]:
        """The callable that takes every argument, the context first."""
        raise NotImplementedError

    def _argument(self, context: Any) -> Any:
        """The context tensor in the form that is fastest to pass."""
        return context

    def __call__(self, *args: Any, **named: Any) -> None:
        """Launch on the current stream, in the world whose symmetric tensors are among the arguments.

        Raises:
            TypeError: wrong number of arguments, or names that the kernel does not have.
            TileScaleError: no `init()` before, and no context given.
            KernelError: an argument of another dtype, shape, layout or device than the kernel takes, or an integer beyond the
                range of its type; tensors of two worlds, or none where there are several; compiled for another kind of device
                than `init()` has taken.
        """
        if len(args) != self._n or self._bound_to is not worlds.launch_generation or self._launch is None or named:
            return self._slow(args, named)
        try:
            self._launch(*args)
        except Exception as error:
            self._explain(args, error)

    def launcher(self, world: World) -> Callable[..., None]:
        """The launch in one world, for frequent callers: takes the arguments by position, without the context. Valid as
        long as the world; raises the errors of a call. Arguments may be made by `launch_args.constant`.
        """
        run: Callable[..., Any] | None = None

        def launch(*args: Any) -> None:
            nonlocal run
            if run is None:
                run = self._bound(world)
            try:
                run(*args)
            except Exception as error:
                self._explain(args, error)

        return launch

    @functools.cached_property
    def integers(self) -> list[tuple[int, int, int]]:
        """Position, lowest and highest value of integer arguments to check before a launch."""
        return narrow_integers(self.prim_func, self.parameters)

    @property
    def takes_context(self) -> bool:
        """Whether the function of `plain_function` takes the context as its first argument."""
        return self._context_index is not None

    def plain_function(self, world: World) -> Any:
        """The tvm_ffi.Function of all arguments that `launcher` finally calls in a world; None if there is none, or if
        a launch does more than call it.

        Raises:
            KernelError: compiled for another kind of device than `world` has.
        """
        self._check_device(world)
        function = self._function()
        if not isinstance(function, tvm_ffi.Function) or self._supervised(function, [world]) is not function:
            return None
        return function

    def _explain(self, args: Sequence[Any], error: Exception) -> None:
        """Raise `error`, or an error that names its wrong argument; CUDA fails in a child made by fork."""
        worlds.refuse_child()
        problem = self._problem(args, error)
        if problem is None:
            # This package's own frames do not help the user.
            raise error.with_traceback(None) if isinstance(error, TileScaleError) else error
        raise KernelError(f"kernel {self.name}: {problem}") from None

    def _problem(self, args: Sequence[Any], error: Exception) -> str | None:
        """The wrong argument that made a launch raise `error`; None for other causes."""
        if isinstance(error, TileScaleError) and not isinstance(error, BadArguments):
            return None
        return mismatch(self.prim_func, self.parameters, args, self.target != "simulator")

    def _in_order(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Arguments by position and by name as arguments by position."""
        wrong = [name for name in named if name not in self.parameters[len(args) :]]
        if wrong:
            twice = wrong[0] in self.parameters
            raise TypeError(
                f"kernel {self.name} got argument {wrong[0]} {'twice' if twice else 'which it does not take'}; its arguments "
                f"are {', '.join(self.parameters)}"
            )
        missing = [name for name in self.parameters[len(args) :] if name not in named]
        if missing:
            raise TypeError(
                f"kernel {self.name} takes {self._n} arguments ({', '.join(self.parameters)}); {', '.join(missing)} missing"
            )
        return (*args, *(named[name] for name in self.parameters[len(args) :]))

    def _slow(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if named:
            return self(*self._in_order(args, named))
        index = self._context_index
        if index is not None and len(args) == self._n and worlds.are_several():
            return self._launch_among(args, worlds.world_of_tensors(self.name, args))
        if index is not None and len(args) == self._n + 1 and _is_context(args[index]):
            others = (*args[:index], *args[index + 1 :])
            try:
                self._with_first(self._supervised(self._function(), worlds.alive()), args[index])(*others)
            except Exception as error:
                self._explain(others, error)
            return
        if len(args) != self._n:
            raise TypeError(
                f"kernel {self.name} takes {self._n} arguments ({', '.join(self.parameters)}), got {len(args)}"
            )
        if index is None:
            self._launch = self._with_first(self._supervised(self._function(), worlds.alive()), None)
        else:
            self._launch = self._bound(worlds.default())
        self._bound_to = worlds.launch_generation
        self(*args)

    def _launch_among(self, args: tuple[Any, ...], world: World) -> None:
        """Launch in one of several worlds."""
        launch = self._launches.get(world)
        if launch is None:
            launch = self._launches[world] = self._bound(world)
        try:
            launch(*args)
        except Exception as error:
            self._explain(args, error)

    def _bound(self, world: World) -> Callable[..., None]:
        """The function of the arguments without the context, bound to the context of `world`."""
        self._check_device(world)
        context = None if self._context_index is None else self._argument(world.context_tensor)
        return self._with_first(self._supervised(self._function(), [world]), context)

    def _with_first(self, function: Callable[..., Any], context: Any) -> Callable[..., None]:
        """The function with its context, if it takes one; rejects integers beyond their parameters' range."""
        bound = function if context is None else functools.partial(function, context)
        if not self.integers:
            return bound
        from tilescale_net import _native

        otherwise = functools.partial(look_closer, bound, self.integers)
        return _native.launch.bind(function, context, self.integers, otherwise)

    def _supervised(self, function: Callable[..., Any], present: Sequence[World]) -> Callable[..., None]:
        """The function, wrapped as its worlds require."""
        return function

    def _check_device(self, world: World) -> None:
        mine, taken = "simulator" if self.target == "simulator" else "cuda", world.device_kind
        if taken != mine:
            names = {"simulator": "the simulator", "cuda": "a GPU"}
            raise KernelError(
                f"kernel {self.name} was compiled for {names[mine]}, but init has taken {names[taken]}; compile kernels "
                "after init, or leave their target out and TSN_DEVICE as it is in between"
            )

    def __copy__(self) -> Kernel:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernel:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"kernel {self.name} cannot be pickled: its code belongs to this process; pass on its factory (by name) and the "
            "factory's arguments, and make it there"
        )

    def __repr__(self) -> str:
        return f"<kernel {self.name}({', '.join(self.parameters)}) for {self.target}>"


def _is_context(value: Any) -> bool:
    """Whether an argument may be a context; one argument too many cannot be one."""
    return (
        isinstance(value, torch.Tensor)
        and (value.dtype, value.dim()) == (torch.int64, 1)
        and value.numel() >= HEADER_WORDS
    )


@dataclasses.dataclass(frozen=True)
class GpuKernel:
    """Data of a kernel, except for its library and its traced function. `name`: the kernel's. `context_index`, `names`,
    `ring_bytes`: see passes.Prepared. `source`: generated CUDA source. `threads`: of a block, if one number is known.
    `integers`: see `kernel.narrow_integers`. `has_tensors`: whether it takes tensors besides the context."""

    name: str
    context_index: int | None
    names: tuple[str, ...]
    ring_bytes: int
    source: str
    threads: int | None
    integers: tuple[tuple[int, int, int], ...]
    has_tensors: bool

    @classmethod
    def of(cls, prepared: Prepared, source: str, threads: int | None) -> GpuKernel:
        """From a prepared kernel and its generated source; `threads` of a block, if one number is known."""
        func = prepared.func
        index, names = prepared.context_index, list(prepared.names)
        if index is not None:
            names.pop(index)
        return cls(
            name=kernel_name(func),
            context_index=index,
            names=tuple(prepared.names),
            ring_bytes=prepared.ring_bytes,
            source=source,
            threads=threads,
            integers=tuple(narrow_integers(func, names)),
            has_tensors=any(p in func.buffer_map for p in func.params[1:]),
        )


class CudaKernel(Kernel):
    """A kernel compiled for a GPU by tilelang.

    Args:
        cached: its data.
        executable: holds its function "main".
        prim_func: returns the rewritten function; called after a wrong call, to find the error.
        target: tilelang's. flags: of the device compiler, of a kernel in a trace.
    """

    def __init__(
        self,
        cached: GpuKernel,
        executable: Any,
        prim_func: Callable[[], PrimFunc],
        target: Any,
        flags: tuple[str, ...] = (),
    ) -> None:
        super().__init__(cached.name, cached, cached.source, target)
        self.cached = cached
        self._is_noted = lowering.TRACED_KERNEL in self.source
        self._executable, self._prim_func, self._flags = executable, prim_func, flags

    @classmethod
    def compiled(
        cls, prepared: Prepared, compiled: Any, target: Any, threads: int | None = None, flags: tuple[str, ...] = ()
    ) -> CudaKernel:
        """From tilelang's compiled kernel; `threads` of a block, if one number is known."""
        cached = GpuKernel.of(prepared, compiled.get_kernel_source(), threads)
        return cls(cached, compiled.adapter.get_exportable_executable(), lambda: prepared.func, target, flags)

    @classmethod
    def found(cls, cached: GpuKernel, library: Path, prim_func: Callable[[], PrimFunc], target: Any) -> CudaKernel:
        """From a file of the cache."""
        return cls(cached, tvm.runtime.load_module(str(library)), prim_func, target)

    @functools.cached_property
    def prim_func(self) -> PrimFunc:
        return self._prim_func()

    @property
    def integers(self) -> list[tuple[int, int, int]]:
        return [*self.cached.integers]

    @functools.cache  # noqa: B019 (kernels live as long as the program)
    def _function(self) -> Callable[..., None]:
        # The first launch loads the kernel into the GPU. The driver then waits for running kernels, and delays the
        # proxy's copies, without which a kernel that communicates with another node would never end. (While a CUDA
        # graph is captured no kernel runs, and no wait is allowed.)
        proxied = {w.device for w in worlds.alive() if w.proxy is not None}
        if proxied and not torch.cuda.is_current_stream_capturing():
            for device in proxied:
                torch.cuda.synchronize(device)
        # tilelang's own wrapper checks and copies the arguments in Python for several microseconds; the host function
        # that it finally calls checks every shape and dtype itself.
        function: Callable[..., None] = self._executable["main"]
        return function

    def _argument(self, context: Any) -> Any:
        # Converted once instead of at every launch. The launch takes its stream from the torch tensors among the
        # arguments, so the context has to stay one when there is no other.
        return tvm_ffi.from_dlpack(context) if self.cached.has_tensors else context

    def _supervised(self, function: Callable[..., Any], present: Sequence[World]) -> Callable[..., None]:
        if profiling.recorder is not None and not self._is_noted:
            function = profiling.recorder.timed(function, self.name)
        proxy = next((w.proxy for w in present if w.proxy is not None and w.proxy.staged), None)
        if proxy is None:
            return function
        reference = weakref.ref(proxy)  # a kernel outlives its worlds

        def launch_and_wait(*args: Any) -> None:
            """On the default stream, a copy to ordinary host memory (`tensor.cpu()`) that is queued behind a kernel
            holds a lock of the driver until the kernel has ended, which blocks the proxy's copies for that kernel.
            """
            function(*args)
            found = reference()
            if found is not None and found.holds_up_launches:
                torch.cuda.synchronize()

        return launch_and_wait

    def ptx(self) -> str:
        """PTX of the kernel, compiled on request by toolchain."""
        return toolchain.compile_source(self.source, "ptx", self.target, self._flags, self.cached.threads)

    def sass(self) -> str:
        """Machine code of the kernel, disassembled by nvdisasm."""
        return toolchain.disassemble(
            toolchain.compile_source(self.source, "cubin", self.target, self._flags, self.cached.threads)
        )


# -- the arguments of a launch ----------------------------------------------------------------------------------------


class BadArguments(KernelError):
    """Arguments that a simulated kernel's host function rejects; `mismatch` gives the details."""


_NAMES = {"float8_e4m3": "float8_e4m3fn"}  # torch's names


def mismatch(func: tirx.PrimFunc, names: Sequence[str], arguments: Sequence[Any], on_gpu: bool) -> str | None:
    """The first argument that does not fit, and why; or None. `func`: a prepared kernel; its last parameters are the
    arguments. `names`: of the arguments. `arguments`: as given, without the context. `on_gpu`: where the kernel's
    tensors must be."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, param, given in zip(names, func.params[len(func.params) - len(names) :], arguments):
        if isinstance(given, tvm_ffi.Tensor):
            continue  # of `launch_args.constant`, whose maker has chosen it
        if param in func.buffer_map:
            buffer = func.buffer_map[param]
            problem = _tensor(buffer, given, on_gpu) or _extents(name, buffer, given, sizes)
            if problem:
                return f"argument {name}: expected {_expected(buffer)}; {problem}"
        elif problem := _scalar(str(param.dtype), given):
            return f"argument {name}: expected {param.dtype}; {problem}"
    return None


def narrow_integers(func: tirx.PrimFunc, names: Sequence[str]) -> list[tuple[int, int, int]]:
    """Position, lowest and highest value of each integer argument below 64 bits, which host functions truncate.
    Arguments as for `mismatch`."""
    dtypes = [str(param.dtype) for param in func.params[len(func.params) - len(names) :]]
    limits = [(place, integer_limits(dtype)) for place, dtype in enumerate(dtypes)]
    return [(place, *known) for place, known in limits if known is not None and known[1] < 2**63 - 1]


def integer_limits(dtype: str) -> tuple[int, int] | None:
    """The lowest and the highest value of an integer type or bool; None for other types."""
    if dtype == "bool":
        return 0, 1
    kind, digits = dtype.rstrip("0123456789"), dtype.lstrip("uint")
    if kind not in ("int", "uint") or not digits:
        return None
    bits = int(digits) - (kind == "int")
    return -(1 << bits) if kind == "int" else 0, (1 << bits) - 1


def look_closer(function: Callable[..., None], ranges: Sequence[tuple[int, int, int]], *args: Any) -> None:
    """Call a host function with integers that may be beyond their ranges, as `narrow_integers` has them. Raises BadArguments."""
    for place, low, high in ranges:
        if place < len(args) and isinstance(args[place], numbers.Integral) and not low <= args[place] <= high:
            raise BadArguments(f"argument {place} is {args[place]}; its range is {low} to {high}")
    function(*args)


def _constant(value: Any) -> int | None:
    return int(value.value) if isinstance(value, tirx.IntImm) else None


def _dtype(buffer: tirx.Buffer) -> str:
    return _NAMES.get(str(buffer.dtype), str(buffer.dtype))


def _times(run: int | None, extent: int | None) -> int | None:
    return run * extent if run is not None and extent is not None else None


def _is_contiguous(buffer: tirx.Buffer) -> bool:
    """Whether the kernel requires a contiguous tensor: all do unless they name strides."""
    run: int | None = 1
    for extent, stride in reversed(list(zip(buffer.shape, buffer.strides))):
        if _constant(stride) != run:
            return False
        run = _times(run, _constant(extent))
    return True


def _strides(buffer: tirx.Buffer) -> list[int | None]:
    """The strides that the kernel requires; None for none, or for strides known only at run time."""
    if len(buffer.strides):
        return [_constant(stride) for stride in buffer.strides]
    strides: list[int | None] = []
    run: int | None = 1
    for extent in reversed(buffer.shape):
        strides.insert(0, run)
        run = _times(run, _constant(extent))
    return strides


def _expected(buffer: tirx.Buffer) -> str:
    contiguous = ", contiguous" if not len(buffer.strides) or _is_contiguous(buffer) else ""
    return f"{_dtype(buffer)}[{', '.join(map(str, buffer.shape))}]{contiguous}"


def describe(value: Any) -> str:
    """A value as an argument error shows it: tensors by dtype and shape, never by their elements."""
    if isinstance(value, torch.Tensor):
        contiguous = "" if value.is_contiguous() else f" with strides {tuple(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{contiguous}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__module__}.{type(value).__qualname__} of {value.dtype}{list(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _tensor(buffer: tirx.Buffer, given: Any, on_gpu: bool) -> str | None:
    if given is None:
        return "got None"
    if not isinstance(given, torch.Tensor):
        advice = ", which torch.from_numpy makes a tensor of" if type(given).__module__ == "numpy" else ""
        return f"got {describe(given)}{advice}"
    got = f"got {describe(given)}"
    if str(given.dtype).removeprefix("torch.") != _dtype(buffer) or given.dim() != len(buffer.shape):
        return got
    if given.is_cuda != on_gpu:
        return f"got a tensor on {given.device}, and the kernel runs {'on a GPU' if on_gpu else 'in the simulator'}"
    if any(_constant(extent) not in (None, size) for extent, size in zip(buffer.shape, given.shape)):
        return got
    if lazy := unresolved(given):
        return f"{got}, which {lazy}"
    for size, wanted, stride in zip(given.shape, _strides(buffer), given.stride()):
        if wanted is not None and size > 1 and stride != wanted:
            return f"{got}; .contiguous() makes a copy that fits"
    return None


def _extents(name: str, buffer: tirx.Buffer, given: torch.Tensor, sizes: dict[str, tuple[int, str]]) -> str | None:
    """Whether each name has the same size everywhere."""
    for extent, size in zip(buffer.shape, given.shape):
        if isinstance(extent, tirx.Var):
            known, where = sizes.setdefault(extent.name, (size, name))
            if known != size:
                return f"got {describe(given)}, but {extent.name} is {known} in argument {where}"
    return None


def _scalar(dtype: str, given: Any) -> str | None:
    number: Any = numbers.Real if dtype.startswith(("float", "bfloat")) else numbers.Integral
    if not isinstance(given, number):
        is_one = getattr(given, "shape", None) == () and hasattr(given, "item")
        return f"got {describe(given)}{'; give its .item()' if is_one else ''}"
    limits = integer_limits(dtype)
    if limits is not None and not limits[0] <= given <= limits[1]:
        return f"got {given}, and {dtype} is from {limits[0]} to {limits[1]}"
    return None
