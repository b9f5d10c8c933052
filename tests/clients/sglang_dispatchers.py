"""SGLang's token dispatchers over tilescale_net.deep_ep, against plain torch.

A program of tests/clients/test_clients.py, one process per rank; MODULES is the folder of the published modules. The
plug-in takes DeepEP's place, as in a server; the other modules of SGLang are stand-ins.
"""

import importlib
import os
import types

for name in ("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"):
    os.environ[name] = "16"
from tests.clients import stand_ins

stand_ins.torch_cuda()
import torch
import torch.distributed as dist

import tilescale_net.deep_ep
from tilescale_net import plugins

LAYERS = "sglang.srt.layers."
DISPATCHERS = LAYERS + "moe.token_dispatcher."
stand_ins.install_modules(
    "sglang",
    os.environ["MODULES"],
    [*(DISPATCHERS + name for name in ("deepep", "deepep_v2", "base")), LAYERS + "moe.utils", "sglang.srt.environ"],
)
module = importlib.import_module
experts = stand_ins.Experts(hidden=512)
FIRST = experts.first
extends = [True]  # whether the batch is of prefill
general = module("sglang.srt.utils")
for name in ("is_npu", "is_hip", "is_blackwell", "is_flashinfer_available", "is_cuda", "get_bool_env_var"):
    setattr(general, name, lambda *args: False)
general.get_cuda_version = lambda: (13, 0)
context, resources = module("sglang.srt.runtime_context"), types.SimpleNamespace(buffers={})
context.get_resources, context.get_server_args = lambda: resources, lambda: None
parallel = types.SimpleNamespace(attn_dp_size=2, attn_cp_size=1, tp_size=1, tp_group=None)
context.get_parallel = lambda: parallel
options = types.SimpleNamespace(deepep_v2_mode="direct", deepep_dispatcher_output_dtype="auto", deepep_config="")
context.get_exec = lambda: types.SimpleNamespace(moe=options)
module(LAYERS + "dp_attention").get_is_extend_in_batch = lambda: extends[0]
gemm = module(LAYERS[:-1]).deep_gemm_wrapper = module(LAYERS + "deep_gemm_wrapper")
gemm.ENABLE_JIT_DEEPGEMM, gemm.DEEPGEMM_SCALE_UE8M0, gemm.DEEPGEMM_BLACKWELL = True, False, False
module("sglang.kernels.ops.quantization.fp8_kernel").sglang_per_token_group_quant_fp8 = stand_ins.quantised
moe = module(LAYERS + "moe.utils")
moe.get_deepep_config, moe.is_tbo_enabled = lambda: "", lambda: True
deepep, v2 = module(DISPATCHERS + "deepep"), module(DISPATCHERS + "deepep_v2")
# As in a server: its plug-ins are loaded when these modules have been imported already.
os.environ["TSN_SGLANG"] = "deep_ep"
plugins.sglang()
assert deepep.use_deepep and deepep.Buffer is tilescale_net.deep_ep.Buffer
assert v2.use_deepep_v2 and v2.ElasticBuffer is tilescale_net.deep_ep.ElasticBuffer
if not dist.is_initialized():
    dist.init_process_group("gloo")
sizes = dict(
    group=dist.new_group(list(range(stand_ins.SIZE))), router_topk=experts.top_k, num_experts=experts.number,
    num_local_experts=experts.of_rank, hidden_size=experts.hidden, params_dtype=torch.bfloat16,
)  # fmt: skip


def tokens(count: int, seed: int):
    x, weights, choices = experts.tokens(count, seed)
    return x, types.SimpleNamespace(topk_weights=weights, topk_ids=choices)


def weighted(rows: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows multiplied by what this rank's experts among their choices make of them."""
    known = (choices + FIRST).clamp(min=0, max=experts.number - 1)
    return rows * torch.where(choices >= 0, weights * experts.factor[known], 0.0).sum(1, keepdim=True)


def first_version(dtype, asynchronous: bool) -> None:
    """Normal and low-latency batches by turns, on one Buffer."""
    moe.get_deepep_output_dtype = deepep.get_deepep_output_dtype = lambda self: dtype
    mode = dict(deepep_mode=deepep.DeepEPMode.AUTO, async_finish=asynchronous, return_recv_hook=asynchronous)
    dispatcher = deepep.DeepEPDispatcher(**sizes, **mode)
    for step, count in enumerate([12, 8, 0 if stand_ins.RANK else 30, 1]):
        extends[0] = step % 2 == 0
        x, topk = tokens(count, step)
        got = dispatcher.dispatch(x, topk)
        rows = stand_ins.plain(got.hidden_states, got.hidden_states_scale)
        if extends[0]:
            assert all(rows_of % 128 == 0 for rows_of in got.num_recv_tokens_per_expert)
            y, kind = weighted(rows, got.topk_ids, got.topk_weights), deepep.DeepEPNormalCombineInput
        else:
            y, kind = torch.full(rows.shape, float("nan"), device=rows.device), deepep.DeepEPLLCombineInput
            for e, here in enumerate(got.masked_m.tolist()):
                y[e, :here] = rows[e, :here] * experts.factor[FIRST + e]
        out = dispatcher.combine(kind(y.to(torch.bfloat16), got.topk_ids, got.topk_weights))
        experts.check(out, x, topk.topk_weights, topk.topk_ids, 8e-2)


def second_version(blocks: bool, decodes: bool, expands: bool | None) -> None:
    v2.envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.set(expands)
    v2.get_deepep_v2_fp8_scale_format = lambda: moe.DeepEPv2Fp8ScaleFormat(False, False)
    dispatcher = v2.DeepEPv2Dispatcher(**sizes, use_fp8_dispatch=blocks)
    dispatcher.prebuild()
    extends[0] = not decodes
    for step, count in enumerate([12, 1, 0 if stand_ins.RANK else 16]):
        x, topk = tokens(count, 40 + step)
        got = dispatcher.dispatch(x, topk)
        rows = torch.nan_to_num(stand_ins.plain(got.hidden_states, got.hidden_states_scale))
        if got.is_expanded:
            y, start = torch.zeros_like(rows), 0
            for e, end in enumerate(got.psum_num_recv_tokens_per_expert.tolist()):
                y[start:end] = rows[start:end] * experts.factor[FIRST + e] * got.topk_weights[start:end, None]
                start = -(-end // 128) * 128
        else:
            y = weighted(rows, got.topk_ids, got.topk_weights)
        out = dispatcher.combine(v2.DeepEPv2CombineInput(y.to(torch.bfloat16), None))
        experts.check(out, x, topk.topk_weights, topk.topk_ids, 8e-2)


stand_ins.run(
    {
        "deepep auto, BF16": lambda: first_version(moe.DispatcherOutputDtype.BF16, False),
        "deepep auto, FP8 with hooks": lambda: first_version(moe.DispatcherOutputDtype.FP8, True),
        "deepep_v2 prefill, BF16": lambda: second_version(False, False, False),
        "deepep_v2 prefill, FP8": lambda: second_version(True, False, False),
        "deepep_v2 prefill, FP8 expanded": lambda: second_version(True, False, True),
        "deepep_v2 decode, BF16": lambda: second_version(False, True, None),
        "deepep_v2 decode, FP8": lambda: second_version(True, True, None),
    }
)
