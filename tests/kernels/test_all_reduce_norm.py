"""All-reduce with bias, residual and RMSNorm against plain torch; the new residual bit by bit."""

import itertools
import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import assert_same, rejected, unsettle
from tests.kernels.test_reduce_scatter import reference_of_nodes, values
from tests.variants import nightly, variants
from tilescale_net.kernels.all_reduce_norm import SPREADS, AllReduceNorm, ExpertRows
from tilescale_net.kernels.moe.row_ops import quantise

EPS, FP8 = 1e-5, torch.float8_e4m3fn


def expected(sums, bias, residual, weight):
    """The new residual, and its norm in float64."""
    total = sums.float()
    for more in (bias, residual):
        total = total if more is None else total + more.float()
    rounded = total.to(sums.dtype)
    wide = rounded.double()
    return rounded, wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def _layers(seed, dtype, hidden, calls=12):
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    turns = random.Random(seed)
    op = AllReduceNorm(hidden, threads=64, blocks=2)
    weight = values((hidden,), dtype, seed, "weight").to(tsn.device())
    bits = []
    many = 70 if hidden < 1024 else 3  # more rows than blocks
    for call in range(calls):
        shape = turns.choice([(1, hidden), (5, hidden), (2, 4, hidden), (0, hidden), (hidden,), (many, hidden)])
        bias = values((hidden,), dtype, seed, call, "bias") if call % 3 == 0 else None
        residual = values(shape, dtype, seed, call, "residual") if call % 2 == 0 else None
        data = [values(shape, dtype, seed, call, p) for p in range(n)]
        x = data[rank].to(tsn.device(), copy=True)
        out = x if call % 4 == 0 else torch.empty_like(x)
        op.shots = [None, 1, 2][(call + call // 3) % 3]
        op.spread = turns.choice([None, *(s for s in SPREADS if n % s == 0)])
        options = {
            k: v.to(tsn.device(), copy=True) for k, v in (("bias", bias), ("residual", residual)) if v is not None
        }
        unsettle(pace, 0.1)
        assert op(out, x, weight, eps=EPS, **options) is out
        tsn.synchronize()
        sums = reference_of_nodes(data, tsn.world().topology.node_size)
        total, norm = expected(sums, bias, residual, weight.cpu())
        label = f"seed {seed}, call {call}, {shape}, rank {rank}"
        if residual is not None:
            assert_same(options["residual"].cpu(), total, label)
        tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5}[dtype]
        assert torch.allclose(out.cpu().double(), norm, rtol=tolerance, atol=1e-6), label
        bits.append(out.cpu().view(torch.uint8).tolist())
    op.free()
    return bits


@variants(1, "size, dtype, hidden", [(2, torch.bfloat16, 520), (3, torch.float32, 96)])
@ranks.on(timeout=400)
def test_equals_torch(size, dtype, hidden, seed):
    everyone = tsn.world().control.gather("bits", _layers(seed, dtype, hidden))
    assert all(bits == everyone[0] for bits in everyone), "ranks have results with different bits"


SCALES = ("tensor", "token", "block", "ue8m0", "ue8m0_packed")


def _quantised(out: torch.Tensor, by: str, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` in FP8, and its scales, in plain torch."""
    if by == "tensor":
        return (out.float() * (1 / scale)).clamp(-448, 448).to(FP8), scale
    if by == "block":
        return quantise(out)
    if by in ("ue8m0", "ue8m0_packed"):
        blocks = out.float().view(*out.shape[:-1], -1, 128)
        least = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
        scale = torch.exp2(torch.ceil(torch.log2(least.double()))).float()
        q = (blocks / scale).to(FP8).view(out.shape)
        if by == "ue8m0":
            return q, scale[..., 0]
        exponents = (scale[..., 0].log2() + 127).to(torch.uint8)
        return q, torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4)).view(torch.int32)
    largest = torch.tensor(448.0)
    peak = out.float().abs().amax(-1, keepdim=True).clamp(min=1e-4)
    return (out.float() * (largest / peak)).to(FP8), peak / largest


def sum_of_experts(experts: ExpertRows) -> torch.Tensor:
    """In plain torch, choice by choice in float32."""
    total = torch.zeros((*experts.row_index.shape[:-1], experts.rows.shape[-1]))
    for k in range(experts.row_index.shape[-1]):
        chosen = experts.rows[experts.row_index[..., k].clamp(min=0).long()].float() * experts.weights[..., k, None]
        total += torch.where(experts.row_index[..., k, None] >= 0, chosen, 0.0)
    return (total if experts.shared is None else total + experts.shared.float()).to(experts.rows.dtype)


def _experts(key, tokens, top_k, dtype, hidden, shared) -> ExpertRows:
    g = torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(60))
    count = tokens * top_k + 3
    index = torch.randint(-2, count, (tokens, top_k), generator=g, dtype=torch.int32)
    return ExpertRows(
        values((count, hidden), dtype, *key, "rows"),
        index,
        torch.rand((tokens, top_k), generator=g),
        values((tokens, hidden), dtype, *key, "shared") if shared else None,
    )


def _on_device(*tensors):
    return [None if t is None else t.to(tsn.device(), copy=True) for t in tensors]


# What shares a scale, steps, and choices of a token: each compiles kernels of its own.
FEW = (("token", 1, 0), ("block", 2, 3), ("tensor", 1, 0), ("ue8m0_packed", 1, 0), ("ue8m0", 2, 0))
ALL = tuple(itertools.product(("", *SCALES), (None, 1, 2), (0, 3)))


def _forms(seed, dtype, hidden, combinations=FEW, calls=2):
    """All that surrounds the sum: sums of experts, weight bias, results kept apart, FP8 output beside `out` and alone."""
    rank, n = tsn.rank(), tsn.size()
    pace, turns = random.Random(f"{seed} {rank}"), random.Random(seed)
    op = AllReduceNorm(hidden, threads=64, blocks=2)
    weight = values((hidden,), dtype, seed, "weight")
    for call, (by, shots, top_k) in enumerate(combinations * calls):
        rows, op.shots = turns.choice([1, 5, 8]), shots
        op.spread = turns.choice([None, *(s for s in SPREADS if n % s == 0)])
        label = f"seed {seed}, call {call}, {rows} rows, {by}, top_k {top_k}, rank {rank}"
        residual = values((rows, hidden), dtype, seed, call, "residual") if call % 2 else None
        if top_k:
            data = [_experts((seed, call, p), rows, top_k, dtype, hidden, turns.random() < 0.5) for p in range(n)]
            x, summands = ExpertRows(*_on_device(*data[rank])), [sum_of_experts(e) for e in data]
        else:
            summands = [values((rows, hidden), dtype, seed, call, p) for p in range(n)]
            (x,) = _on_device(summands[rank])
        weight_bias = turns.choice([0.0, 1.0])
        sums = reference_of_nodes(summands, tsn.world().topology.node_size)
        total, wanted = expected(sums, None, residual, weight.double() + weight_bias)
        # Kept apart, in the residual's memory, or not at all.
        kept = turns.choice([True, residual is not None, False])
        before, scale = _on_device(residual, torch.tensor([2.0 ** turns.randrange(-6, 3)]))
        options: dict = dict(residual=before, eps=EPS, weight_bias=weight_bias)
        options["total"] = torch.empty((rows, hidden), dtype=dtype, device=tsn.device()) if kept else None
        out = torch.empty((rows, hidden), dtype=dtype, device=tsn.device())
        unsettle(pace, 0.1)
        assert op(out, x, *_on_device(weight), **options) is out
        tsn.synchronize()
        if kept:
            assert_same(options["total"].cpu(), total, label)
        if residual is not None:
            assert_same(before.cpu(), residual if kept else total, label)
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
        assert torch.allclose(out.cpu().double(), wanted, rtol=tolerance, atol=1e-5), label
        if not by:
            continue
        q, scales = _quantised(out.cpu(), by, scale.cpu())
        for layout in ("row", "column", "tma"):
            alone = layout == "column"
            options["quantized"] = torch.empty((rows, hidden), dtype=FP8, device=tsn.device())
            if by == "tensor":
                options["scale"] = scale
            else:
                options["scales"] = op.new_scales(rows, by, layout)
                options["ue8m0"] = by == "ue8m0"
            (options["residual"],) = _on_device(residual)
            again = torch.empty_like(out)
            found = op(None if alone else again, x, *_on_device(weight), **options)
            assert found is (options["quantized"] if alone else again)
            tsn.synchronize()
            if not alone:
                assert_same(again.cpu(), out.cpu(), label)
            assert_same(options["quantized"].cpu(), q, f"{label}, {layout}")
            if by != "tensor":
                found = options["scales"].cpu().clone(memory_format=torch.contiguous_format)
                assert_same(found, scales, f"{label}, scales, {layout}")
    op.free()


@variants(1, "nodes", [1, nightly(2)])
@ranks.on(timeout=400)
def test_operations_around_the_sum(nodes, seed):
    _forms(seed, torch.bfloat16, 384)


@pytest.mark.parametrize("size, dtype, nodes", [(3, torch.float32, 1), (2, torch.float16, 1), (4, torch.bfloat16, 2)])
@pytest.mark.nightly
@ranks.on(timeout=900)
def test_all_forms(size, dtype, nodes, seed):
    _forms(seed, dtype, 256, ALL)


# Llama 3 (2048 to 16384), Qwen 2.5 and 3 (1536 to 8192), DeepSeek V2 to V4 (4096 to 7168), Kimi K2 (7168).
@pytest.mark.parametrize("hidden", [1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 16384])
@pytest.mark.nightly
@ranks.on(4, heap="128M", timeout=400)
def test_sizes_of_models(hidden, seed):
    _forms(seed, torch.bfloat16, hidden, FEW[:2], 1)


@ranks.on()
def test_misuse_is_named():
    op, narrow = AllReduceNorm(64, threads=64, blocks=1), AllReduceNorm(20, threads=64, blocks=1)
    x, few = (torch.zeros((3, hidden), dtype=torch.bfloat16, device=tsn.device()) for hidden in (64, 20))
    out, weight = torch.zeros_like(x), x[0].clone()
    fp8, row = torch.empty_like(x, dtype=FP8), torch.zeros((3, 1), device=tsn.device())
    residual = torch.zeros_like(x) if tsn.rank() else None
    rejected(
        (lambda: AllReduceNorm(0), ValueError, "hidden", "0"),
        (lambda: narrow(torch.zeros_like(few), few, few[0].clone()), ValueError, "40 bytes", "16"),
        (lambda: op(out, x, weight[:32]), ValueError, "weight", "[32]", "[64]"),
        (lambda: op(out.to(torch.int32), x, weight), TypeError, "int32", "bfloat16"),
        (lambda: op(out, x, weight, residual=out), ValueError, "residual", "out", "overlap"),
        (lambda: op(out, x, weight, bias=weight.float()), TypeError, "bias", "float32"),
        (lambda: op(None, x, weight), ValueError, "out", "quantized"),
        (lambda: op(out, x, weight, total=x), ValueError, "x", "total", "overlap"),
        (lambda: op(out, x, weight, scales=row), ValueError, "scales", "quantized"),
        (lambda: op(out, x, weight, quantized=fp8), ValueError, "scales", "scale"),
        (lambda: op(out, x, weight, quantized=fp8, scales=row[:2]), ValueError, "[2, 1]", "[3, 1]", "128"),
        (lambda: op(out, x, weight, quantized=fp8, scales=row[:1].expand(3, 1)), ValueError, "strides", "overlap"),
        (lambda: op(out, x, weight, quantized=fp8, scales=row, ue8m0=True), ValueError, "scales", "128"),
        (lambda: op(out, x, weight, quantized=fp8, scales=row.int()), ValueError, "scales", "int32", "128"),
        (lambda: op(out, x, weight, quantized=out, scales=row), TypeError, "quantized", "bfloat16"),
        (lambda: op(out, ExpertRows(x, few, row), weight), TypeError, "row_index", "int32"),
        (lambda: op(out, ExpertRows(x, few.int()[:, :0], row), weight), ValueError, "row_index", "[3, 0]", "top_k"),
        (lambda: op(out, x, weight, weight_bias=float("nan")), ValueError, "weight_bias", "nan"),
        (lambda: op(out, x, weight, residual=residual), tsn.RankMismatch, "with out", "residual"),
    )
