"""Operators of Hopper that work on while their threads go on, as ones that are done when they return.

The simulator has no second engine for them: T.tma_copy and T.async_copy become T.copy, T.wgmma_gemm becomes T.gemm, what
waits for products a meeting of the warp, and what waits for copies or gives registers to warpgroups nothing. Barriers
stay: `device/host/mbarrier.h` has them, so that warps which copy and warps which multiply meet as they do on a GPU, and a
missing arrival or wait shows. What has no such meaning is refused here, by its name.
"""

import contextlib

from tilelang import tvm
from tilelang.cuda import pipeline
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from tilescale_net.compiler.ir import kernel_name, op_name
from tilescale_net.compiler.simulator import gemm
from tilescale_net.errors import SimulatorUnsupported

_COPY = "tl.tileop.copy"
_AS = {
    "tl.tileop.async_copy": _COPY,
    "tl.tileop.tma_copy": _COPY,
    "tl.tileop.wgmma_gemm": "tl.tileop.gemm",
}
_NOTHING = {
    "tirx.ptx_commit_group",
    "tirx.ptx_wait_group",
    "tl.fence_proxy_async",
    "tl.no_set_max_nreg",
    "tl.pdl_sync",  # kernels of a stream run one after the other
    "tl.pdl_trigger",
    "tl.set_max_nreg",
    "tl.tma_store_arrive",
    "tl.tma_store_wait",
    "tl.warpgroup_arrive",
    "tl.warpgroup_commit_batch",
    "tl.warpgroup_fence_operand",
}
# All lanes of a warp wait for these together; then each knows that the others have read the operands.
_MEETINGS = {"tl.wait_wgmma", "tl.warpgroup_wait"}
# Annotations that choose an engine, or state when it is done.
_ENGINE = {"barrier", "disable_tma", "eviction_policy", "leader_scope_threads", "prefer_instruction", "use_tma"}
_REFUSED = {
    "cluster_mask": "a copy to several blocks of a cluster (cluster_mask)",
    "dst_block": "a copy to another block of a cluster (dst_block)",
    "is_gather4": "T.tma_gather4",
    "is_scatter4": "T.tma_scatter4",
}
_REFUSED_CALLS = {
    "tl.mbarrier_expect_tx": "bytes that a barrier waits for (T.mbarrier_expect_tx): T.tma_copy counts its own",
}


def rewrite(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel without such operators. Raises SimulatorUnsupported for operators that it needs."""

    refused: list[str] = []  # TVM, which calls `replace`, would make another error of one that it raises

    def replace(call):
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
        kept = {key: value for key, value in given.items() if key not in _ENGINE}
        return tirx.Call(call.dtype, tvm.ir.Op.get(_AS.get(name, name)), call.args, annotations=kept, span=call.span)

    body = ir_transform(func.body, None, replace, ["tirx.Call"])
    if refused:
        raise SimulatorUnsupported(
            f"kernel {kernel_name(func)}: the simulator cannot run {'; '.join(refused)}. Run this kernel on a GPU, or keep "
            "that part out of it in the simulator"
        )
    return tirx.PrimFunc(func.params, body, func.ret_type, func.buffer_map, func.attrs)


def install() -> None:
    """Let kernels for the simulator have barriers, though the architecture that they are lowered for has none."""
    known = pipeline.have_mbarrier
    pipeline.have_mbarrier = lambda target: gemm.is_plain() or known(target)


with contextlib.suppress(AttributeError):  # another tilelang: kernels with barriers are refused, as they were
    install()
