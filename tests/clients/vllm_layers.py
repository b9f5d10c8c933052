"""vLLM's prepare and finalize modules and its managers of all-to-all over tilescale_net.deep_ep, against plain torch.

A program of tests/clients/test_clients.py, one process per rank; MODULES is the folder of the published modules. The
plug-in takes DeepEP's place, as in a server; the other modules of vLLM are stand-ins.
"""

import importlib
import os
import types

from tests.clients import stand_ins

stand_ins.torch_cuda()
import torch
import torch.distributed as dist

import tilescale_net.deep_ep
from tilescale_net import plugins

os.environ["TSN_VLLM"] = "deep_ep"
plugins.vllm()
MOE, COMMUNICATORS = "vllm.model_executor.layers.fused_moe.", "vllm.distributed.device_communicators."
stand_ins.install_modules(
    "vllm",
    os.environ["MODULES"],
    [
        *(MOE + name for name in ("modular_kernel", "topk_weight_and_reduce")),
        *(MOE + "prepare_finalize.deepep_" + name for name in ("ht", "ll", "v2")),
        *(COMMUNICATORS + name for name in ("all2all", "base_device_communicator")),
        "vllm.v1.worker.ubatching",
        "vllm.utils.math_utils",
    ],
)


def module(name: str):
    return importlib.import_module(name)


def quantised(x, scale, quant_dtype, per_act_token_quant, block_shape=None, **named):
    return (x, scale) if quant_dtype is None else stand_ins.quantised(x)


experts = stand_ins.Experts(hidden=2048)
LOCAL, FIRST, DEVICE = experts.of_rank, experts.first, stand_ins.DEVICE
module(MOE + "utils").moe_kernel_quantize_input = quantised
module(MOE + "utils").normalize_batched_scales_shape = lambda scales, number: scales
module("vllm._custom_ops").moe_sum = lambda x, out: out.copy_(x.float().sum(1))
module("vllm.platforms").current_platform.is_rocm = lambda: False
envs = module("vllm").envs = module("vllm.envs")
envs.VLLM_DEEPEPLL_NVFP4_DISPATCH = envs.VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE = False
envs.VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL = envs.VLLM_DEEPEP_V2_PREFER_OVERLAP = False
envs.VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE, envs.VLLM_DEEPEP_BUFFER_SIZE_MB = True, 64
module("vllm.utils.torch_utils").current_stream = torch.cuda.current_stream
module("vllm.utils.torch_utils").PIN_MEMORY = False
reduce = module(MOE + "topk_weight_and_reduce")
if not dist.is_initialized():
    dist.init_process_group("gloo")
group = dist.new_group(list(range(stand_ins.SIZE)))


def manager(name: str):
    """One of vLLM's managers, without the parts that need a server."""
    kind = getattr(module(COMMUNICATORS + "all2all"), name)
    made = kind.__new__(kind)
    made.cpu_group, made.world_size, made.num_sms, made._num_sms = group, stand_ins.SIZE, 20, None
    made.internode, made.support_fault_tolerance, made._device_group, made._gin_checked = False, False, None, True
    made.handle_cache = module(COMMUNICATORS + "all2all").Cache()
    return made


def config(blocks: bool):
    """A configuration of quantisation: blocks of 128 in FP8, or none."""
    return types.SimpleNamespace(
        quant_dtype=torch.float8_e4m3fn if blocks else None, block_shape=[128, 128] if blocks else None,
        is_block_quantized=blocks, per_act_token_quant=False, is_scale_swizzled=False, a1_scale=None, a1_gscale=None,
        a2_scale=None, mx_alignment=0,
    )  # fmt: skip


def high_throughput(blocks: bool, asynchronous: bool) -> None:
    made = manager("DeepEPHTAll2AllManager")
    kind = module(MOE + "prepare_finalize.deepep_ht").DeepEPHTPrepareAndFinalize
    steps = kind(made.get_handle({}), num_dispatchers=stand_ins.SIZE, dp_size=stand_ins.SIZE, rank_expert_offset=FIRST)
    made.set_num_sms(20)
    for step, count in enumerate([9, 40, 0 if stand_ins.RANK else 4]):
        x, weights, choices = experts.tokens(count, step)
        arguments = (x, weights, choices, experts.number, None, False, config(blocks))
        rows, scales, counts, ids, row_weights = (
            steps.prepare_async(*arguments)() if asynchronous else steps.prepare(*arguments)
        )
        here = (ids >= FIRST) & (ids < FIRST + LOCAL)
        expected = [int(((ids == FIRST + e) & (row_weights != 0)).sum()) for e in range(LOCAL)]
        assert counts.expert_num_tokens_cpu.tolist() == expected
        factors = torch.where(here, row_weights * experts.factor[ids], 0.0).sum(1, keepdim=True)
        y, out = (stand_ins.plain(rows, scales) * factors).to(torch.bfloat16), torch.empty_like(x)
        arguments = (out, y, row_weights, ids, False, reduce.TopKWeightAndReduceNoOP())
        if asynchronous:
            steps.finalize_async(*arguments)()
        else:
            steps.finalize(*arguments)
        experts.check(out, x, weights, choices, 8e-2 if blocks else 2e-2)


def low_latency(blocks: bool, packed: bool = False, most: int = 8) -> None:
    sizes = dict(max_num_tokens_per_dp_rank=most, token_hidden_size=experts.hidden, num_ep_ranks=stand_ins.SIZE)
    buffer = manager("DeepEPLLAll2AllManager").get_handle(
        sizes | dict(num_global_experts=experts.number, num_local_experts=LOCAL)
    )
    kind = module(MOE + "prepare_finalize.deepep_ll").DeepEPLLPrepareAndFinalize
    steps = kind(buffer, max_tokens_per_rank=most, num_dispatchers=stand_ins.SIZE, use_fp8_dispatch=blocks)
    steps.post_init_setup(types.SimpleNamespace(supports_packed_ue8m0_act_scales=lambda: packed))
    for step, count in enumerate([most, 1, 0 if stand_ins.RANK else 5]):
        x, weights, choices = experts.tokens(count, 10 + step)
        rows, scales, counts, _, _ = steps.prepare(x, weights, choices, experts.number, None, False, config(blocks))
        assert (scales is not None and scales.dtype == torch.int32) == packed
        rows = stand_ins.plain(rows, scales)
        y, out = torch.full(rows.shape, float("nan"), device=DEVICE), torch.empty_like(x)
        for e, here in enumerate(counts.expert_num_tokens.tolist()):
            y[e, :here] = rows[e, :here] * experts.factor[FIRST + e]
        arguments = (out, y.to(torch.bfloat16), weights, choices, False, reduce.TopKWeightAndReduceDelegate())
        if step == 1:
            for phase in steps.finalize_async(*arguments):
                phase()
        else:
            steps.finalize(*arguments)
        experts.check(out, x, weights, choices, 8e-2)


def second_version(decodes: bool, several_reductions: bool, blocks: bool = False, most: int = 16) -> None:
    envs.VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION = several_reductions
    v2 = module(MOE + "prepare_finalize.deepep_v2")
    sizes = dict(num_max_tokens_per_rank=most, hidden=experts.hidden, num_topk=experts.top_k, use_fp8_dispatch=blocks)
    buffer = manager("DeepEPV2All2AllManager").get_handle(sizes | dict(num_experts=experts.number))
    n = stand_ins.SIZE
    steps = v2.DeepEPV2PrepareAndFinalize(
        buffer, n, n, FIRST, experts.number, experts.top_k, use_fp8_dispatch=blocks, use_cudagraph=decodes
    )

    def globalize(ids, psum, first, number):  # what vLLM's Triton kernel says it does
        rows = torch.arange(len(ids), device=ids.device)[:, None] < psum[-1]
        return torch.where((ids >= 0) & (ids + first < number) & rows, ids + first, -1)

    v2._globalize_recv_topk_idx = globalize
    for step, count in enumerate([5, most, most, 3]):
        x, weights, choices = experts.tokens(count, 20 + step)
        across = types.SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([count] * n))
        v2.get_forward_context = lambda across=across: types.SimpleNamespace(dp_metadata=across)
        arguments = (x, weights, choices, experts.number, None, False, config(blocks))
        rows, scales, _, ids, row_weights = steps.prepare(*arguments)
        y = torch.nan_to_num(stand_ins.plain(rows, scales))
        if decodes:
            factors = torch.where(ids >= 0, row_weights * experts.factor[ids.clamp(min=0)], 0.0).sum(1, keepdim=True)
        else:
            assert ids.shape == (len(rows), 1)
            factors = experts.factor[ids] * row_weights.view(-1, 1)
        out = torch.empty_like(x)
        y = (y * factors).to(torch.bfloat16)
        steps.finalize_async(out, y, row_weights, ids, False, reduce.TopKWeightAndReduceNoOP())()
        experts.check(out, x, weights, choices, 8e-2 if blocks else 2e-2)


import deep_ep

assert deep_ep is tilescale_net.deep_ep
stand_ins.run(
    {
        "ht BF16": lambda: high_throughput(False, False),
        "ht BF16, asynchronous": lambda: high_throughput(False, True),
        "ht FP8 per block": lambda: high_throughput(True, False),
        "ht FP8 per block, asynchronous": lambda: high_throughput(True, True),
        "ll BF16": lambda: low_latency(False),
        "ll FP8": lambda: low_latency(True),
        "ll FP8, packed scales": lambda: low_latency(True, True),
        "v2 prefill": lambda: second_version(False, False),  # vLLM's defaults
        "v2 decode": lambda: second_version(True, False),
        "v2 prefill, FP8 per block": lambda: second_version(False, False, True),
        "v2 decode, FP8 per block": lambda: second_version(True, False, True),
        "v2 prefill, several reductions": lambda: second_version(False, True),
    }
)
