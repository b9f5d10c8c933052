"""Differences between supported versions of tilelang, and the private names of tilelang in use.

The rest of the package imports these names from here and does not ask for a version. `toolchain.TILELANG_VERSIONS` are the
supported ones; another version changes this file alone. Each entry says why it is needed, and its replacement.

Private names:

| name | why |
| --- | --- |
| `Builder`, `BoolOpFrame`, `eager_builder.logger` | primitives ask whether a kernel is being traced, and inside which condition; the logger prints a kernel's rewritten source before errors of this package, which is silenced |
| `DSLMutator` | `a < f() < b` evaluates `f` once, see passes/effects.py |
| `Macro`, `get_type_hints`, `mutate` | `tsn.macro` translates a macro at its first use instead of at import |
| `unwrap_expr` | tilelang's mutable variables are values of primitives |
| `get_let_value`, `has_let_value` | the value of a name in a kernel |
| `get_buffer_region_from_load` | `buf[i, 0:n]` is a place in memory |
| `KernelLaunchFrame` | threads of the kernel that is being traced |
| `CompiledArtifact` | the result of `tilelang.lower` |
| `tilelang.transform.LowerDeviceKernelLaunch`, `has_cuda_pdl_sync` | kernels with T.pdl_sync are launched
programmatically dependent (`dependent_launches`); tilelang marks them, but does not pass the mark to its tvm_ffi
runtime | | `nvcc.compile_cuda` | kernels of this package are compiled with few headers, see shipped.py | | `GemmBase`,
`register_gemm_impl`, `GEMM_IMPLEMENTATIONS` | T.gemm in the simulator; tilelang's own entries stay for GPUs | |
`cuda_pipeline.have_mbarrier` | barriers in kernels for the simulator | | `target_is_cuda`, `target_is_turing`,
`target_is_volta`, `is_fragment`, `simplify` | used by tilelang's own T.gemm | | `make_span`, `get_stmt_span` | the
author's lines in errors and in reports of the simulator |

Differences:

| since | change | here |
| --- | --- | --- |
| 0.1.13 | statements carry the author's line | before: a table of lines beside the kernel, filled while it is traced (`_StatementLines`) |
| 0.1.13 | `GemmFMA`, plain T.gemm for GPUs without tensor cores | before: T.gemm of such shapes and dtypes is refused by tilelang |
| 0.1.14 | `T.Kernel` takes `cluster_dims`, `T.tma_copy` takes `cluster_mask` | before: kernels have no clusters (`CLUSTERS`) |
| 0.1.14 | parts of tensors are `tl.region` | before: `tl.tileop.region` (`REGIONS`) |
| 0.1.15 | a kernel loops over Python's iterables, which expands the loop's body | before: `_install_python_loops`, without `break` and `continue` |
| 0.1.15 | an error while a kernel is traced leaves no open frames | before: `_install_unwinding` |
| 0.1.15 | threads of a launch are an annotation of its block, and optional | before: loops around the block (`launch_threads_of`), with a default (`threads_of_launch`) |
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tilelang
import tilelang.cuda.op.gemm as _cuda_gemm
import tilelang.ir as _tilelang_ir
import tilelang.language as T
from tilelang.contrib import nvcc
from tilelang.cuda import pipeline as cuda_pipeline
from tilelang.cuda.target import target_is_cuda, target_is_turing, target_is_volta
from tilelang.engine.param import CompiledArtifact
from tilelang.language.eager import builder as eager_builder
from tilelang.language.eager.ast import DSLMutator, mutate
from tilelang.language.eager.builder import BoolOpFrame, Builder, Macro, get_type_hints, unwrap_expr
from tilelang.language.frame import get_let_value, has_let_value
from tilelang.language.kernel import KernelLaunchFrame
from tilelang.language.utils import get_buffer_region_from_load
from tilelang.tileop.gemm.gemm_base import GemmBase
from tilelang.tileop.gemm.registry import register_gemm_impl
from tilelang.transform.simplify import _Simplify as simplify
from tilelang.utils.language import is_fragment
from tvm import tirx
from tvm.ir import SourceName, Span
from tvm.tirx.script.builder.frame import ForFrame, WhileFrame
from tvm.tirx.stmt_functor import post_order_visit

__all__ = (
    "CLUSTERS", "GEMM_IMPLEMENTATIONS", "REGIONS", "BoolOpFrame", "Builder", "CompiledArtifact", "DSLMutator", "GemmBase",
    "KernelLaunchFrame", "Macro", "cuda_pipeline", "eager_builder", "get_buffer_region_from_load", "get_let_value",
    "get_stmt_span", "get_type_hints", "has_let_value", "is_fragment", "lane_variables", "launch_threads_of",
    "make_span", "mutate", "nvcc", "register_gemm_impl", "simplify", "target_is_cuda", "threads_of_launch", "unwrap_expr",
)  # fmt: skip

# -- T.gemm -----------------------------------------------------------------------------------------------------------


def _is_ampere_or_later(target: Any) -> bool:
    return target_is_cuda(target) and not (target_is_volta(target) or target_is_turing(target))


# tilelang's GPU implementations of the instructions that it may choose for a simulated kernel: name, instruction,
# targets, class.
GEMM_IMPLEMENTATIONS: list[tuple[str, str, Callable[[Any], bool], Any]] = [
    ("cuda.mma", _cuda_gemm.GEMM_INST_MMA, _is_ampere_or_later, _cuda_gemm.GemmMMA),
    ("cuda.mma_sm70", _cuda_gemm.GEMM_INST_MMA, target_is_volta, _cuda_gemm.GemmMMASm70),
    ("cuda.wgmma", _cuda_gemm.GEMM_INST_WGMMA, target_is_cuda, _cuda_gemm.GemmWGMMA),
]
if hasattr(_cuda_gemm, "GEMM_INST_FMA"):
    GEMM_IMPLEMENTATIONS.append(("cuda.fma", _cuda_gemm.GEMM_INST_FMA, target_is_cuda, _cuda_gemm.GemmFMA))

# Operators that name a part of a tensor as an operand; the first one since 0.1.14.
REGIONS = ("tl.region", "tl.tileop.region")

# Whether kernels may have clusters of blocks, with copies to several of them.
CLUSTERS = (
    "cluster_dims" in inspect.signature(T.Kernel).parameters
    and "cluster_mask" in inspect.signature(T.tma_copy).parameters
)

# -- threads of a launch ----------------------------------------------------------------------------------------------


def threads_of_launch(launch: Any) -> tuple[int, int, int] | None:
    """Threads of the kernel being traced, by dimension; None if its author gave none. Versions before 0.1.15 set their
    default of 128 at once."""
    if getattr(launch, "thread_extents", ()) is None:
        return None
    x, y, z = launch.get_thread_extents()
    return x, y, z


def launch_threads_of(body: tirx.Stmt) -> list[tuple[int, ...] | None]:
    """Threads of each launch of a traced kernel, by dimension; None if they are not constant."""
    found: list[tuple[int, ...] | None] = []
    loops: dict[str, Any] = {}  # extents of the launch's loops; visited from the inside, so behind its block

    def numbers(extents: Any) -> tuple[int, ...] | None:
        known = extents and all(isinstance(extent, int | tirx.IntImm) for extent in extents)
        return tuple(int(extent) for extent in extents) if known else None

    def look(node: Any) -> None:
        if isinstance(node, tirx.SBlock) and node.name_hint == "tilelang_root":
            found.append(numbers(node.annotations.get("tl.launch_threads")))
        elif isinstance(node, tirx.For) and node.kind == tirx.ForKind.THREAD_BINDING:
            name = str(node.thread_binding.thread_tag)
            if name.startswith("threadIdx."):
                loops[name] = node.extent
            if name == "threadIdx.x" and found:
                found[-1] = numbers([loops.pop(f"threadIdx.{axis}", 1) for axis in "xyz"])

    post_order_visit(body, look)
    return found


def lane_variables(body: tirx.Stmt) -> set[Any]:
    """The variables of a traced kernel for threadIdx.x, one per launch."""
    found = set()

    def look(node: Any) -> None:
        if isinstance(node, tirx.For) and node.kind == tirx.ForKind.THREAD_BINDING:
            if str(node.thread_binding.thread_tag) == "threadIdx.x":
                found.add(node.loop_var)
        elif isinstance(node, tirx.Bind) and isinstance(node.value, tirx.Call):
            if getattr(node.value.op, "name", "") == "tl.launch_thread_idx" and int(node.value.args[0]) == 0:
                found.add(node.var)

    post_order_visit(body, look)
    return found


# -- loops over Python's iterables ------------------------------------------------------------------------------------


class _PythonLoop(eager_builder.Frame):
    """A loop whose body is traced once for each value."""


class _Range:
    """Result of `range(…)` in a kernel: a serial loop in a for statement, Python's range elsewhere."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given, self.named = given, named

    def __iter__(self) -> Iterator[int]:
        return iter(range(*self.given))


# Operands of a kernel's for statement over which Python could not loop.
_NO_ITERABLES = (
    ForFrame, eager_builder.SerialForWithStep, eager_builder.UnrollForWithStep, tirx.PrimExpr, tirx.Buffer, tirx.BufferRegion,
)  # fmt: skip


def _install_python_loops() -> None:
    loop, leave, go_on = Builder.ctx_for, Builder.ctx_break, Builder.ctx_continue

    def ctx_for(self: Any, it: Any) -> Iterator[Any]:
        if isinstance(it, _Range):
            it = T.serial(*it.given, **it.named)
        if isinstance(it, _NO_ITERABLES) or not hasattr(type(it), "__iter__"):
            yield from loop(self, it)
            return
        self.check_continue_break()
        place = len(self.frames)
        self.frames.append(_PythonLoop())
        known = dict(self.name_inside_frame)
        for value in it:
            yield value
            # The next round's names are new, not this round's bound again.
            self.name_inside_frame = dict(known)
        self.frames.pop(place)

    def refuse(self: Any, what: str) -> None:
        index = self.find_frame_idx((_PythonLoop, ForFrame, WhileFrame))
        if index is not None and isinstance(self.frames[index], _PythonLoop):
            raise NotImplementedError(
                f"{what} in a loop over a Python iterable needs tilelang 0.1.15; use a T.serial loop, or choose the values "
                "before the kernel"
            )

    def ctx_break(self: Any) -> Any:
        refuse(self, "break")
        return leave(self)

    def ctx_continue(self: Any) -> Any:
        refuse(self, "continue")
        return go_on(self)

    def override(self: Any, name: str) -> Any:
        if name != "range":
            raise ValueError(f"unknown override: {name}")
        return _Range

    Builder.ctx_for, Builder.ctx_break, Builder.ctx_continue = ctx_for, ctx_break, ctx_continue
    Builder.override = override


# -- errors while a kernel is traced ----------------------------------------------------------------------------------


def _install_unwinding() -> None:
    """Leave the frames that an error ends: the next kernel would find the launch of this one still open."""
    enter = Builder.with_frame

    @contextlib.contextmanager
    def with_frame(self: Any, frame: Any) -> Iterator[Any]:
        place = len(self.frames)
        try:
            with enter(self, frame) as value:
                yield value
        except BaseException as error:
            while len(self.frames) > place:
                self.frames.pop().__exit__(type(error), error, error.__traceback__)
            raise

    Builder.with_frame = with_frame


if not hasattr(eager_builder, "PythonLoopFrame"):  # before 0.1.15
    _install_python_loops()
    _install_unwinding()

# -- lines of statements ----------------------------------------------------------------------------------------------


class _StatementLines:
    """Lines of the statements of traced kernels, by node; passes keep nodes in which they change nothing. Nodes have no
    room for a line in tilelang 0.1.12. The table keeps the last kernels' lines: a kernel is compiled soon after it was
    traced."""

    MOST = 20_000

    def __init__(self) -> None:
        self._spans: dict[Any, Span] = {}

    @staticmethod
    def _key(statement: tirx.Stmt) -> Any:
        """A loop by its variable, which stays when a pass changes the loop's body."""
        return statement.loop_var if isinstance(statement, tirx.For) else statement

    def note(self, statement: tirx.Stmt, span: Span) -> None:
        if self._spans.setdefault(self._key(statement), span) is span and len(self._spans) > self.MOST:
            del self._spans[next(iter(self._spans))]

    def get(self, statement: tirx.Stmt) -> Span | None:
        return self._spans.get(self._key(statement))

    def install(self) -> None:
        """Let the kernel builder record the statements of each line of a kernel."""
        set_fileline, enter, get = Builder.set_fileline, Builder.with_frame, Builder.get
        lines = self

        def frame_of(builder: Any) -> Any:
            """The innermost open frame, which takes statements."""
            for frame in reversed(builder.frames):
                if hasattr(frame, "stmts"):
                    inner = [f for f in getattr(frame, "frames", ()) if hasattr(f, "stmts")]
                    return inner[-1] if isinstance(frame, KernelLaunchFrame) and inner else frame
            return None

        def flush(builder: Any) -> None:
            frame, start, span = getattr(builder, "tsn_pending", None) or (None, 0, None)
            builder.tsn_pending = None
            if frame is not None:
                for statement in list(frame.stmts)[start:]:
                    lines.note(statement, span)

        def with_line(self: Any, filename: str, lineno: int, name: str) -> None:
            set_fileline(self, filename, lineno, name)
            flush(self)
            frame = frame_of(self)
            if frame is not None and lineno > 0:
                self.tsn_pending = (frame, len(frame.stmts), make_span(filename, lineno))

        @contextlib.contextmanager
        def with_frame(self: Any, frame: Any) -> Iterator[Any]:
            outer, line = frame_of(self), (self.current_file, self.current_line)
            start = len(outer.stmts) if outer is not None else 0
            with enter(self, frame) as value:
                yield value
                flush(self)
            if outer is not None and line[1] > 0:
                for statement in list(outer.stmts)[start:]:
                    lines.note(statement, make_span(*line))

        def got(self: Any) -> Any:
            flush(self)
            return get(self)

        Builder.set_fileline, Builder.with_frame, Builder.get = with_line, with_frame, got


# Launch parameter of programmatic dependent launch.
_DEPENDENT = "tirx.use_programtic_dependent_launch"
_dependent = threading.local()  # on: kernels of this thread


@contextlib.contextmanager
def dependent_launches() -> Iterator[None]:
    """Compile kernels that call T.pdl_sync for programmatic dependent launch."""
    before = getattr(_dependent, "on", False)
    _dependent.on = True
    try:
        yield
    finally:
        _dependent.on = before


def _install_dependent_launches() -> None:
    lower = tilelang.transform.LowerDeviceKernelLaunch

    def lower_device_kernel_launch() -> Callable[[Any], Any]:
        def run(mod: Any) -> Any:
            mod = lower()(mod)
            for variable, func in list(mod.functions.items()) if getattr(_dependent, "on", False) else ():
                parameters = list((func.attrs or {}).get("tirx.kernel_launch_params", ()))
                if parameters and "has_cuda_pdl_sync" in func.attrs and _DEPENDENT not in parameters:
                    # Inserted first: the size of dynamic shared memory must be last.
                    mod[variable] = func.with_attr("tirx.kernel_launch_params", [_DEPENDENT, *parameters])
            return mod

        return run

    tilelang.transform.LowerDeviceKernelLaunch = lower_device_kernel_launch


_install_dependent_launches()


def make_span(file: str, line: int) -> Span:
    """A whole line of a source file."""
    return Span(SourceName(file), line, line, 1, 1 << 20)


if hasattr(_tilelang_ir, "get_stmt_span"):
    get_stmt_span = _tilelang_ir.get_stmt_span
else:
    _lines = _StatementLines()
    _lines.install()
    get_stmt_span = _lines.get
