"""Megatron-core's MoELayer with the flex dispatcher over tilescale_net.deep_ep against its all-gather dispatcher.

A program of tests/clients/test_clients.py, one process per rank; MODULES is the folder of the published modules.
"""

import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"
sys.path.insert(0, os.environ["MODULES"])

from tests.clients import stand_ins

stand_ins.torch_cuda()
import tilescale_net.deep_ep

tilescale_net.deep_ep.install()
import megatron.core.utils
import torch
import torch.distributed as dist
from packaging.version import Version

if megatron.core.utils.get_te_version() is None:  # as 0.16.1 reads it without a check
    megatron.core.utils.get_te_version = lambda: Version("0.0.0")
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import fused_a2a, moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # missing without Transformer Engine
HIDDEN, EXPERTS = 128, 8
assert fused_a2a.HAVE_DEEP_EP and fused_a2a.Buffer is tilescale_net.deep_ep.Buffer


def layer(tp: int, ep: int, top_k: int, hidden: int = HIDDEN, **dispatcher) -> MoELayer:
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, ffn_hidden_size=2 * HIDDEN, num_attention_heads=8, num_moe_experts=EXPERTS,
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp,
        sequence_parallel=tp > 1, moe_router_topk=top_k, moe_router_load_balancing_type="none", moe_router_dtype="fp32",
        add_bias_linear=False, use_cpu_initialization=True, bf16=True, params_dtype=torch.bfloat16, **dispatcher,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    made = MoELayer(config, spec.submodules.mlp.submodules).cuda().to(torch.bfloat16)
    made.set_layer_number(0)
    return made


def another_buffer(ep: int) -> None:
    """A forward pass of a wider layer, for which Megatron replaces its Buffer by a larger one; the old one's handles stay valid."""
    before = fused_a2a._buffer
    flex = dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    layer(1, ep, 2, 2 * HIDDEN, **flex)(torch.randn((8, 2, 2 * HIDDEN), dtype=torch.bfloat16, device=stand_ins.DEVICE))
    assert fused_a2a._buffer is not before, "Megatron went on with the Buffer of the narrower layer"


def same_as_all_gather(tp: int, ep: int, top_k: int = 2, replaces: bool = False) -> None:
    """Output, gradients of the input and of every weight, in three steps with other numbers of tokens.

    `replaces`: between the first forward and backward Megatron replaces its Buffer.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    flex = layer(tp, ep, top_k, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    gathering = layer(tp, ep, top_k, moe_token_dispatcher_type="allgather")
    gathering.load_state_dict(flex.state_dict())
    for step in range(3):
        torch.manual_seed(1000 * step + stand_ins.RANK)
        shape = (16 + 8 * (step % 2), 2, HIDDEN)
        x, gradient = (torch.randn(shape, dtype=torch.bfloat16, device=stand_ins.DEVICE) for _ in range(2))
        found = []
        for each in (flex, gathering):
            each.zero_grad()
            copy = x.clone().requires_grad_()
            out, _ = each(copy)
            if replaces and step == 0 and each is flex:
                another_buffer(ep)
            out.backward(gradient)
            found.append([out, copy.grad, *(p.grad for p in each.parameters())])
        for ours, theirs in zip(*found):
            if ours is not None or theirs is not None:
                assert stand_ins.difference(ours, theirs) < 3e-2, stand_ins.difference(ours, theirs)
    parallel_state.destroy_model_parallel()


if not dist.is_initialized():
    dist.init_process_group("nccl" if stand_ins.GPU else "gloo")
n = stand_ins.SIZE
stand_ins.run(
    {
        "expert parallel": lambda: same_as_all_gather(1, n),
        "tensor parallel": lambda: same_as_all_gather(n, 1),
        "top 4": lambda: same_as_all_gather(1, n, 4),
        "a Buffer that is replaced": lambda: same_as_all_gather(1, n, replaces=True),
    }
)
