"""Passes of `tsn.jit` on a traced kernel before tilelang compiles it.

- Placeholders become the kernel's own context parameter and its ring of shared memory, and the context parameter moves
  to the front so that a call can bind it once.
- No buffer parameter is `__restrict__`: peers write to buffers that the kernel only reads, and a restrict-qualified
  read-only pointer is loaded through the non-coherent cache.
- Calls with an effect get statements of their own (effects.py), loops that may be empty a condition, and the
  hazards of hazards.py are removed.
"""

import functools
import inspect
import math
from dataclasses import dataclass

from tilelang import tvm
from tvm import DataType, tirx
from tvm.tirx.analysis import undefined_vars
from tvm.tirx.stmt_functor import ir_transform

from tilescale_net.compiler.ir import (
    PLACEHOLDERS,
    changed_block,
    collect,
    kernel_name,
    location_suffix,
    op_name,
    operator_of,
    our_calls,
    statement_suffix,
    typed_name,
)
from tilescale_net.compiler.lowering import null_pointer
from tilescale_net.compiler.operators import CONTEXT, RING, SHARED_BYTES, ring_placeholder
from tilescale_net.compiler.passes import effects, hazards
from tilescale_net.compiler.simulator import bounds
from tilescale_net.errors import KernelError

# The extent of a context parameter is a variable of this name, which identifies the parameter.
CONTEXT_WORDS = "tsn_context_words"


@dataclass(frozen=True)
class Prepared:
    """A kernel ready for tilelang.

    Attributes:
        func: the rewritten function; its first parameter is the context, if any.
        context_index: the author's position of the context parameter, or None.
        names: names of the author's parameters, in order, the context included.
        ring_bytes: shared memory added for bulk copies.
    """

    func: tirx.PrimFunc
    context_index: int | None
    names: tuple[str, ...]
    ring_bytes: int


def find_context(func: tirx.PrimFunc) -> int | None:
    """Index of the parameter annotated with N.Context(), or None. Raises KernelError when there are two."""
    found = []
    for index, param in enumerate(func.params):
        buffer = func.buffer_map.get(param)
        if buffer is not None and len(buffer.shape) == 1 and getattr(buffer.shape[0], "name", "") == CONTEXT_WORDS:
            found.append(index)
    if len(found) > 1:
        names = " and ".join(str(func.buffer_map[func.params[i]].name) for i in found)
        raise KernelError(f"kernel {kernel_name(func)} has {len(found)} N.Context() parameters ({names}); it takes one")
    return found[0] if found else None


READ, READ_WRITE = 1, 3  # access masks of tvm_access_ptr


def _pointer(buffer: tirx.Buffer, elements: int, access: int = READ_WRITE) -> tirx.PrimExpr:
    """The address of a buffer for accesses to `elements` elements."""
    zero, extent, mask = (tirx.IntImm("int32", v) for v in (0, elements, access))
    return tirx.call_intrin(
        "handle", "tirx.tvm_access_ptr", tirx.type_annotation(buffer.dtype), buffer.data, zero, extent, mask
    )


def _parameter_names(func: tirx.PrimFunc) -> tuple[str, ...]:
    """The author's names of parameters: tilelang renames a variable that a macro takes under another name."""
    parameters = inspect.signature(func.orig_func).parameters if hasattr(func, "orig_func") else {}
    # An annotation of None omits a parameter, for kernels whose variants differ in parameters.
    written = tuple(name for name, parameter in parameters.items() if parameter.annotation is not None)
    if len(written) == len(func.params):
        return written
    return tuple(str(func.buffer_map[p].name) if p in func.buffer_map else str(p.name) for p in func.params)


@functools.cache
def _keep_freed_memory() -> None:
    """Let the C library keep freed memory: TVM makes and drops hundreds of z3 solvers per kernel, and new pages from
    the system for each took a fifth of lowering. glibc raises its limits to the size of a large freed block, up to 32
    MiB. This block is never touched."""
    bytes(31 << 20)


def prepare(func: tirx.PrimFunc, reports_bounds: bool = False) -> Prepared:
    """Rewrite a traced kernel as described at the top of this file. `reports_bounds`: the kernel runs where accesses
    outside of tensors are reported, see bounds.py. Raises KernelError: primitives without an N.Context() parameter,
    more than one such parameter, a variable that no argument gives, or a hazard of hazards.py."""
    _keep_freed_memory()
    index = find_context(func)
    calls = our_calls(func.body)
    if index is None and any(op_name(call) == CONTEXT for call in calls):
        culprit = next(call for call in calls if op_name(call) not in PLACEHOLDERS)
        raise KernelError(
            f"kernel {kernel_name(func)} uses {typed_name(culprit)} but has no context; add a parameter such as "
            f"`ctx: N.Context()`{location_suffix(culprit)}"
        )
    hazards.check(func)
    tiles = bounds.tile_loops(func.body)
    body = bounds.settle_guards(hazards.guard_empty_loops(effects.rewrite(func)), reports_bounds)
    _check_variables(func, body)
    for param in func.params:
        if param not in func.buffer_map and str(param.dtype) == "uint64":
            raise KernelError(
                f"kernel {kernel_name(func)}: parameter {param.name} is uint64, which TVM cannot pass to a GPU kernel; "
                "declare it T.int64 and cast it inside"
            )
    names = _parameter_names(func)
    ring_bytes = 0
    if calls:
        body, ring_bytes = _supply_rings(body)
        context = _pointer(func.buffer_map[func.params[index]], 1) if index is not None else None
        body = ir_transform(body, None, lambda c: context if op_name(c) == CONTEXT else None, ["tirx.Call"])
        body = hazards.rewrite(body, guards=not reports_bounds)
    if reports_bounds:
        body = bounds.check_accesses(body, tiles)
    params = list(func.params)
    if index is not None:
        params.insert(0, params.pop(index))
    func = tirx.PrimFunc(params, body, func.ret_type, func.buffer_map, func.attrs)
    func = func.with_attr("tl.non_restrict_params", [buffer.data for buffer in func.buffer_map.values()])
    return Prepared(func, index, names, ring_bytes)


def _check_variables(func: tirx.PrimFunc, body: tirx.Stmt) -> None:
    """Raise KernelError if the body, rewritten, uses a variable that no argument gives."""
    known = list(func.params)
    for buffer in func.buffer_map.values():
        known += [
            buffer.data,
            *(v for v in (*buffer.shape, *buffer.strides, buffer.elem_offset) if isinstance(v, tirx.Var)),
        ]
    try:
        undefined = undefined_vars(body, known)
    except tvm.error.InternalError:
        return  # T.Persistent uses the variable of a loop before the loop, which TVM's analysis refuses
    for variable in undefined:
        statements = collect(func.body, lambda node: isinstance(node, tirx.Stmt))
        users = (s for s in statements if any(v.same_as(variable) for v in undefined_vars(s, [])))
        user = next(users, None)
        name = str(variable.name)
        raise KernelError(
            f'kernel {kernel_name(func)} uses {name}, which no argument gives: each T.dynamic("{name}") makes a variable of its own; '
            f'call it once, before the kernel ({name} = T.dynamic("{name}")), and write {name} in the kernel'
            + (statement_suffix(user) if user is not None else "")
        )


def _shared_bytes(block: tirx.SBlock) -> int:
    """Shared memory of the author's own buffers in a launch, as far as sizes are known."""
    total = 0
    for inner in collect(block, lambda node: isinstance(node, tirx.SBlock)):
        for buffer in inner.alloc_buffers:
            if str(buffer.scope()).startswith("shared"):
                elements = math.prod(int(extent) for extent in buffer.shape if isinstance(extent, tirx.IntImm))
                total += -(-elements * DataType(buffer.dtype).bits * DataType(buffer.dtype).lanes // 8)
    return total


def _without_ring(call: tirx.Call, room: int) -> tirx.Call | None:
    """A copy of engine "auto" without its ring, which does not fit into `room` bytes; None to keep the call."""
    operator = operator_of(call)
    if operator is None or "ring" not in operator.names:
        return None
    copy = operator.read(call)
    if copy.engine != "auto" or copy.stages * copy.stage_bytes <= room:
        return None
    zero = tirx.IntImm("int32", 0)
    return operator.replace(call, stages=zero, stage_bytes=zero, ring=ring_placeholder(0))


def _supply_rings(body: tirx.Stmt) -> tuple[tirx.Stmt, int]:
    """Replace the ring placeholders of each launch by one shared buffer as large as its largest ring.

    One is enough: a block's calls follow one another, and each leaves the ring idle. Copies with engine "auto" use none
    if the kernel's own shared memory leaves no room.

    To tilelang a copy reads its ring, so it puts a barrier between the copy and writes to a buffer that shares the
    ring's memory. There is no barrier between two copies: the same thread uses the ring in both.
    """
    largest = 0

    def supply(block: tirx.SBlock) -> tirx.SBlock | None:
        nonlocal largest
        if block.name_hint != "tilelang_root":
            return None
        room = SHARED_BYTES - _shared_bytes(block)
        body = ir_transform(block.body, None, lambda call: _without_ring(call, room), ["tirx.Call"])
        need = max((int(call.args[0]) for call in our_calls(body) if op_name(call) == RING), default=0)
        largest = max(largest, need)
        ring = tirx.decl_buffer((need,), "uint8", "tsn_ring", scope="shared.dyn") if need else None

        def replace(call: tirx.Call) -> tirx.PrimExpr | None:
            if op_name(call) != RING:
                return None
            return _pointer(ring, need, READ) if int(call.args[0]) else null_pointer()

        inner = ir_transform(body, None, replace, ["tirx.Call"])
        allocated = [*block.alloc_buffers, ring] if ring is not None else block.alloc_buffers
        return changed_block(block, inner, allocated)

    return ir_transform(body, None, supply, ["tirx.SBlock"]), largest
