"""Merge of partial attention outputs against attention to the whole KV cache, and against the formula in float64."""

import math
import random

import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.support import assert_same, rejected, unsettle
from tests.variants import nightly, variants
from tilescale_net.kernels.attention_merge import AttentionMerge

SMALL = dict(threads=64, blocks=2, call_bytes=32 * 1024)
EMPTY = (-math.inf, math.inf, math.nan)  # what kernels of attention say of a part without keys


def partial_of(shape, dtype, base_2, *key):
    """A rank's output and lse, of the key alone; some rows have no keys, and hold NaN. On the CPU."""
    numbers = torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(40))
    x = torch.randn(shape, generator=numbers).to(dtype)
    lse = torch.randn(shape[:2], generator=numbers) * 8 * (1 / math.log(2) if base_2 else 1)
    chosen = torch.rand(shape[:2], generator=numbers)
    for i, value in enumerate(EMPTY):
        empty = (chosen > 0.15 * i) & (chosen <= 0.15 * (i + 1))
        lse[empty], x[empty] = value, math.nan
    lse[:, 0], x[:, 0] = -math.inf, math.nan  # of all ranks
    return x, lse


def merged(partials, base_2):
    """Attention of the merged partials, in float64; and its lse."""
    x, lse = (torch.stack(parts).double() for parts in zip(*partials))
    lse = torch.where(lse < math.inf, lse, -math.inf) * (math.log(2) if base_2 else 1)
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - torch.where(total > -math.inf, total, 0))[..., None]
    return torch.where(weights > 0, weights * x, 0).sum(0), total / (math.log(2) if base_2 else 1)


def merges(seed, all_heads, base_2, calls=6):
    rank, n = tsn.rank(), tsn.size()
    pace, turns = random.Random(f"{seed} {rank}"), random.Random(seed)
    op = AttentionMerge(all_heads=all_heads, base_2=base_2, **SMALL)
    by_size, bits = op._one_shot_bytes, []
    for call in range(calls):
        dtype = turns.choice(AttentionMerge.DTYPES)
        # Heads that are no multiple of the ranks, more rows than a block merges at once, and several kernels.
        heads = turns.choice([2, 5] if all_heads else [1, 2]) * (1 if all_heads else n)
        twice = all_heads and call % 3 == 1  # over the links
        op._one_shot_bytes = 0 if twice else by_size
        shape = (turns.choice([1, 3, 20]), 2 * n if twice else heads, turns.choice([16, 72, 256]))
        if call == 2:
            shape = (0, *shape[1:])
        partials = [partial_of(shape, dtype, base_2, seed, call, p) for p in range(n)]
        own = slice(None) if all_heads else slice(rank * heads // n, (rank + 1) * heads // n)
        x, lse = (t.to(tsn.device(), copy=True) for t in partials[rank])
        in_place = all_heads and call % 2 == 1
        out = x if in_place else torch.full_like(x[:, own], 7)
        out_lse = lse if in_place else torch.full_like(lse[:, own], 7)
        unsettle(pace, 0.1)
        assert op(out, out_lse, x, lse) == (out, out_lse)
        if not in_place:
            x.zero_()  # the call is over with x
        tsn.synchronize()
        wanted, wanted_lse = (t[:, own] for t in merged(partials, base_2))
        label = f"seed {seed}, call {call}, {shape}, {dtype}, rank {rank}"
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        assert torch.allclose(out.cpu().double(), wanted, rtol=tolerance, atol=tolerance), label
        assert torch.allclose(out_lse.cpu().double(), wanted_lse, rtol=1e-5, atol=1e-5), label
        bits.append(out.cpu().view(torch.uint8).tolist() if all_heads else None)
    op.free()
    return bits


@variants(1, "size, nodes", [(2, 1), (1, 1), (2, 2), nightly(4, 1), (4, 2)])
@ranks.on(timeout=400)
def test_equals_one_rank(size, nodes, seed):
    merges(seed, False, False)
    everyone = tsn.world().control.gather("bits", merges(seed + 1, True, True))
    assert all(bits == everyone[0] for bits in everyone), "ranks have results with different bits"


@ranks.on()
def test_equals_attention_to_the_whole_cache():
    """Softmax over the whole cache, of which each rank has a part of another length, the last one none."""
    rank, n, heads, dim = tsn.rank(), tsn.size(), 4, 32
    numbers = torch.Generator().manual_seed(5)
    ends = [0, *(7 * p + 3 for p in range(n - 1)), 7 * n]
    ends[-1] = ends[-2]
    query = torch.randn((3, heads, dim), generator=numbers)
    keys, values = (torch.randn((ends[-1], heads, dim), generator=numbers) for _ in range(2))

    def attend(keys, values):
        scores = torch.einsum("bhd,khd->bhk", query, keys) / math.sqrt(dim)
        return torch.einsum("bhk,khd->bhd", scores.softmax(-1), values), torch.logsumexp(scores, -1)

    mine = slice(ends[rank], ends[rank + 1])
    x, lse = (t.contiguous().to(tsn.device()) for t in attend(keys[mine], values[mine]))
    op, whole = AttentionMerge(**SMALL), AttentionMerge(**SMALL, all_heads=True)
    own = slice(rank * heads // n, (rank + 1) * heads // n)
    out, out_lse = torch.empty_like(x[:, own]), torch.empty_like(lse[:, own])
    everything = torch.empty_like(x), torch.empty_like(lse)
    for _ in range(3):
        op(out, out_lse, x, lse)
        whole(*everything, x, lse)
    tsn.synchronize()
    for found, wanted in zip((out, out_lse), attend(keys, values)):
        assert torch.allclose(found.cpu(), wanted[:, own], rtol=1e-4, atol=1e-5)
    for found, part in zip(everything, (out, out_lse)):
        assert_same(found[:, own].contiguous().cpu(), part.contiguous().cpu(), "all heads, and a part of them")


@variants(1, "nodes", [1, 2])
@ranks.on()
def test_rows_do_not_depend_on_others(nodes):
    """Rows do not depend on the rest of the batch: each has the bits that it has alone, in any number of shots."""
    x, lse = (t.to(tsn.device()) for t in partial_of((9, 4, 64), torch.bfloat16, False, tsn.rank()))
    for all_heads in (False, True):
        op = AttentionMerge(**SMALL, all_heads=all_heads)
        own = 4 if all_heads else 4 // tsn.size()
        rows = [(x, lse), *((x[i : i + 1], lse[i : i + 1]) for i in range(9))]
        found = [op(x.new_empty(len(a), own, 64), lse.new_empty(len(a), own), a, b) for a, b in rows]
        tsn.synchronize()
        for which in (0, 1):
            together = found[0][which].cpu()
            assert_same(torch.cat([one[which].cpu() for one in found[1:]]), together)
        assert {op._shots_and_tokens(t)[0] for t in (x, x[:1])} <= {0, 1, 2}


@ranks.on()
def test_misuse_is_named():
    op, whole = AttentionMerge(**SMALL), AttentionMerge(**SMALL, all_heads=True)
    x, lse = torch.zeros((3, 4, 16), device=tsn.device()), torch.zeros((3, 4), device=tsn.device())
    out, out_lse = x[:, :2].contiguous(), lse[:, :2].contiguous()
    huge, wide = torch.zeros((1, 2, 4096), device=tsn.device()), torch.zeros((1, 64, 2048), device=tsn.device())
    rejected(
        (lambda: AttentionMerge(call_bytes=0), ValueError, "call_bytes", "0"),
        (lambda: AttentionMerge(threads=32), ValueError, "threads", "64"),
        (lambda: op(out.int(), out_lse, x.int(), lse), TypeError, "int32", "bfloat16"),
        (lambda: op(out, out_lse, x[0], lse), ValueError, "x", "[batch, heads, dim]"),
        (lambda: op(out, out_lse, x[:, :3].contiguous(), lse), ValueError, "3 heads", "2 PEs", "all_heads"),
        (lambda: op(out, out_lse, x[:, :, :3].contiguous(), lse), ValueError, "12 bytes", "16"),
        (lambda: op(out, out_lse, huge, lse[:1, :2]), ValueError, "16384 bytes", "8192"),
        (lambda: op(out, out_lse, x, lse.double()), TypeError, "lse", "float64"),
        (lambda: op(x, out_lse, x, lse), ValueError, "out", "[3, 2, 16]"),
        (lambda: op(out, lse, x, lse), ValueError, "out_lse", "[3, 2]"),
        (lambda: whole(x, lse, x, out_lse), ValueError, "lse", "[3, 4]"),
        (lambda: whole(x.view(-1)[:0].view(0, 4, 16), lse, x, lse), ValueError, "out", "[0, 4, 16]"),
        (lambda: op(wide[:, :32].clone(), wide[:, :32, 0].clone(), wide, wide[:, :, 0].clone()), ValueError, "call_bytes=1048576"),
        (lambda: op(out[: tsn.rank() + 1], out_lse[: tsn.rank() + 1], x[: tsn.rank() + 1], lse[: tsn.rank() + 1]),
         tsn.RankMismatch, "[1, 4, 16]", "[2, 4, 16]"),
    )  # fmt: skip
    op(out, out_lse, x, lse)  # later calls work
