"""SGLang's groups of tensor parallelism with this package's hooks on them, against plain torch.

A program of tests/clients/test_clients.py, one process per rank; MODULES is the folder of the published modules. The plug-in
registers its hooks and SGLang applies them, as in a server; the other modules of SGLang, its NCCL among them, are stand-ins.
"""

import functools
import importlib
import os
import types

os.environ["TSN_SGLANG"] = "all_reduce,norm"
import torch
import torch.distributed as dist

from tests.clients import stand_ins
from tilescale_net import plugins

SRT = "sglang.srt."
STATE, HOOKS = SRT + "distributed.parallel_state", SRT + "plugins.hook_registry"
stand_ins.install_modules(
    "sglang",
    os.environ["MODULES"],
    [
        *(STATE, HOOKS, SRT + "environ", SRT + "utils.custom_op", SRT + "compilation.compilation_config"),
        *(
            SRT + "layers." + name
            for name in ("layernorm", "flashinfer_comm_fusion", "layer_boundary.residual.add_norm", "moe.utils")
        ),
    ],
)
module, SIZE, DEVICE = importlib.import_module, stand_ins.SIZE, stand_ins.DEVICE
logs = module("sglang.kernels.kernel_api_logging")
logs._KERNEL_API_LOG_LEVEL, logs.debug_torch_op = 0, lambda function, name: function
utils = module(SRT + "utils")
for name in (
    *("is_" + each for each in ("npu", "cpu", "xpu", "musa", "hip", "cuda", "shm_available", "flashinfer_available")),
    *("is_gfx95_supported", "is_gfx1250_supported", "cpu_has_amx_support", "get_bool_env_var", "get_int_env_var"),
):
    setattr(utils, name, lambda *args, **named: False)
utils.is_cuda_alike = lambda: stand_ins.GPU
module(SRT + "platforms").current_platform.is_out_of_tree = lambda: False
context = module(SRT + "runtime_context")
parallel = types.SimpleNamespace(
    attn_tp_size=SIZE, attn_tp_rank=stand_ins.RANK, moe_ep_size=1, moe_tp_size=SIZE, moe_dp_size=1
)
context.get_parallel = lambda: parallel
module(SRT + "distributed.device_communicators.pcie_ipc_ar").eligible_group = lambda **named: False
module(SRT + "distributed.device_communicators.pynccl_allocator").is_symmetric_memory_enabled = lambda: False
dp_attention = module(SRT + "layers.dp_attention")
dp_attention.is_dp_attention_enabled = lambda: False
plugins.sglang()
module(HOOKS).HookRegistry.apply_hooks()
state, layernorm = module(STATE), module(SRT + "layers.layernorm")
if not dist.is_initialized():
    dist.init_process_group("gloo")


def coordinator(name: str):
    off = ("pynccl", "mscclpp", "custom_allreduce", "torch_symm_mem_all_reduce", "hpu_communicator", "xpu_communicator")
    return state.GroupCoordinator(
        [list(range(SIZE))], stand_ins.RANK % 8, "nccl" if stand_ins.GPU else "gloo", group_name=name,
        **{f"use_{each}": False for each in off},
    )  # fmt: skip


tp, other = coordinator("tp"), coordinator("pp")
parallel.tp_group = parallel.attn_tp_group = parallel.moe_tp_group = tp
one_node = getattr(tp, "tilescale_net_group", None) is not None
assert not hasattr(other, "tilescale_net_group"), "only tensor parallelism is taken over"

values, summed = stand_ins.values, functools.partial(stand_ins.summed, group=tp.device_group)


def all_reduce() -> None:
    """As models call it, and through the operator that compiled graphs hold; SGLang may write its argument, this does not."""
    for rows in (1, 5, 300):
        x = values(rows, 512, seed=rows)
        wanted = summed(x)
        if one_node:
            before = x.clone()
            assert stand_ins.difference(state.outplace_all_reduce(x, tp.unique_name, "auto"), wanted) < 1e-2
            assert torch.equal(x, before)
        assert stand_ins.difference(tp.all_reduce(x), wanted) < 1e-2
    counts = torch.full((3,), stand_ins.RANK, dtype=torch.int32, device=DEVICE)
    assert tp.all_reduce(counts.clone()).tolist() == [SIZE * (SIZE - 1) // 2] * 3


def norm() -> None:
    """The call of layers after attention and experts: one kernel; another dtype of the weight takes SGLang's way."""
    own = []
    functional = module(SRT + "distributed")
    functional.attention_tensor_model_parallel_all_reduce = lambda x: own.append(True) or tp.all_reduce(x)
    module(SRT + "layers.moe.utils").deferred_post_experts_all_reduce = lambda x: own.append(True) or tp.all_reduce(x)

    def plain(x, residual, post):
        total = (x.float() + residual.float()).bfloat16()
        scale = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + 1e-5)
        return (total.float() * scale * weights[0].float()).bfloat16(), total

    weight, residual = values(512, seed=1), values(7, 512, seed=2)
    for each in (weight, residual):
        dist.broadcast(each, 0, group=tp.device_group)
    weights = [weight]
    layer = types.SimpleNamespace(variance_epsilon=1e-5, weight=weight, forward=plain)
    applies = module(SRT + "layers.layer_boundary.residual.add_norm").flashinfer_ar_fusion_applies
    assert (applies(7), applies(0)) == (one_node, False)
    parallel.moe_tp_group = other  # which is not this package's
    assert not applies(7)
    parallel.moe_tp_group = tp
    fused = layernorm.RMSNorm.forward_with_allreduce_fusion
    for attention in (True, False):
        x = values(7, 512, seed=3 + attention)
        before = residual.clone()
        wanted = plain(summed(x).bfloat16(), residual, None)
        found = fused(layer, x.clone(), residual, use_attn_tp_group=attention)  # SGLang may write its argument
        assert torch.equal(residual, before) and bool(own) != one_node
        for ours, theirs in zip(found, wanted):
            assert stand_ins.difference(ours, theirs) < 2e-2
    layer.weight = weight.float()
    found = fused(layer, x.clone(), residual)
    assert own, "a weight in float32 is for SGLang's own way"
    assert stand_ins.difference(found[0], wanted[0]) < 2e-2


def ends() -> None:
    """A group that ends gives its memory back, and leaves the other alone."""
    second, x = coordinator("tp"), values(5, 512, seed=9)
    assert (getattr(second, "tilescale_net_group", None) is not None) == one_node
    assert stand_ins.difference(second.all_reduce(x.clone()), summed(x)) < 1e-2
    second.destroy()
    assert getattr(second, "tilescale_net_group", None) is None
    assert stand_ins.difference(tp.all_reduce(x.clone()), summed(x)) < 1e-2


with torch.inference_mode():
    stand_ins.run({"all-reduce": all_reduce, "all-reduce with RMSNorm": norm, "groups that end": ends})
dist.barrier()
tp.destroy()
