"""Calls of deep_ep by vLLM, SGLang and Megatron-LM, each in subgroups of a larger job, on one node and on two."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import tilescale_net as tsn
import tilescale_net.deep_ep
from tests import ranks
from tests.deep_ep.support import EXPERTS, HIDDEN, Inputs, difference
from tests.kernels.moe import reference
from tests.variants import nightly
from tilescale_net.deep_ep import low_latency

MOST = 12  # tokens of a rank in low-latency calls


def _per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.float().abs().amax(1).clamp(min=1e-4) / 448.0
    return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def _payloads(x: torch.Tensor) -> dict:
    """The same rows in the forms in which frameworks send them."""
    blocks = tuple(t.to(x.device) for t in reference.quantise(x.cpu()))
    tokens, of_tokens = _per_token(x)
    rounded, powers = low_latency.quantise_rounded(x)
    column_major = low_latency.packed(powers).T.contiguous().T
    return {
        "bfloat16": x, "per block": blocks, "per token": (tokens, of_tokens), "of one column": (tokens, of_tokens[:, None]),
        "packed exponents": (rounded, column_major),
    }  # fmt: skip


def _vllm(deep_ep, frameworks, group) -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, 2, EXPERTS)
    # Both modes side by side, each with a buffer of its own, of one group.
    high = deep_ep.Buffer(group=group, num_nvl_bytes=64 << 20, num_rdma_bytes=0, low_latency_mode=False,
                          num_qps_per_rank=1, explicitly_destroy=True)  # fmt: skip
    low = deep_ep.Buffer(group=group, num_nvl_bytes=1 << 20, num_rdma_bytes=hint, low_latency_mode=True,
                         num_qps_per_rank=EXPERTS // 2, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
                         explicitly_destroy=True)  # fmt: skip
    rank = dist.get_rank(group)
    deep_ep.Buffer.set_num_sms(20)
    batches = [Inputs(group, 9 - 9 * rank, 1), Inputs(group, 7, 2)]
    ht = frameworks.VllmHighThroughput(high, rank, 2)
    for form, asynchronous in (("bfloat16", True), ("per block", False), ("per token", False), ("of one column", True)):
        # Two micro-batches of which the second is dispatched before the first is combined.
        payloads = [_payloads(b.random)[form] for b in batches]
        receivers = [
            ht.prepare(i, x, b.topk_idx, b.weights, asynchronous) for i, (x, b) in enumerate(zip(payloads, batches))
        ]
        for which, (receive, x, b) in enumerate(zip(receivers, payloads, batches)):
            rows, ids, weights, counts = receive()
            assert counts == b.counts and int((ids < 0).sum()) == 0
            output = torch.empty_like(b.random)
            ht.finalize(which, output, ht.experts(rows, ids, weights), asynchronous)
            wanted = frameworks.layer(frameworks.plain(x), b.topk_idx, b.weights)
            assert difference(output.float(), wanted) < 1e-4, (form, which)
    for use_fp8 in (True, False):
        ll = frameworks.VllmLowLatency(low, rank, 2, MOST, use_fp8)
        x, b = batches[1].random, batches[1]
        wanted = frameworks.layer(x, b.topk_idx, b.weights)
        for run in (ll.run, ll.run_in_two):
            assert difference(run(x, b.topk_idx, b.weights).float(), wanted) < 2e-3, run
    low.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    low.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
    high.destroy()
    low.destroy()


def _sglang(deep_ep, frameworks, group) -> None:
    config = deep_ep.Buffer.get_dispatch_config(group.size())
    nvl = config.get_nvl_buffer_size_hint(HIDDEN * 2, group.size())
    rdma = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, group.size(), EXPERTS)
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(1024, HIDDEN, group.size(), EXPERTS) > rdma
    assert nvl > 16 << 20
    buffer = deep_ep.Buffer(group, 64 << 20, rdma, low_latency_mode=True, num_qps_per_rank=20, allow_mnnvl=True)
    rank = dist.get_rank(group)
    b = Inputs(group, 8 - rank, 3)
    wanted = frameworks.layer(b.random, b.topk_idx, b.weights)
    for form, asynchronous in (("bfloat16", False), ("per block", True), ("packed exponents", True)):
        normal = frameworks.SglangNormal(buffer, rank, 2, asynchronous)
        rows, ids, weights, counts = normal.dispatch_b(
            *normal.dispatch_a(_payloads(b.random)[form], b.topk_idx, b.weights)
        )
        y = normal.experts(rows, ids, weights, counts)
        assert difference(normal.combine_b(*normal.combine_a(y)).float(), wanted) < 2e-3, form
    buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)  # from prefill to decoding
    eight_bits = dict(use_fp8=True, round_scale=True, use_ue8m0=True)
    for hooks, how in ((False, dict(use_fp8=True)), (True, eight_bits), (True, dict(use_fp8=False))):
        # Two batches whose steps alternate: two dispatches are in flight, then two combines.
        two = [frameworks.SglangLowLatency(buffer, rank, 2, MOST, hooks, how) for _ in range(2)]
        sent = [one.dispatch_a(x, b.topk_idx) for one, x in zip(two, (b.random, b.named))]
        received = [one.dispatch_b(*state) for one, state in zip(two, sent)]
        sent = [one.combine_a(one.experts(rows), b.topk_idx, b.weights) for one, rows in zip(two, received)]
        for one, state, x in reversed([*zip(two, sent, (b.random, b.named))]):
            out = one.combine_b(*state)
            assert difference(out.float(), frameworks.layer(x, b.topk_idx, b.weights)) < 2e-3, (hooks, how)
    buffer.destroy()


def _megatron(frameworks, group) -> None:
    model, rank = frameworks.Megatron(group), dist.get_rank(group)
    model.buffer_for(torch.empty((0, HIDDEN), dtype=torch.bfloat16))
    for step, (asynchronous, recomputed) in enumerate(((False, False), (True, True))):
        b = Inputs(group, 6 + 3 * rank * step, 4 + step)
        x, probs = b.random.clone().requires_grad_(), b.weights.clone().requires_grad_()
        if recomputed:
            out = checkpoint(model.layer, x, b.topk_idx, probs, asynchronous, use_reentrant=False)
        else:
            out = model.layer(x, b.topk_idx, probs, asynchronous)
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(rank)).to(out.device, out.dtype)
        out.backward(gradient)
        known_x, known_probs = b.random.float().requires_grad_(), b.weights.clone().requires_grad_()
        wanted = frameworks.layer(known_x, b.topk_idx, known_probs)
        wanted.backward(gradient.float())
        for found, reference_ in ((out, wanted), (x.grad, known_x.grad), (probs.grad, known_probs.grad)):
            assert difference(found.detach().float(), reference_.detach()) < 1e-4, step


def _program() -> None:
    """A job of four ranks, of which two and two are a group; on two nodes the ranks of a group are on different ones."""
    dist.init_process_group("gloo")
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    tilescale_net.deep_ep.install()
    import deep_ep

    assert importlib.util.find_spec("deep_ep") is not None  # how vLLM checks
    from tests.deep_ep import frameworks

    _vllm(deep_ep, frameworks, group)
    _sglang(deep_ep, frameworks, group)
    _megatron(frameworks, group)
    tsn.finalize(group)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("nodes", [nightly(1), 2])
@pytest.mark.timeout(600)
@pytest.mark.sample(0)
def test_frameworks(nodes):
    env = {"VIRTUAL_NODES": str(nodes), "TSN_HEAP_SIZE": "96M"}
    ranks.run(4, _program, init=False, env=env, timeout=560)
