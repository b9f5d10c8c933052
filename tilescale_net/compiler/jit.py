"""`tsn.jit` and `tsn.compile`: tilelang's compiler, made safe for communicating kernels.

- No data of peers are read through the non-coherent cache (passes), by TMA, twice, or too early (passes/hazards.py).
- Calls with an effect are executed once, anywhere in an expression (passes/effects.py).
- Warp specialisation is off unless the author requests it: it enlarges and splits the block, which block-scope primitives
  do not support.
- The cache key covers the device headers and the lowering rules (toolchain.py).
- Targets name a real architecture; the version of tilelang and the CUDA compiler are checked first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import logging
import os
import struct
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, overload

import tilelang
import torch
from tilelang import tvm
from tvm.target import Target
from tvm.tirx import PrimFunc

from tilescale_net.compiler import gpu_cache, ir, lowering, shipped, toolchain, versions
from tilescale_net.compiler.ir import block_threads, kernel_name
from tilescale_net.compiler.kernel import CudaKernel, GpuKernel, Kernel, describe
from tilescale_net.compiler.passes import hazards, prepare
from tilescale_net.compiler.simulator import cache
from tilescale_net.compiler.simulator import lowering as simulated
from tilescale_net.compiler.simulator.kernel import SimulatedKernel
from tilescale_net.compiler.versions import CompiledArtifact, Macro, get_type_hints, mutate
from tilescale_net.errors import ConfigurationError, KernelError, TileScaleError
from tilescale_net.runtime import profiling, settings, worlds
from tilescale_net.trace import traced_calls

# Pass options that communicating kernels need, and why (tile-ai/tilelang#1804 and #2594 are like them).
REQUIRED_CONFIGS = {
    "tl.disable_loop_unswitching": (True, "loop unswitching moves reads above waits"),
    "tl.if_stmt_binding_inline_replayable_binds": (False, "replaying a read below a wait gives another value"),
}
WARP_SPECIALIZED_OFF = "tl.disable_warp_specialized"
_TILELANG = os.path.dirname(os.path.abspath(tilelang.__file__)) + os.sep  # its TVM included


def _device_kind() -> str:
    """Default target of kernels: the device of the world; before init, the one that init would choose."""
    return worlds.device_kind() or settings.device_kind()


def _target(target: Any) -> str | dict[str, Any]:
    """`"simulator"`, or a tilelang target with a real architecture. Raises ConfigurationError for anything else."""
    if target is None:
        target = _device_kind()
    if target == "simulator":
        return target
    if target == "cuda":
        return {"kind": "cuda", "arch": toolchain.gpu_arch()}
    if isinstance(target, Target):
        target = dict(target.export())
    if isinstance(target, dict) and target.get("kind") == "cuda" and str(target.get("arch", "")).startswith("sm_"):
        return target
    raise ConfigurationError(
        f"target {target!r} is not supported; use None, 'cuda', 'simulator', or a dict such as "
        "{'kind': 'cuda', 'arch': 'sm_90'}"
    )


def required_pass_configs(func: PrimFunc, given: dict[str, Any] | None) -> dict[str, Any]:
    """The author's pass options (of the kernel, then of the call) with the required ones; conflicts raise KernelError."""
    configs = dict(func.attrs["tilelang_pass_configs"]) if "tilelang_pass_configs" in (func.attrs or {}) else {}
    configs.update({getattr(key, "value", key): value for key, value in (given or {}).items()})
    configs.setdefault(WARP_SPECIALIZED_OFF, True)
    for key, (value, reason) in REQUIRED_CONFIGS.items():
        if key in configs and bool(configs[key]) != value:
            raise KernelError(f"kernel {kernel_name(func)}: pass option {key} must be {value}: {reason}")
        configs[key] = value
    return configs


def lower(
    func: PrimFunc, target: dict[str, Any], pass_configs: dict[str, Any], instruments: Sequence[Any] = ()
) -> CompiledArtifact:
    """Lower a prepared kernel to CUDA source without compiling it; a `tilelang.engine.param.CompiledArtifact`.
    `instruments`: of TVM's passes, see simulator/lowering.py."""
    resolved = Target(target)
    context = tvm.transform.PassContext(opt_level=3, config=pass_configs, instruments=[*instruments])
    with lowering.enabled(), context, resolved:
        artifact = tilelang.lower(func, target=resolved)
    _check_specialized(func, pass_configs, artifact.kernel_source)
    return artifact


def _check_specialized(func: PrimFunc, pass_configs: dict[str, Any], source: str) -> None:
    if not pass_configs.get(WARP_SPECIALIZED_OFF, True):
        hazards.check_specialized(kernel_name(func), source)


def known_threads(func: PrimFunc, pass_configs: dict[str, Any]) -> int | None:
    """Threads per block if one number is known: warp specialisation adds some."""
    return block_threads(func) if pass_configs.get(WARP_SPECIALIZED_OFF, True) else None


def compile(
    func: PrimFunc,
    *,
    target: str | dict[str, Any] | None = None,
    pass_configs: dict[str, Any] | None = None,
    compile_flags: list[str] | str | None = None,
    name: str | None = None,
) -> Kernel:
    """Compile a T.prim_func that uses `tilescale_net.language`.

    Args:
        func: the traced kernel.
        target: None for init's device; before init, for a GPU if there is one, else the simulator (TSN_DEVICE overrides
            that). "cuda"; "simulator"; or a dict such as
            {"kind": "cuda", "arch": "sm_90"}, which compiles without a GPU.
        pass_configs: options of tilelang's passes.
        compile_flags: further flags of the device compiler.
        name: shown in errors and profiles; default the name of the factory, or else the function's own. Profiles of GPUs
            show one such as moe::dispatch in its namespace; elsewhere it is moe_dispatch.

    Returns:
        A `Kernel`, called with the kernel's arguments except the context.

    Raises:
        KernelError: the kernel misuses a primitive or lacks its context.
        ConfigurationError: no compiler, no GPU to compile for, or an unknown target.
    """
    if not isinstance(func, PrimFunc):
        raise KernelError(f"tilescale_net.compile takes a T.prim_func, not {func!r} ({type(func).__name__})")
    return _with_errors(_compiled, func, target, pass_configs, compile_flags, name)


def _with_errors(
    how: Callable[..., Any], func: PrimFunc, target: Any, pass_configs: dict[str, Any] | None,
    compile_flags: list[str] | str | None, name: str | None,
) -> Any:  # fmt: skip
    """Run `how` on a kernel and the resolved arguments of `compile`, with the errors of `compile`."""
    if name is not None:
        func = _renamed(func, ir.plain_name(name))
    if func.attrs and "tilelang_out_idx" in func.attrs:
        raise KernelError(
            f"kernel {kernel_name(func)} returns T.empty tensors; pass every output as an argument instead"
        )
    chosen: Any = _target(target)
    configs = required_pass_configs(func, pass_configs)
    flags = list(func.attrs["tilelang_compile_flags"]) if "tilelang_compile_flags" in (func.attrs or {}) else []
    flags += [compile_flags] if isinstance(compile_flags, str) else list(compile_flags or ())
    try:
        return how(func, chosen, configs, flags, name)
    except TileScaleError as error:
        # The message has the author's line; compiler frames do not help the author.
        raise error.with_traceback(None) from error.__cause__
    except tvm.error.InternalError as error:
        if "[ThreadSync]" not in str(error):
            raise
        raise hazards.barrier_refused(func) from None
    except RuntimeError as error:
        rejected = _rejected_by_nvcc(func, str(error))
        if rejected is None:
            raise
        raise rejected from None


def _rejected_by_nvcc(func: PrimFunc, text: str) -> KernelError | None:
    """nvcc's messages, without the kernel source that tilelang puts before them."""
    _, found, said = text.rpartition("Compilation error:")
    if not found:
        return None
    lines = [line for line in said.splitlines() if "error" in line] or said.strip().splitlines()
    return KernelError("\n  ".join((f"kernel {kernel_name(func)}: nvcc rejects its CUDA source", *lines[:5])))


def _compiled(func: PrimFunc, chosen: Any, configs: dict[str, Any], flags: list[str], name: str | None) -> Kernel:
    """`compile` with resolved arguments."""
    where = "the simulator" if chosen == "simulator" else chosen["arch"]
    with profiling.long_step(f"compiling kernel {kernel_name(func)}", f" for {where}; the next time it is there"):
        if chosen == "simulator":
            lowered = simulated.lowered(func, configs, lower)
            return SimulatedKernel(lowered, lambda: simulated.prepared(func, configs).func)
        with _tracing:
            prepared = prepare(func)
        toolchain.find_nvcc()
        code, of_trace = prepared.func, []
        if settings.TRACE.get():
            code, kernel_sites = lowering.number_for_trace(prepared.func, func)
            of_trace = lowering.trace_flags(kernel_sites)
            traced_calls.register_kernel(kernel_sites)
        host = toolchain.once_per_host(_lock_name(func))
        with lowering.enabled(traced=bool(of_trace)), versions.dependent_launches(), _quiet(), host:
            linked = code if name is None else code.with_attr("global_symbol", ir.linked_name(name))
            compiled = tilelang.compile(
                linked.without_attr("tilelang_pass_configs").without_attr("tilelang_compile_flags"),
                target=Target(chosen),
                execution_backend="tvm_ffi",
                pass_configs=configs,
                compile_flags=toolchain.compile_flags(flags + of_trace, known_threads(prepared.func, configs)),
            )
            _check_specialized(func, configs, compiled.get_kernel_source())
        return CudaKernel.compiled(prepared, compiled, chosen, known_threads(prepared.func, configs), tuple(of_trace))


def write_library(
    library: Path, func: PrimFunc, chosen: Any, configs: dict[str, Any], flags: list[str], name: str | None
) -> GpuKernel:
    """A kernel of this package for a GPU, compiled into `library`, see shipped.py."""
    where = chosen["arch"]
    with profiling.long_step(f"compiling kernel {kernel_name(func)}", f" for {where}; the next time it is there"):
        with _tracing:
            prepared = prepare(func)
        toolchain.find_nvcc()
        threads = known_threads(prepared.func, configs)
        linked = prepared.func if name is None else prepared.func.with_attr("global_symbol", ir.linked_name(name))
        linked = linked.without_attr("tilelang_pass_configs").without_attr("tilelang_compile_flags")
        with lowering.enabled(), versions.dependent_launches():
            artifact = shipped.lower(linked, Target(chosen), configs, toolchain.compile_flags(flags, threads))
        _check_specialized(func, configs, artifact.kernel_source)
        shipped.link(artifact, library)
        return GpuKernel.of(prepared, artifact.kernel_source, threads)


def _lock_name(func: PrimFunc) -> str:
    """A file name for each kernel that variants rarely share, so that they compile at the same time."""
    return f"{kernel_name(func)}-{hashlib.sha256(func.script().encode()).hexdigest()[:3]}"


# Tracing and preparing a kernel is Python code, which threads do not speed up.
_tracing = threading.RLock()
_keys = threading.Lock()  # the first key hashes all files; threads would all do so
_QUIET = {"tilelang.jit.kernel": logging.WARNING, "tilelang.cache.kernel_cache": logging.ERROR}
_loud: dict[str, int] = {}  # their levels before
_compiling: list[int] = []  # number of compiling threads


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep tilelang from printing a line per kernel and rank; warnings of its compiler still show."""
    with _tracing:
        for name, level in _QUIET.items() if not _compiling else ():
            _loud[name] = logging.getLogger(name).level
            logging.getLogger(name).setLevel(level)
        _compiling.append(threading.get_ident())
    try:
        yield
    finally:
        with _tracing:
            _compiling.pop()
            for name, level in _loud.items() if not _compiling else ():
                logging.getLogger(name).setLevel(level)


def _renamed(func: PrimFunc, name: str) -> PrimFunc:
    """The same kernel by another name, still with the Python function that its author wrote."""
    renamed = func.with_attr("global_symbol", name)
    if hasattr(func, "orig_func"):
        renamed.orig_func = func.orig_func
    return renamed


class Recorded(Exception):
    """A kernel was requested and recorded, see `recording`."""


Call = tuple["KernelFactory", tuple[Any, ...], dict[str, Any]]
_recorded: list[Call] | None = None


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Inside, factories append their calls to the yielded list and raise Recorded, instead of making kernels."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


class KernelFactory:
    """A kernel factory, from `@tsn.jit` over a function that returns a T.prim_func: call it to get the compiled
    kernel."""

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._kernels: dict[Hashable, Kernel] = {}

    def __reduce__(self) -> str:
        return self.__qualname__  # as a function: by its name

    def __repr__(self) -> str:
        return f"<kernel factory {self.__name__}{inspect.signature(self._function)}>"

    @property
    def pass_configs(self) -> dict[str, Any]:
        """The decorator's options for tilelang's passes; `inspect` shows the code that runs with the same ones."""
        return dict(self._options["pass_configs"] or {})

    @property
    def compile_flags(self) -> tuple[str, ...]:
        """The decorator's options for the device compiler."""
        flags = self._options["compile_flags"] or ()
        return (flags,) if isinstance(flags, str) else tuple(flags)

    def __call__(self, *args: Any, **kwargs: Any) -> Kernel:
        """The kernel for these arguments; compiled once per set of arguments and per target."""
        if _recorded is not None:
            _recorded.append((self, args, kwargs))
            raise Recorded
        target = self._options["target"] if self._options["target"] is not None else _device_kind()
        try:
            key = (str(target), *kwargs, identities((*args, *kwargs.values())))
            kernel = self._kernels.get(key)
        except TypeError:
            raise KernelError(
                f"{self.__name__}: arguments of a kernel factory must be hashable, got {args} {kwargs}"
            ) from None
        if kernel is None:
            try:
                if target == "simulator":
                    kernel = self._cached(args, kwargs)
                else:
                    kernel = self.cached_for_gpu(args, kwargs, _target(target))
                kernel = kernel or compile(self.trace(*args, **kwargs), **self._options)
            except TileScaleError as error:
                raise error.with_traceback(None) from error.__cause__
            except Exception as error:
                raise self._wrong_kind(error, args, kwargs) from error.__cause__
            self._kernels[key] = kernel
        return kernel

    def _cached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kernel | None:
        """A kernel for the simulator from an earlier run, or made for later ones; None if it may not be cached, see cache.py."""
        options = self._options | {"target": "simulator"}
        key = cache.kernel_key(self._function, args, kwargs, options)
        if key is None:
            return None
        made: list[Any] = []

        def make() -> cache.CachedKernel:
            made.append(compile(self.trace(*args, **kwargs), **options))
            return made[0].cached

        def again() -> PrimFunc:
            func = self.trace(*args, **kwargs)
            return simulated.prepared(func, required_pass_configs(func, options["pass_configs"])).func

        cached = cache.get_or_write(self.__name__, key, ".kernel", make, cache.CachedKernel.parse)
        return made[0] if made else SimulatedKernel(cached, again)

    def cached_for_gpu(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> CudaKernel | None:
        """The same for a GPU, see gpu_cache.py; `target` names its architecture."""
        if not gpu_cache.is_enabled():
            return None
        options = self._options | {"target": target}
        with _keys:
            key = cache.kernel_key(self._function, args, kwargs, options, anywhere=True)
        if key is None:
            return None

        def make(library: Path) -> GpuKernel:
            return _with_errors(functools.partial(write_library, library), self.trace(*args, **kwargs), **options)

        def again() -> PrimFunc:
            with _tracing:
                return prepare(self.trace(*args, **kwargs)).func

        made_by = [f"{self._function.__module__}:{self._function.__qualname__}", args, kwargs]
        found = gpu_cache.get_or_compile(self.__name__, key, make, made_by)
        return None if found is None else CudaKernel.found(*found, again, target)

    def forget(self) -> None:
        """Forget this process's kernels: later calls search or compile them again."""
        self._kernels.clear()

    def trace(self, *args: Any, **kwargs: Any) -> PrimFunc:
        """The traced T.prim_func for these arguments, not compiled, named `name` or after this factory."""
        try:
            with _tracing:
                func = self._function(*args, **kwargs)
        except TileScaleError as error:
            raise error.with_traceback(None) from error.__cause__
        except OSError as error:
            if "source code" not in str(error):
                raise
            raise KernelError(
                f"{self.__name__}: the source of a kernel is read from its file; define it in a file or a notebook, not at "
                "Python's prompt or in `python -c`"
            ) from None
        except RuntimeError as error:
            if "too many statically nested blocks" not in str(error):
                raise self._wrong_kind(error, args, kwargs) from error.__cause__
            raise self._nested_too_deeply(error.__cause__) from None
        except Exception as error:
            raise self._wrong_kind(error, args, kwargs) from error.__cause__
        if not isinstance(func, PrimFunc):
            raise KernelError(f"{self.__name__} must return a T.prim_func, but returned {type(func).__name__}")
        if self._options["name"]:
            return _renamed(func, ir.plain_name(self._options["name"]))
        return _renamed(func, self.__name__) if self.__name__.isidentifier() else func

    def _wrong_kind(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
        """The error to raise for one during the build: an argument may have caused tilelang's own."""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.isfile(f.filename)]
        if not frames or not frames[-1].filename.startswith(_TILELANG):
            return error  # of the author's own code
        arguments = inspect.signature(self._function).bind(*args, **kwargs).arguments
        odd = [
            f"argument {name} is {describe(value)}"
            for name, value in arguments.items()
            if not isinstance(value, int | torch.dtype)
        ]
        code = self._function.__code__
        lines = [f.lineno for f in frames if f.filename == code.co_filename and f.name != "<module>"]
        if not odd and not lines:
            return error
        said = str(error).strip()
        if odd:
            why = f"{', '.join(odd)}, and tilelang has no use for such a value: {said.partition(chr(10))[0][:200]}"
        else:
            why = f"{type(error).__name__}: {said}"
        where = f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"
        return KernelError(f"kernel {self.__name__} cannot be built: {why}\n  at {where}")

    def _nested_too_deeply(self, error: BaseException | None) -> KernelError:
        """tilelang's rewritten kernel has two Python blocks per `if`; Python allows 20 nested blocks."""
        where = ""
        if isinstance(error, SyntaxError):
            where = f"\n  at {inspect.getsourcefile(self._function) or error.filename}:{error.lineno}"
        return KernelError(
            f"kernel {self.__name__}: blocks are nested too deeply, and each `elif` counts as one in the one before; write "
            "cases that exclude one another as `if` after `if`, or choose a function or a value in Python, before the kernel"
            + where
        )


@overload
def jit(
    func: None = None, *, target: str | dict[str, Any] | None = None, pass_configs: dict[str, Any] | None = None,
    compile_flags: list[str] | str | None = None, name: str | None = None,
) -> Callable[[Callable[..., Any]], KernelFactory]: ...  # fmt: skip
@overload
def jit(
    func: Callable[..., Any], *, target: str | dict[str, Any] | None = None, pass_configs: dict[str, Any] | None = None,
    compile_flags: list[str] | str | None = None, name: str | None = None,
) -> KernelFactory: ...  # fmt: skip
@overload
def jit(
    func: PrimFunc, *, target: str | dict[str, Any] | None = None, pass_configs: dict[str, Any] | None = None,
    compile_flags: list[str] | str | None = None, name: str | None = None,
) -> Kernel: ...  # fmt: skip
def jit(
    func: Callable[..., Any] | PrimFunc | None = None, *, target: str | dict[str, Any] | None = None,
    pass_configs: dict[str, Any] | None = None, compile_flags: list[str] | str | None = None, name: str | None = None,
) -> KernelFactory | Kernel | Callable[[Callable[..., Any]], KernelFactory | Kernel]:  # fmt: skip
    """Decorator for kernels: over a function that returns a T.prim_func (as tilelang.jit), or over a T.prim_func.

        @tsn.jit
        def copy(n):
            @T.prim_func
            def kernel(ctx: N.Context(), x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
                ...
            return kernel

        copy(1024)(x, y)

    Arguments and errors are as for `compile`. A decorated factory returns a `Kernel` for each set of arguments and
    compiles it once; a decorated T.prim_func is a `Kernel`.
    """
    options: dict[str, Any] = dict(target=target, pass_configs=pass_configs, compile_flags=compile_flags, name=name)

    def decorate(function: Callable[..., Any] | PrimFunc) -> KernelFactory | Kernel:
        if isinstance(function, PrimFunc):
            return compile(function, **options)
        if not callable(function):
            raise KernelError(f"tilescale_net.jit decorates functions, not {function!r}")
        return KernelFactory(function, options)

    return decorate if func is None else decorate(func)


# -- keys of arguments ------------------------------------------------------------------------------------------------

_PLAIN = frozenset((int, str, bool, type(None)))


def identities(values: tuple[Any, ...]) -> Hashable:
    """As `identity` of the tuple, and fast if no element holds other values."""
    kinds = tuple(map(type, values))
    return kinds, values if _PLAIN.issuperset(kinds) else tuple(map(identity, values))


def identity(value: Any) -> Hashable:
    """A key that two values share if they are equal and of the same types at all depths, floats by their bits. It looks
    into tuples, frozensets and dataclasses compared by fields. Raises TypeError for values that are not hashable."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    if isinstance(value, complex):
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, tuple):
        return (kind, *map(identity, value))
    if isinstance(value, frozenset):
        return kind, frozenset(map(identity, value))
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and not value.shape:
        return kind, value.dtype.str, value.tobytes()
    hash(value)
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.eq:  # type: ignore[attr-defined]
        return (kind, *(identity(getattr(value, field.name)) for field in dataclasses.fields(kind) if field.compare))
    return kind, value


# -- macros -----------------------------------------------------------------------------------------------------------


class _Macro(Macro):
    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.orig_func = function
        self.annotations = get_type_hints(function)

    @functools.cached_property
    def ir_gen(self) -> Any:
        return mutate(self.orig_func)


def macro(function: Callable[..., Any]) -> Macro:
    """`T.macro`, translated at its first use in a kernel instead of its definition.

    tilelang takes about 20 ms for a macro of 20 lines, in every process that imports its module. Use it for module-level
    macros; the variables of a nested macro may have changed by its first use.

    Args:
        function: defined in a file, as for `T.macro`.

    Raises:
        KernelError: `function` is not a Python function.
    """
    if not hasattr(function, "__annotations__") or not hasattr(function, "__code__"):
        raise KernelError(f"tilescale_net.macro decorates functions, not {function!r}")
    return _Macro(function)


# -- calls that compile, made together ---------------------------------------------------------------------------------


def compile_together(
    calls: Sequence[Callable[[], object]], device: torch.device | None = None, local_rank: int = 0, node_size: int = 1
) -> None:
    """Make calls that compile a kernel each, in threads: compilers release Python's lock for most of the time.

    Each rank of a host begins at another place of the list and shares its kernels through the cache; a rank waits for a
    kernel that another rank compiles.

    Args:
        calls: the same on all ranks.
        device: of the rank; calls run on its current stream. For the simulator (a CPU) one call follows the other.
        local_rank, node_size: number of the rank on its host, and the host's number of ranks.

    Raises:
        The error of a call, the first in the order of `calls`, after the others have ended.
    """
    first = len(calls) * local_rank // node_size
    mine = [*calls[first:], *calls[:first]]
    workers = min(len(calls), len(os.sched_getaffinity(0)) // node_size)
    if workers < 2 or (device is not None and device.type == "cpu"):
        for call in mine:
            call()
        return
    stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None

    def run(call: Callable[[], object]) -> None:
        # A new thread has the first device and its default stream.
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            call()

    with ThreadPoolExecutor(workers, "tilescale_net-compiler") as threads:
        ended = [threads.submit(run, call) for call in mine]
        try:
            wait(ended)
        except BaseException:  # Ctrl-C: waits only for begun calls
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    failed = [
        error for future in ended[len(calls) - first :] + ended[: len(calls) - first] if (error := future.exception())
    ]
    if failed:
        raise failed[0]
