"""vLLM's groups of tensor parallelism with this package's communicator and its pass over compiled graphs, against plain torch.

A program of tests/clients/test_clients.py, one process per rank; MODULES is the folder of the published modules. The plug-in
names the communicator to vLLM's platform, as in a server; the other modules of vLLM, its NCCL among them, are stand-ins.
"""

import importlib
import os
import re
import sys
import types

os.environ["TSN_VLLM"] = "all_reduce,norm"
sys.modules.setdefault("regex", re)  # which vLLM uses as it uses re
import torch
import torch.distributed as dist

from tests.clients import stand_ins
from tilescale_net import plugins

COMMUNICATORS, PASSES = "vllm.distributed.device_communicators.", "vllm.compilation.passes."
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
    ],
)
module, GPU, SIZE = importlib.import_module, stand_ins.GPU, stand_ins.SIZE


class Platform:
    """What these modules ask of vLLM's platform of CUDA."""

    dispatch_key, device_type = ("CUDA", "cuda") if GPU else ("CPU", "cpu")

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return COMMUNICATORS + "cuda_communicator.CudaCommunicator"

    def __getattr__(self, name: str):
        return lambda *given: GPU if name == "is_cuda_alike" else name == "use_custom_op_collectives"

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

one_node = tp.device_communicator._world is not None
assert type(tp.device_communicator) is type(other.device_communicator) is vllm_communicator.Communicator
assert other.device_communicator._world is None, "only tensor parallelism is taken over"


def values(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + stand_ins.RANK)
    return torch.randn(shape, generator=generator).to(stand_ins.DEVICE, torch.bfloat16)


def summed(x: torch.Tensor) -> torch.Tensor:
    rows = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(rows, x, group=tp.device_group)
    return torch.stack(rows).float().sum(0)


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
    """vLLM's manager of passes for a model of a hidden size, with what the plug-in has added."""
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
        return last, residual, kept  # what is read elsewhere is not replaced

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


with torch.inference_mode():
    stand_ins.run({"all-reduce": all_reduce, "all-reduce with RMSNorm, compiled": norm})
tp.device_communicator.destroy()
