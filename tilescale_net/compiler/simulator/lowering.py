"""Lowering of kernels for the simulator, as far as it differs from a GPU.

T.gemm: every thread adds up its own elements of the result, in the order of k. tilelang chooses an implementation of
T.gemm by target; tensor-core ones need warp-wide instructions. While a kernel is lowered for the simulator, `PlainGemm`
replaces them: plain code, right for every dtype. Fragment layouts are inferred from it, so the rest of the kernel
agrees.

Hopper's asynchronous operators complete before they return: T.tma_copy and T.async_copy become T.copy, T.wgmma_gemm
becomes T.gemm, a wait for GEMMs a barrier of the warp, and a wait for copies or for a warpgroup's registers nothing.
Barriers stay: `device/host/tilelang.h` has them, so copying and multiplying warps synchronise as on a GPU, and a
missing arrival or wait shows. Other such operators are rejected by name.

Passes that tilelang repeats only for the generated code are omitted: more than half of the time of lowering. It
simplifies a kernel nine times; another compiler simplifies the simulator's source, and the source of this package's
kernels is identical after one pass. Conditions are not moved out of loops either, which changes the source of one
kernel in thirty and takes a twentieth of the time.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang import tvm
from tvm import tirx
from tvm.ir.instrument import pass_instrument
from tvm.tirx import PrimFunc
from tvm.tirx.stmt_functor import ir_transform

from tilescale_net.compiler.ir import kernel_name, op_name
from tilescale_net.compiler.passes import Prepared, prepare
from tilescale_net.compiler.simulator import bounds, cache, sites
from tilescale_net.compiler.versions import (
    GEMM_IMPLEMENTATIONS,
    CompiledArtifact,
    GemmBase,
    cuda_pipeline,
    is_fragment,
    register_gemm_impl,
    simplify,
)
from tilescale_net.errors import SimulatorUnsupported

# The simulator runs code for an architecture without asynchronous copies.
TARGET = {"kind": "cuda", "arch": "sm_70"}
_state = threading.local()


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Lower T.gemm to plain code within this context."""
    before = is_plain()
    _state.plain = True
    try:
        yield
    finally:
        _state.plain = before


def is_plain() -> bool:
    """Whether this thread lowers for the simulator."""
    return getattr(_state, "plain", False)


@dataclass(frozen=True)
class RowLayout:
    """Layout of a fragment's elements over threads: a row lies in one group of threads.

    The group depends on the number of rows alone, if the columns permit it, so that fragments of equal height match: a
    vector reduced from one's columns may scale the rows of another.

    Attributes:
        rows, columns: of the fragment.
        groups: of threads; rows go to them in turn.
        width: threads of a group; columns go to them in turn.
    """

    rows: int
    columns: int
    groups: int
    width: int

    @classmethod
    def of(cls, buffer: tirx.Buffer, threads: int) -> RowLayout:
        """For a fragment; raises SimulatorUnsupported if it cannot be spread evenly over the threads."""
        rows, columns = (int(extent) for extent in buffer.shape)
        for groups in range(math.gcd(rows, threads), 0, -1):
            if rows % groups == threads % groups == 0 and columns % (threads // groups) == 0:
                return cls(rows, columns, groups, threads // groups)
        raise SimulatorUnsupported(
            f"T.gemm: the fragment {buffer.name} of {rows} x {columns} elements cannot be spread evenly over {threads} "
            "threads, as the simulator does; use another number of threads there"
        )

    @property
    def elements(self) -> int:
        """Elements that a thread holds."""
        return self.rows // self.groups * (self.columns // self.width)

    def fragment(self) -> T.Fragment:
        """The layout as a tilelang Fragment."""
        groups, width, per_row = self.groups, self.width, self.columns // self.width
        return T.Fragment(
            [self.rows, self.columns],
            forward_fn=lambda i, j: ((i % groups) * width + j % width, (i // groups) * per_row + j // width),
        )

    def element(self, thread: tirx.PrimExpr, n: Any) -> tuple[Any, Any]:
        """Row and column of the n-th element of a thread."""
        per_row = self.columns // self.width
        return (n // per_row) * self.groups + thread // self.width, (n % per_row) * self.width + thread % self.width


class PlainGemm(GemmBase):
    """`c += a @ b` in loops; operands that lie in registers pass through shared memory, where all threads read them."""

    def infer_layout(self, target: Any, thread_nums: Any) -> dict[Any, T.Fragment]:
        """Layouts of operands in registers; operands in shared memory stay unchanged."""
        buffers = (buffer for buffer in (self.A, self.B, self.C) if is_fragment(buffer))
        return {buffer: RowLayout.of(buffer, int(thread_nums)).fragment() for buffer in buffers}

    def lower(
        self, layout_map: Any, target: Any, thread_bounds: Any, thread_index: Any, mbar_phase_expr: Any = None
    ) -> tirx.PrimFunc:
        """The loops as a T.prim_func."""
        thread = thread_index - thread_bounds.min
        layouts = [RowLayout.of(b, int(thread_bounds.extent)) if is_fragment(b) else None for b in (self.A, self.B)]
        loops = _loops(self, thread, RowLayout.of(self.C, int(thread_bounds.extent)))
        a_from, b_from = (_stage(thread, layout) if layout is not None else None for layout in layouts)
        return simplify(_plain_gemm(self, loops, a_from, b_from), inline_let=True)


def _stage(thread: tirx.PrimExpr, layout: RowLayout) -> Any:
    """A macro that copies a fragment to shared memory."""

    @T.macro
    def stage(source: Any, target: Any) -> None:
        for n in T.serial(layout.elements):
            i, j = layout.element(thread, n)
            target[i, j] = source[i, j]

    return stage


def _loops(gemm: GemmBase, thread: tirx.PrimExpr, layout: RowLayout) -> Any:
    """A macro `(a, b)`, each a function from two indices to an element, that does the thread's part of the product."""
    extent, trans_a, trans_b, total, c = gemm.K, gemm.trans_A, gemm.trans_B, gemm.accum_dtype, gemm.C

    @T.macro
    def multiply(a: Callable[..., Any], b: Callable[..., Any]) -> None:
        acc = T.alloc_local((1,), total)
        for n in T.serial(layout.elements):
            i, j = layout.element(thread, n)
            acc[0] = T.if_then_else(gemm.clear_accum, T.cast(0, total), c[i, j])
            for k in T.serial(extent):
                left = a(k, i) if trans_a else a(i, k)
                right = b(j, k) if trans_b else b(k, j)
                acc[0] += T.cast(left, total) * T.cast(right, total)
            c[i, j] = acc[0]

    return multiply


def _element(region: Any) -> Callable[[Any, Any], tirx.PrimExpr]:
    """The elements of an operand in shared memory, by indices within the named part."""
    start = [axis.min for axis in region.region]
    return lambda i, j: region.buffer[tuple([*start[:-2], start[-2] + i, start[-1] + j])]


def _plain_gemm(gemm: GemmBase, multiply: Callable[..., Any], stage_a: Any, stage_b: Any) -> tirx.PrimFunc:
    """The prim_func: stages operands in registers, then multiplies."""
    a_buffer, b_buffer = gemm.A, gemm.B
    a_shape, b_shape = (tuple(int(n) for n in b.shape[-2:]) for b in (a_buffer, b_buffer))

    if stage_a is None and stage_b is None:

        @T.prim_func
        def plain_gemm() -> None:
            multiply(_element(gemm.ARegion), _element(gemm.BRegion))

    elif stage_b is None:

        @T.prim_func
        def plain_gemm() -> None:
            a = T.alloc_shared(a_shape, gemm.a_dtype)
            stage_a(a_buffer, a)
            T.sync_threads()
            multiply(lambda i, j: a[i, j], _element(gemm.BRegion))

    elif stage_a is None:

        @T.prim_func
        def plain_gemm() -> None:
            b = T.alloc_shared(b_shape, gemm.b_dtype)
            stage_b(b_buffer, b)
            T.sync_threads()
            multiply(_element(gemm.ARegion), lambda i, j: b[i, j])

    else:

        @T.prim_func
        def plain_gemm() -> None:
            a = T.alloc_shared(a_shape, gemm.a_dtype)
            b = T.alloc_shared(b_shape, gemm.b_dtype)
            stage_a(a_buffer, a)
            stage_b(b_buffer, b)
            T.sync_threads()
            multiply(lambda i, j: a[i, j], lambda i, j: b[i, j])

    return plain_gemm


def _install_gemm() -> None:
    """Put this implementation beside tilelang's own; called once, when this module is imported."""

    # tilelang's own entries, by their names, except while `plain` is on.
    for name, instruction, fits, implementation in GEMM_IMPLEMENTATIONS:
        register_gemm_impl(name, instruction, lambda t, fits=fits: not is_plain() and fits(t), implementation)
    for instruction in {entry[1] for entry in GEMM_IMPLEMENTATIONS}:
        register_gemm_impl(f"simulator.{instruction}", instruction, lambda t: is_plain(), PlainGemm)


_install_gemm()


# -- operators of Hopper ----------------------------------------------------------------------------------------------

_COPY = "tl.tileop.copy"
_AS = {"tl.tileop.async_copy": _COPY, "tl.tileop.tma_copy": _COPY, "tl.tileop.wgmma_gemm": "tl.tileop.gemm"}
# Kernels of a stream are serial, so T.pdl_sync waits for none.
_NOTHING = {
    "tirx.ptx_commit_group", "tirx.ptx_wait_group", "tl.fence_proxy_async", "tl.no_set_max_nreg", "tl.pdl_sync",
    "tl.pdl_trigger", "tl.set_max_nreg", "tl.tma_store_arrive", "tl.tma_store_wait", "tl.warpgroup_arrive",
    "tl.warpgroup_commit_batch", "tl.warpgroup_fence_operand",
}  # fmt: skip
# All lanes of a warp wait for these together, so each knows that the others have read the operands.
_MEETINGS = {"tl.wait_wgmma", "tl.warpgroup_wait"}
# Annotations of engines and their completion.
_ENGINE = {"barrier", "disable_tma", "eviction_policy", "leader_scope_threads", "prefer_instruction", "use_tma"}
_REFUSED = {
    "cluster_mask": "a copy to several blocks of a cluster (cluster_mask)",
    "dst_block": "a copy to another block of a cluster (dst_block)",
    "is_gather4": "T.tma_gather4",
    "is_scatter4": "T.tma_scatter4",
}
_REFUSED_CALLS = {
    "tl.mbarrier_expect_tx": "bytes that a barrier waits for (T.mbarrier_expect_tx): T.tma_copy counts its own"
}


def without_engines(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel without such operators. Raises SimulatorUnsupported for operators that it needs."""

    refused: list[str] = []  # TVM, which calls `replace`, would make another error of one that it raises

    def replace(call: tirx.Call) -> tirx.PrimExpr | None:
        name, given = op_name(call), dict(call.annotations or {})
        if name in _REFUSED_CALLS:
            refused.append(_REFUSED_CALLS[name])
        if name in _NOTHING:
            return tirx.const(0, "int32")
        if name in _MEETINGS:
            return tirx.call_intrin("void", tvm.ir.Op.get("tl.sync_warp"))
        if not name.startswith("tl.tileop.") or not (name in _AS or given):
            return None
        refused.extend(_REFUSED[key] for key in given if key in _REFUSED)
        others = {key: value for key, value in given.items() if key not in _ENGINE}
        return tirx.Call(call.dtype, tvm.ir.Op.get(_AS.get(name, name)), call.args, annotations=others, span=call.span)

    body = ir_transform(func.body, None, replace, ["tirx.Call"])
    if refused:
        raise SimulatorUnsupported(
            f"kernel {kernel_name(func)}: the simulator cannot run {'; '.join(refused)}. Run this kernel on a GPU, or keep "
            "that part out of it in the simulator"
        )
    return tirx.PrimFunc(func.params, body, func.ret_type, func.buffer_map, func.attrs)


def _install_barriers() -> None:
    """Let kernels for the simulator have barriers, though the architecture that they are lowered for has none."""
    known = cuda_pipeline.have_mbarrier
    cuda_pipeline.have_mbarrier = lambda target: is_plain() or known(target)


_install_barriers()


# -- omitted passes ---------------------------------------------------------------------------------------------------


@pass_instrument
class SimplifyOnce:
    """A pass instrument for one lowering."""

    def __init__(self) -> None:
        self._previous = ""
        self._simplified = False

    def should_run(self, module: Any, info: Any) -> bool:
        name, previous = str(info.name), self._previous
        self._previous = name
        if name == "tl.Simplify":
            return not self._simplified
        if name == "s_tir.HoistIfThenElse":
            return False
        return (name, previous) != ("tirx.Simplify", "tl.LowerIntrin")  # later passes only print expressions

    def run_after_pass(self, module: Any, info: Any) -> None:
        if str(info.name) == "tl.Simplify":
            self._simplified = True


# -- a whole kernel ------------------------------------------------------------------------------------------------------


def prepared(func: PrimFunc, configs: dict[str, Any]) -> Prepared:
    """A traced kernel prepared for the simulator; accesses outside of tensors are reported unless its options say otherwise."""
    return prepare(func, not any(key in configs for key in bounds.UNGUARDED))


def lowered(func: PrimFunc, configs: dict[str, Any], lower: Callable[..., Any]) -> cache.CachedKernel:
    """A traced kernel as the simulator runs it. `configs`: options of tilelang's passes. `lower`: `jit.lower`."""

    def simplifying_once(func: PrimFunc, target: dict[str, Any], pass_configs: dict[str, Any]) -> CompiledArtifact:
        try:
            return lower(func, target, pass_configs, [SimplifyOnce()])
        except tvm.error.InternalError:
            # LowerIntrin binds a repeated division to a name, which the next pass removes.
            return lower(func, target, pass_configs)

    name = kernel_name(func)
    marked, lines_of_statements = sites.mark(func)
    ready = prepared(marked, configs)
    numbered, lines = sites.number(without_engines(ready.func), sites.lines_of(func), lines_of_statements)
    with plain():
        code = cache.get_or_lower(name, numbered, TARGET, {**bounds.UNGUARDED, **configs}, simplifying_once)
    return cache.CachedKernel(name, ready.context_index, ready.names, ready.ring_bytes, tuple(lines), code)
