"""vLLM's groups of tensor parallelism with this package's communicator and its pass over compiled graphs, against plain torch.

A program of tests/clients/test_clients.py, one process per rank; MODULES is the folder of the published modules. The plug-in
names the communicator to vLLM's platform, as in a server; the other modules of vLLM, its NCCL among them, are stand-ins.
"""

import functools
import importlib
import os
import re
import sys
import types

os.environ["TSN_VLLM"] = "all_reduce,norm"
sys.modules.setdefault("regex", re)  # which vLLM uses as it uses re
import torch
import torch.distributed as dist

import tilescale_net.errors
from tests.clients import stand_ins
from tilescale_net import plugins

COMMUNICATORS, PASSES = "vllm.distributed.device_communicators.", "vllm.compilation.passes."
QUANTIZATION = "vllm.model_executor.layers.quantization."
stand_ins.install_modules(
    "vllm",
    os.environ["MODULES"],
    [
        *(
            "vllm.ir" + name
            for name in ("", ".op", ".ops", ".ops.activation", ".ops.layernorm", ".tolerances", ".util")
        ),
        *("vllm.utils." + name for name in ("torch_utils", "import_utils")),
        *(COMMUNICATORS + name for name in ("all_reduce_utils", "base_device_communicator", "cuda_communicator")),
        *(PASSES + name for name in ("inductor_pass", "vllm_inductor_pass", "pass_manager", "fx_utils")),
        "vllm.distributed.parallel_state",
        *(QUANTIZATION + name for name in ("utils.fp8_utils", "utils.quant_utils", "input_quant_fp8")),
        *("vllm." + name for name in ("_custom_ops", "scalar_type", "utils.math_utils", "model_executor.custom_op")),
    ],
)
module, GPU, SIZE = importlib.import_module, stand_ins.GPU, stand_ins.SIZE


class Platform:
    """vLLM's CUDA platform, as far as these modules use it."""

    dispatch_key, device_type = ("CUDA", "cuda") if GPU else ("CPU", "cpu")

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return COMMUNICATORS + "cuda_communicator.CudaCommunicator"

    def __getattr__(self, name: str):
        return lambda *args: GPU if name == "is_cuda_alike" else name == "use_custom_op_collectives"

    def is_fp8_fnuz(self) -> bool:
        return False

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def logical_device_id_to_visible_device_id(self, number: int) -> int:
        return number


module("vllm.platforms").current_platform = Platform()
module("vllm.utils.platform_utils").is_pin_memory_available = lambda: False
envs = module("vllm").envs = module("vllm.envs")
for name in (
    "ALLREDUCE_USE_SYMM_MEM",
    "ALLREDUCE_USE_FLASHINFER",
    "ALLREDUCE_USE_FLASHINFER_PCIE_IPC",
    "BATCH_INVARIANT",
):
    setattr(envs, "VLLM_" + name, False)
envs.VLLM_DISTRIBUTED_USE_SPLIT_GROUP = False
module("vllm.config").get_current_vllm_config_or_none = lambda: None
module("vllm._aiter_ops").rocm_aiter_ops = Platform()
module(COMMUNICATORS + "pynccl_allocator").is_symmetric_memory_enabled = lambda: False
# As on a machine where vLLM finds no NCCL: torch.distributed sums what this package does not.
module(COMMUNICATORS + "pynccl").PyNcclCommunicator = lambda **named: types.SimpleNamespace(
    disabled=True, world_size=SIZE, destroy=lambda: None
)
times = module("vllm.distributed.utils")
times.get_cpu_distributed_timeout_or_none = times.get_distributed_timeout_or_none = lambda: None
parallel, manager = module("vllm.distributed.parallel_state"), module(PASSES + "pass_manager")
parallel._ENABLE_CUSTOM_ALL_REDUCE = False
plugins.vllm()
plugins.vllm()
if not dist.is_initialized():
    dist.init_process_group("gloo")
backend = "nccl" if GPU else "gloo"


def coordinator(name: str):
    return parallel.GroupCoordinator([list(range(SIZE))], stand_ins.RANK % 8, backend, True, group_name=name)


tp, other = coordinator("tp"), coordinator("dp")
from tilescale_net import vllm_communicator

one_node = tp.device_communicator._ours is not None
assert type(tp.device_communicator) is type(other.device_communicator) is vllm_communicator.Communicator
assert other.device_communicator._ours is None, "only tensor parallelism is taken over"

values, summed = stand_ins.values, functools.partial(stand_ins.summed, group=tp.device_group)


def all_reduce() -> None:
    """Through vLLM's operator, in several sizes; and in a group that vLLM's own way sums."""
    for rows in (1, 5, 300):
        x = values(rows, 512, seed=rows)
        before = x.clone()
        assert stand_ins.difference(tp.all_reduce(x), summed(x)) < 1e-2
        assert torch.equal(x, before), "vLLM's all-reduce leaves its argument as it is"
    counts = torch.full((3,), stand_ins.RANK, dtype=torch.int32, device=stand_ins.DEVICE)
    assert other.all_reduce(counts).tolist() == [SIZE * (SIZE - 1) // 2] * 3


def passes() -> object:
    """vLLM's manager of passes for a model of a hidden size, with the plug-in's passes."""
    config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(
            splitting_ops=None,
            use_inductor_graph_partition=False,
            pass_config=types.SimpleNamespace(**dict.fromkeys(FLAGS, False)),
        ),
        model_config=None,
        device_config=None,
    )
    made = manager.PostGradPassManager()
    made.configure(config)
    return made


FLAGS = (
    "eliminate_noops", "fuse_act_padding", "fuse_allreduce_rms", "fuse_norm_quant", "fuse_act_quant", "enable_qk_norm_rope_fusion",
    "fuse_qk_norm_rope_kvcache", "fuse_mla_dual_rms_norm", "fuse_rope_kvcache", "fuse_rope_kvcache_cat_mla", "fuse_attn_quant",
)  # fmt: skip


def norm() -> None:
    """A block as vLLM's layers write it, compiled: norms behind all-reduces are one operator, others stay."""
    ops = module("vllm.ir").ops
    added = [each for each in passes().passes if type(each) is vllm_communicator.FuseNorm] if one_node else []
    assert len(added) == one_node

    def block(x, y, weight, scale):
        first = tp.all_reduce(x)
        normed = ops.rms_norm(first, weight, 1e-5)
        total = tp.all_reduce(normed + y)
        out, residual = ops.fused_add_rms_norm(total, first, scale, 1e-6)
        kept = tp.all_reduce(out)
        last, residual = ops.fused_add_rms_norm(kept, residual, weight, 1e-6)
        return last, residual, kept  # values read elsewhere are not replaced

    x, y, (weight, scale) = values(7, 512, seed=1), values(7, 512, seed=2), values(2, 512, seed=3).unbind()
    for each in (weight, scale):
        dist.broadcast(each, 0, group=tp.device_group)
    with torch._inductor.config.patch(
        post_grad_custom_post_pass=added[0] if added else None, force_disable_caches=True
    ):
        found = torch.compile(block, fullgraph=True, dynamic=False)(x, y, weight.clone(), scale.clone())
    assert not added or added[0].replaced == 2

    def plain(total, weight, eps):
        return (
            total.float() * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + eps) * weight.float()
        ).bfloat16()

    first = summed(x).bfloat16()
    total = (summed(plain(first, weight, 1e-5) + y).bfloat16().float() + first.float()).bfloat16()
    kept = summed(plain(total, scale, 1e-6)).bfloat16()
    residual = (kept.float() + total.float()).bfloat16()
    for ours, wanted in zip(found, (plain(residual, weight, 1e-6), residual, kept)):
        assert stand_ins.difference(ours, wanted) < 2e-2


# -- vLLM's operators of its compiled part, by their published schemas --------------------------------------------------

_c = torch.library.Library("_C", "FRAGMENT")
_c.define("static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None) -> ()")
_c.define("dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()")
_c.define(
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, float fp8_min, "
    "float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()"
)
calls = []  # of these operators: those that are fused are not called


def static_scaled_fp8_quant(result, input, scale, group_shape=None):
    calls.append("tensor")
    result.copy_((input.float() / scale).clamp(-448, 448).to(result.dtype))


def dynamic_per_token_scaled_fp8_quant(result, input, scale, scale_ub):
    calls.append("token")
    scale.copy_(input.float().abs().amax(-1, keepdim=True) / 448)
    result.copy_((input.float() / scale).to(result.dtype))


def per_token_group_fp8_quant(input, output_q, output_s, group_size, *args):
    calls.append("block")
    blocks = input.float().unflatten(-1, (-1, group_size))
    output_s.copy_(blocks.abs().amax(-1) / 448)
    output_q.copy_((blocks / output_s.unsqueeze(-1)).flatten(-2).to(output_q.dtype))


for each in (static_scaled_fp8_quant, dynamic_per_token_scaled_fp8_quant, per_token_group_fp8_quant):
    _c.impl(each.__name__, each, "CUDA" if GPU else "CPU")
    torch.library.register_fake(f"_C::{each.__name__}", lambda *rest: None)


def quantised() -> None:
    """Norms with vLLM's quantisations behind them, Gemma's norms too: one operator each, where nothing hinders it."""
    ops, custom = module("vllm.ir").ops, module("vllm._custom_ops")
    utilities = module(QUANTIZATION + "utils.fp8_utils")
    utilities.current_platform = types.SimpleNamespace(
        is_cuda_alike=lambda: True, fp8_dtype=lambda: torch.float8_e4m3fn
    )
    utilities.get_tma_aligned_size = lambda rows, itemsize: -(-rows * itemsize // 16) * 16 // itemsize  # DeepGEMM's
    group_quant = utilities.per_token_group_quant_fp8

    def block(x, y, weight, gemma, scale):
        first = tp.all_reduce(x)
        normed = ops.rms_norm(first, gemma.float() + 1.0, 1e-6)  # also read elsewhere
        by_tensor, _ = custom.scaled_fp8_quant(normed, scale)
        total = tp.all_reduce(y + normed)
        normed, residual = ops.fused_add_rms_norm(total, first, weight, 1e-6)
        by_token = custom.scaled_fp8_quant(normed, use_per_token_if_dynamic=True)
        total = tp.all_reduce(residual + x)
        normed, residual = ops.fused_add_rms_norm(total, residual, gemma.float() + 1.0, 1e-6)
        by_block = [group_quant(normed, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=False)]
        total = tp.all_reduce(residual)
        normed, residual = ops.fused_add_rms_norm(total, residual, weight, 1e-6)
        by_block += [group_quant(normed, 128, use_ue8m0=False)]
        total = tp.all_reduce(y)
        normed, residual = ops.fused_add_rms_norm(total, residual, weight, 1e-6)
        by_block += [group_quant(normed, 128, column_major_scales=True, use_ue8m0=False)]
        total = tp.all_reduce(x)
        normed, residual = ops.fused_add_rms_norm(total, residual, weight, 1e-6)
        rounded = group_quant(normed, 128, use_ue8m0=True)  # scales that the kernel does not make
        return by_tensor, *by_token, *[t for pair in by_block for t in pair], *rounded, residual

    x, y, (weight, gemma) = values(7, 512, seed=5), values(7, 512, seed=6), values(2, 512, seed=7).unbind()
    for each in (weight, gemma):
        dist.broadcast(each, 0, group=tp.device_group)
    scale = torch.full((1,), 0.02, device=stand_ins.DEVICE)
    inputs = x, y, weight.clone(), gemma.clone(), scale
    added = [each for each in passes().passes if type(each) is vllm_communicator.FuseNorm] if one_node else []
    wanted = block(*inputs)
    calls.clear()
    settings = dict(force_disable_caches=True, enable_auto_functionalized_v2=False)  # the second as vLLM sets it
    with torch._inductor.config.patch(post_grad_custom_post_pass=added[0] if added else None, **settings):
        found = torch.compile(block, fullgraph=True, dynamic=False)(*inputs)
    if added:
        assert (added[0].replaced, added[0].quantized, calls) == (6, 5, ["block"])
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.stride() == theirs.stride(), i
        assert stand_ins.difference(ours, theirs) < 8e-2, i  # a step of FP8 at its largest numbers is 7e-2


# -- groups that come and go ------------------------------------------------------------------------------------------


def several_engines() -> None:
    """Each of a process's engines has a group; norms are fused in each, and the end of one leaves the other alone."""
    second = coordinator("tp")
    names = {group.unique_name for group in (tp, second)}
    fused = lambda: {each.named for each in passes().passes if type(each) is vllm_communicator.FuseNorm}  # noqa: E731
    assert len(names) == 2 and fused() == (names if one_node else set())
    x = values(5, 512, seed=9)
    for group in (tp, second):
        assert stand_ins.difference(group.all_reduce(x), summed(x)) < 1e-2
    second.device_communicator.destroy()
    assert fused() == ({tp.unique_name} if one_node else set())
    assert stand_ins.difference(tp.all_reduce(x), summed(x)) < 1e-2


def no_peer_access() -> None:
    """One rank cannot map another's memory: all keep vLLM's way. What is wrong otherwise is an error on all."""
    if not one_node:
        return
    memory = type(tp.device_communicator._ours.world.memory)
    tp.device_communicator.destroy()  # groups of the same ranks share a world
    whole, last = memory.map_peer, SIZE - 1
    errors = tilescale_net.errors

    def fails(kind):
        def map_peer(self, *args):
            if dist.get_rank() == last:
                raise kind("as a test wants it")
            return whole(self, *args)

        memory.map_peer = map_peer

    try:
        fails(errors.PeerUnreachable)
        alone = coordinator("tp")
        assert alone.device_communicator._ours is None
        x = values(5, 512, seed=10)
        assert stand_ins.difference(alone.all_reduce(x), summed(x)) < 1e-2
        fails(errors.HeapError)
        try:
            coordinator("tp")
        except errors.TileScaleError as err:
            assert "as a test wants it" in str(err), err
        else:
            raise AssertionError("a world that could not be made went unnoticed")
    finally:
        memory.map_peer = whole


with torch.inference_mode():
    stand_ins.run(
        {
            "all-reduce": all_reduce,
            "all-reduce with RMSNorm, compiled": norm,
            "with quantisation and Gemma's norm": quantised,
            "several engines": several_engines,
            "no peer access": no_peer_access,
        }
    )
if tp.device_communicator._ours is not None:
    tp.device_communicator.destroy()
