"""GEMMs of eight bits with scales of blocks and of rows, against torch: whole numbers, whose sums are exact in any order."""

import dataclasses
import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.fused.test_all_gather_matmul import powers_of_two, whole_numbers
from tests.kernels.registry import file_of_tests
from tests.kernels.support import assert_same, unsettle
from tests.variants import nightly, variants
from tilescale_net.compiler import versions
from tilescale_net.kernels.fused import scaled_gemm
from tilescale_net.kernels.fused.expert_matmul import ScaledExpertMatmul
from tilescale_net.kernels.fused.scaled_gemm import ScaledTiling, scaled_matmul
from tilescale_net.kernels.fused.swiglu import quantise_rows
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.kernels.moe.row_ops import dequantise, quantise

FP8 = torch.float8_e4m3fn
# The first has tiles of one part, the second of two; GPUs take rows by 128.
TILINGS = (
    [ScaledTiling((128, 128, 128), stages=6), ScaledTiling()]
    if ranks.gpus()
    else [scaled_gemm.SIMULATED, ScaledTiling((32, 256, 128), stages=3, panel=1, columns=32, in_turn=True, steps=3)]
)


def _scales(shape, *key):
    return powers_of_two(torch.Size(shape).numel(), *key).clamp(0.5, 2).view(shape)


def gemms(seed, by_block, tiling, rows=100, n=264, k=272, experts=3, alone=True):
    """GEMMs of one matrix (`alone`), then of three experts' rows with gaps between them, the second without rows."""
    device, blocks = tsn.device(), lambda size: -(-size // 128)
    x = whole_numbers((rows, k), FP8, seed, "x")
    w = whole_numbers((experts, n, k), FP8, seed, "w")
    of_x = _scales((rows, blocks(k)) if by_block else (rows,), seed, "of x")
    of_w = _scales((experts, blocks(n), blocks(k)) if by_block else (experts, n), seed, "of w")
    if by_block:
        wide = scaled_gemm.dequantise_weights(w, of_w, torch.float32)
        exact = dequantise(x, of_x)
    else:
        wide, exact = w.float() * of_w[..., None], x.float() * of_x[:, None]
    products = (exact @ wide.transpose(1, 2)).bfloat16()
    operands = [t.to(device) for t in (x, w, of_x, of_w)]
    if alone:
        found = scaled_matmul(operands[0], operands[1][0], operands[2], operands[3][0], tiling=tiling)
        assert_same(found.cpu(), products[0], f"seed {seed}, one matrix")
    counts = torch.tensor([rows // 3, 0, 13], dtype=torch.int32)
    offsets = torch.tensor([3, 20, 21, rows], dtype=torch.int32)
    offsets[1:3] += rows // 3
    wanted = torch.full((rows, n), 7, dtype=torch.bfloat16)
    out = wanted.to(device, copy=True)
    for e, (begin, count) in enumerate(zip(offsets.tolist(), counts.tolist())):
        wanted[begin : begin + count] = products[e, begin : begin + count]
    scaled_matmul(*operands, out=out, counts=counts.to(device), offsets=offsets.to(device), tiling=tiling)
    tsn.synchronize()
    assert_same(out.cpu(), wanted, f"seed {seed}, experts")


@variants(1, "by_block, tiling", [(True, TILINGS[0]), (True, TILINGS[1]), (False, TILINGS[0])])
def test_equals_torch(by_block, tiling):
    alone = by_block and tiling is TILINGS[0]
    ranks.run(1, gemms, random.randrange(1 << 30), by_block, tiling, 100, 264, 272, 3, alone)


@ranks.on(1)
def test_low_tiles(seed):
    """Experts of random numbers of rows, most of which end in a low tile, next to whole tiles in panels of any height."""
    pace = random.Random(seed)
    rows = 128 if ranks.gpus() else 32
    for columns in (64, 256):
        stages, panel = pace.choice((2, 3, 4)), pace.choice((1, 2, 3))
        tile = (rows, columns if rows == 32 else 2 * columns if columns == 64 else columns, 128)
        tiling = ScaledTiling(tile, stages=stages, panel=panel, columns=32, steps=stages, low_tiles=True)
        experts, n, k = pace.randint(1, 6), 8 * pace.randint(1, 40), 16 * pace.randint(1, 50)
        counts = [pace.choice((0, rows * pace.randint(0, 4) + pace.randint(0, rows // 2 + 1))) for _ in range(experts)]
        begins = [0]
        for count in counts:
            begins.append(begins[-1] + count + pace.choice((0, 0, 5)))
        x, w = whole_numbers((begins[-1] + 3, k), FP8, seed, "x"), whole_numbers((experts, n, k), FP8, seed, "w")
        blocks = lambda size: -(-size // 128)  # noqa: E731
        of_x, of_w = _scales((len(x), blocks(k)), seed, "x"), _scales((experts, blocks(n), blocks(k)), seed, "w")
        wanted = torch.full((len(x), n), 7, dtype=torch.bfloat16)
        wide = scaled_gemm.dequantise_weights(w, of_w, torch.float32)
        out = wanted.to(tsn.device(), copy=True)
        for e, (begin, count) in enumerate(zip(begins, counts)):
            here = slice(begin, begin + count)
            wanted[here] = (dequantise(x[here], of_x[here]) @ wide[e].t()).bfloat16()
        operands = [t.to(tsn.device()) for t in (x, w, of_x, of_w)]
        ends = [torch.tensor(t, dtype=torch.int32, device=tsn.device()) for t in (counts, begins)]
        scaled_matmul(*operands, out=out, counts=ends[0], offsets=ends[1], tiling=tiling)
        tsn.synchronize()
        assert_same(out.cpu(), wanted, f"seed {seed}, {tiling}, {counts} of {n} x {k}")


def beside(seed, lates=(0, 0.5), hidden=512, inner=272, experts=4, top_k=2, tokens=20):
    """GEMMs beside a dispatch and a combine, next to the same one after the other: the same bits."""
    device, rows = tsn.device(), 128 if ranks.gpus() else 32
    sizes = dict(tile_rows=rows, alignment=rows, capacity=experts * rows, tuning=Tuning(once_per_node=False))
    moe, local = AllToAll(experts, tokens, hidden, top_k, FP8, **sizes), experts // tsn.size()
    tiling = dataclasses.replace(ScaledTiling() if ranks.gpus() else scaled_gemm.SIMULATED, low_tiles=bool(seed % 2))
    up = ScaledExpertMatmul(moe, hidden, inner, tiling=tiling)
    down = ScaledExpertMatmul(moe, inner, hidden, tiling=tiling)
    g = torch.Generator().manual_seed(seed + tsn.rank())
    weights = [
        scaled_gemm.quantise_weights(torch.randn(shape, generator=g).to(device))
        for shape in ((local, inner, hidden), (local, hidden, inner))
    ]
    (w_up, of_up), (w_down, of_down) = ((w.transpose(1, 2), scales) for w, scales in weights)
    for late in lates:
        x = torch.randn((tokens - 3 * tsn.rank(), hidden), generator=g).bfloat16().to(device)
        chosen = torch.rand((len(x), experts), generator=g).topk(top_k)[1].to(device)
        choices = quantise_rows(x), chosen, torch.rand((len(x), top_k), generator=g).to(device)
        pending = moe.dispatch_send(*choices)
        h = up.arriving(pending, w_up, w_scales=of_up)
        received = moe.dispatch_recv(pending)
        handle, ends = received.handle, dict(counts=received.counts, offsets=received.offsets)
        wanted = up(received.x, w_up, handle, x_scales=received.scales, w_scales=of_up)
        for e, (begin, count) in enumerate(zip(received.offsets.tolist(), received.counts.tolist())):
            here = slice(begin, begin + count)
            assert_same(h[here].cpu(), wanted[here].cpu(), f"seed {seed}, late {late}, expert {e}")
        q, scales = quantise_rows(h.nan_to_num_().clamp_(-1, 1))
        scales = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))
        out = down.combined(q, w_down, handle, x_scales=scales, w_scales=of_down, late=late)
        y = scaled_matmul(q, w_down.transpose(1, 2), scales, of_down, tiling=tiling, **ends)
        assert_same(out.cpu(), moe.combine(y, handle).cpu(), f"seed {seed}, late {late}, sums")
        moe.check()
    if lates[-1]:
        with pytest.raises(ValueError, match="late is 1; it must be a share of the tiles"):
            down.combined(q, w_down, handle, x_scales=scales, w_scales=of_down, late=1)
        with pytest.raises(ValueError, match=r"w_scales has shape \[1\]; it must be"):
            down(q, w_down, handle, x_scales=scales, w_scales=of_down.flatten()[:1])
    for each in (up, down, moe):
        each.free()


def fed(seed, k=272, n=48):
    """A GEMM waits for tiles that come from another rank while it runs, as in `test_expert_matmul`."""
    of, device = file_of_tests("fused/expert_matmul"), tsn.device()
    tiling = dataclasses.replace(TILINGS[0] if ranks.gpus() else scaled_gemm.SIMULATED, low_tiles=bool(seed % 2))
    rows, counts = tiling.tile[0], torch.tensor([33, 0, 70, 5], dtype=torch.int32)
    ends = (-(-counts // rows) * rows).cumsum(0, dtype=torch.int32)
    offsets, capacity, words_of_k = torch.cat((ends[:1] * 0, ends)), 8 * rows, -(-k // 128)
    target, source = (tsn.zeros((capacity, k), FP8) for _ in range(2))
    words, pace = tsn.zeros((9,), torch.uint64), random.Random(f"{seed} {tsn.rank()}")
    w, of_w = whole_numbers((4, n, k), FP8, seed), _scales((4, -(-n // 128), words_of_k), seed)
    of_x = _scales((capacity, -(-words_of_k // 4) * 4), seed, "of x")
    wide = scaled_gemm.dequantise_weights(w, of_w, torch.float32)
    kernel = scaled_gemm.scaled_gemm(4, n, k, **vars(tiling), workers=3, tiles=8, waits=True)
    operands = [t.to(device) for t in (w, of_x, of_w, counts, offsets)]
    calls, tickets = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    for call in range(1, 3):
        source.copy_(whole_numbers((capacity, k), FP8, seed, call, tsn.rank()))
        unsettle(pace)
        of.feed(capacity, k, "float8_e4m3fn", rows)(target, source, words, rows)
        calls.add_(1)
        out = torch.zeros((capacity, n), dtype=torch.bfloat16, device=device)
        kernel(out, target, *operands, calls, tickets, calls, words)
        tsn.synchronize()
        exact = dequantise(whole_numbers((capacity, k), FP8, seed, call, tsn.rank() ^ 1), of_x)
        for e, (begin, count) in enumerate(zip(offsets.tolist(), counts.tolist())):
            wanted = (exact[begin : begin + count] @ wide[e].t()).bfloat16()
            assert_same(out[begin : begin + count].cpu(), wanted, f"seed {seed}, call {call}, expert {e}")
        tsn.barrier()
    for tensor in (target, words, source):
        tsn.free(tensor)


@ranks.on(TSN_SIM_VISIBILITY="late", timeout=200)
def test_a_gemm_waits_for_tiles(seed):
    fed(seed)


@pytest.mark.parametrize("nodes", [1, nightly(2)])
@ranks.on(timeout=280)
def test_gemms_beside_communication(seed, nodes):
    beside(seed)


@ranks.on(1)
def test_quantised_numbers():
    """As a layer has them: the error comes from rounding the numbers, not from the sums."""
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(shape, generator=generator) for shape in ((40, 512), (64, 512)))
    (q, of_x), (quantised, of_w) = quantise(x), scaled_gemm.quantise_weights(w)
    for found, wanted in zip(scaled_gemm.quantise_weights(w.t().contiguous().t()), (quantised, of_w)):  # other strides
        assert_same(found, wanted)
    found = scaled_matmul(*(t.to(tsn.device()) for t in (q, quantised, of_x, of_w))).float().cpu()
    exact = dequantise(q, of_x) @ scaled_gemm.dequantise_weights(quantised, of_w, torch.float32).t()
    # Tensor cores keep about 14 bits of a step's sums, whose terms are as large as 16 here; the simulator keeps float32.
    assert torch.allclose(found, exact, rtol=2**-8, atol=0.02 if ranks.gpus() else 1e-3)
    assert (found - x @ w.t()).abs().mean() < 0.05 * (x @ w.t()).abs().mean()


@ranks.on(1, TSN_DEVICE="simulator")
def test_misuse():
    x, w = torch.zeros((8, 128), dtype=FP8), torch.zeros((2, 64, 128), dtype=FP8)
    of_x, of_w = torch.ones((8, 1)), torch.ones((2, 1, 1))
    counts, offsets = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    experts = dict(counts=counts, offsets=offsets)
    for operands, options, error, words in (
        ((x, w, of_x, of_w), {}, TypeError, "counts is None; it must be a tensor of torch.int32"),
        ((x.float(), w, of_x, of_w), experts, TypeError, "x is of torch.float32 .* must be of torch.float8_e4m3fn"),
        (
            (x, w, of_x[:, 0], of_w),
            experts,
            ValueError,
            r"x_scales is \[8\]; with scales of blocks it must be \[8, 1\]",
        ),
        ((x, w[..., :64], of_x, of_w), experts, ValueError, "w has strides .*; it must be contiguous"),
        ((x, w[0], of_x, of_w[0]), experts, ValueError, r"counts is \[2\]; it must be \[1\]"),
        ((x, w[0, :3], of_x, of_w[0]), {}, ValueError, "n is 3; it must be a multiple of 8"),
        ((x, w[0], of_x, of_w[0]), dict(out_dtype=torch.float32), TypeError, "out_dtype torch.float32 is not one of"),
        ((x, w[0], of_x, of_w[0]), dict(out=of_x), ValueError, r"out must be contiguous, \[8, 64\] of torch.bfloat16"),
        ((x, w[0], of_x, of_w[0]), dict(tiling=ScaledTiling(cluster=2)), ValueError, "the simulator has no clusters"),
    ):
        with pytest.raises(error, match=words):
            scaled_matmul(*operands, **options)
    assert scaled_matmul(x[:0], w[0], of_x[:0], of_w[0]).shape == (0, 64)
    for wrong, words in (
        (dict(tile=(128, 192, 128)), "256 columns or a divisor of 128"),
        (dict(tile=(128, 128, 64)), "a depth of 128"),
        (dict(columns=48), "columns must be a multiple of 8 and divide"),
        (dict(stages=0), "positive integers"),
        (dict(low_tiles=True, in_turn=True), "low_tiles go with neither in_turn nor clusters"),
        (dict(tile=(128, 64, 128), low_tiles=True), "columns must divide half of those of the tile"),
    ):
        with pytest.raises(ValueError, match=words):
            ScaledTiling(**wrong)


def test_clusters_need_a_newer_tilelang(monkeypatch):
    """Also where a kernel is made without an object."""
    monkeypatch.setattr(versions, "CLUSTERS", False)
    with pytest.raises(tsn.ConfigurationError, match=r"cluster 2 needs tilelang 0\.1\.14 or newer; give cluster 1"):
        scaled_gemm.scaled_gemm.trace(1, 256, 256, cluster=2)


@pytest.mark.parametrize(
    "rows, n, columns",  # the fastest that were measured on an H200, benchmark/fp8_gemm.py --parts plain --low 0
    [(16, 4096, 32), (128, 4096, 32), (256, 4096, 64), (512, 4096, 128), (128, 7168, 64), (256, 7168, 128), (512, 7168, 256),
     (128, 24576, 256), (256, 24576, 128), (512, 24576, 256), (4096, 4096, 256), (8192, 7168, 256)],
)  # fmt: skip
def test_few_rows_have_narrow_tiles(rows, n, columns):
    assert scaled_gemm.plain_tiling(rows, n, 132).tile[1] == columns
