"""DeepEP's second interface: both layouts, cached handles, weights, biases, the fields of its handles."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
from tests import ranks
from tests.deep_ep.support import EXPERTS, HIDDEN, TOP_K, Inputs, difference, gathered, plain_rows
from tests.kernels.moe import reference
from tests.variants import nightly, variants
from tilescale_net import deep_ep
from tilescale_net.kernels.moe import AllToAll

MOST = 64  # tokens, as in test_buffer.py, which shares the kernels of one layout
ALIGNMENT = 4


def _source(inputs, handle, expanded: bool) -> None:
    """The handle holds where each row comes from, and how many there are."""
    rows = len(inputs.origins)
    rows_of = [len(t) for t in inputs.routing.tokens]
    node_size = deep_ep.get_logical_domain_size(dist.group.WORLD)[1]
    ends = [sum(sum(rows_of[p::node_size]) for p in range(place + 1)) for place in range(node_size)]
    assert handle.token_metadata_at_forward is handle.channel_linked_list is None
    slots, chosen = handle.dst_buffer_slot_idx, inputs.topk_idx // (EXPERTS // inputs.ranks)
    assert slots.shape == inputs.topk_idx.shape and slots.dtype == torch.int32
    for r in range(inputs.ranks):
        mine = [t for t in range(len(slots)) if r in chosen[t]]
        assert [set(slots[t][chosen[t] == r].tolist()) for t in mine] == [{i} for i in range(len(mine))]
    assert bool((slots[chosen < 0] == -1).all())
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends and handle.num_recv_tokens in (rows, 2 * MOST)
    assert handle.recv_src_metadata[:rows, 0].tolist() == [r * MOST + t for r, t in inputs.origins]
    local, at = EXPERTS // inputs.ranks, 0
    alignment = ALIGNMENT if expanded else 1
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == inputs.counts
    for e, n in enumerate(inputs.counts):
        aligned = -(-n // alignment) * alignment
        assert int(handle.psum_num_recv_tokens_per_expert[e]) == at + (n if expanded else aligned)
        at += aligned
    for (r, t), (_, last, *places) in zip(inputs.origins, handle.recv_src_metadata[:rows].tolist()):
        chosen = inputs.everyone[r][t].tolist()
        here = [k for k, e in enumerate(chosen) if e >= 0 and e // local == inputs.rank]
        assert last == r * TOP_K + here[-1] and [k for k, place in enumerate(places) if place >= 0] == here


def _expected(inputs, x, group) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of layout "expert", one after the other without gaps, and their weights."""
    everyone, weights = gathered(plain_rows(x), group), gathered(inputs.weights, group)
    rows = reference.expert_rows(inputs.routing, everyone)
    order = [one for expert in inputs.routing.order for one in expert]
    return torch.cat(rows), torch.tensor([float(weights[r][t, k]) for r, t, k in order])


def _expanded(buffer, inputs, x, group) -> None:
    options = dict(num_experts=EXPERTS, expert_alignment=ALIGNMENT, do_expand=True)
    out, idx, weights, handle, event = buffer.dispatch(
        x, inputs.topk_idx, inputs.weights, **options, do_zero_padding=True, use_tma_aligned_col_major_sf=True
    )
    assert idx is None and event.event is None
    _source(inputs, handle, True)
    wanted, wanted_weights = _expected(inputs, x, group)
    assert handle.num_recv_tokens_per_expert_list == [-(-n // ALIGNMENT) * ALIGNMENT for n in inputs.counts]
    ends = [0, *torch.tensor(handle.num_recv_tokens_per_expert_list).cumsum(0).tolist()]
    there = torch.cat([torch.arange(b, b + n) for b, n in zip(ends, inputs.counts)])
    found = plain_rows(out)
    assert len(found) == ends[-1] == handle.num_expanded_tokens
    assert torch.equal(found[there], wanted) and torch.equal(weights.cpu()[there], wanted_weights)
    gaps = torch.ones(len(found), dtype=torch.bool)
    gaps[there] = False
    assert not found[gaps].any() and not weights.cpu()[gaps].any()
    if isinstance(out, tuple):
        assert out[1].stride(0) == 1 and out[1].stride(1) % 4 == 0
    # The same choices with other weights, and without.
    again, _, doubled, same, _ = buffer.dispatch(
        x, topk_weights=2 * inputs.weights, handle=handle, do_zero_padding=True
    )
    assert same is handle and torch.equal(plain_rows(again)[there], wanted)
    assert torch.equal(doubled.cpu()[there], 2 * wanted_weights) and not doubled.cpu()[gaps].any()
    again, _, none, _, _ = buffer.dispatch(x, handle=handle)
    assert none is None and torch.equal(plain_rows(again)[there], wanted)
    y = found.to(inputs.topk_idx.device, torch.bfloat16)
    sums, back, _ = buffer.combine(y, handle, topk_weights=weights)
    chosen = (inputs.topk_idx >= 0).sum(1, keepdim=True)
    assert difference(sums.float().cpu(), plain_rows(x) * chosen.cpu()) < 1e-4
    assert torch.equal(back, torch.where(inputs.topk_idx >= 0, inputs.weights, 0.0))


def _once_per_rank(buffer, inputs, x) -> None:
    out, idx, weights, handle, event = buffer.dispatch(
        x, inputs.topk_idx, inputs.weights, num_experts=EXPERTS, async_with_compute_stream=True
    )
    event.current_stream_wait()
    _source(inputs, handle, False)
    everyone = torch.stack([inputs.everyone[r][t] for r, t in inputs.origins])
    local = EXPERTS // inputs.ranks
    here = (everyone >= 0) & (everyone // local == inputs.rank)
    assert torch.equal(idx.cpu(), torch.where(here, everyone % local, -1))
    assert len(plain_rows(out)) == len(weights) == len(inputs.origins)
    padded, *_ = buffer.dispatch(x, inputs.topk_idx, num_experts=EXPERTS, do_cpu_sync=False)
    assert len(plain_rows(padded)) == MOST * inputs.ranks
    assert torch.equal(plain_rows(padded)[: len(inputs.origins)], plain_rows(out))
    y = plain_rows(out).to(inputs.topk_idx.device, torch.bfloat16)
    bias = torch.full_like(inputs.random, 0.5), None
    hosts = torch.stack([((inputs.topk_idx >= 0) & (inputs.topk_idx // local == r)).any(1) for r in range(2)]).sum(0)
    sums, back, _ = buffer.combine(y, handle, topk_weights=weights, bias=bias)
    assert difference(sums.float().cpu() - 0.5, plain_rows(x) * hosts[:, None].cpu()) < 1e-4
    assert torch.equal(back, torch.where(inputs.topk_idx >= 0, inputs.weights, 0.0))


def _other_strides(buffer, inputs) -> None:
    """The most tokens of a call may change in every call: the object, its kernels and memory stay."""
    made, live = dict(buffer._objects._made), buffer._world.heap.live
    for most in (11, 13, MOST - 1):
        for expand in (False, True):
            options = dict(num_experts=EXPERTS, expert_alignment=ALIGNMENT if expand else 1, do_expand=expand)
            out, _, _, handle, _ = buffer.dispatch(
                inputs.random, inputs.topk_idx, num_max_tokens_per_rank=most, do_cpu_sync=False, **options
            )
            assert handle.num_max_tokens_per_rank == most
            assert expand or len(out) == handle.num_recv_tokens == most * inputs.ranks
            places = [r * most + t for r, t in inputs.origins]
            assert handle.recv_src_metadata[: len(places), 0].tolist() == places
            asked, handle._handle._rows = handle._handle._rows, None
            sums, _, _ = buffer.combine(out, handle)
            assert asked is handle._handle._rows is None, "the host has waited for the number of rows"
            chosen = inputs.topk_idx // (EXPERTS // inputs.ranks)
            often = sum((chosen == r).any(1) for r in range(inputs.ranks)) if not expand else (chosen >= 0).sum(1)
            assert difference(sums.float().cpu(), (inputs.random.float() * often[:, None]).cpu()) < 1e-2
    assert made == buffer._objects._made and live == buffer._world.heap.live
    with pytest.raises(ValueError, match="x has|rank"):
        buffer.dispatch(inputs.random, inputs.topk_idx, num_experts=EXPERTS, num_max_tokens_per_rank=4)
        tsn.synchronize()


def _rounded_once(group, inputs) -> None:
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=MOST, allow_multiple_reduction=False)
    one, small = torch.ones_like(inputs.random), 2.0**-8  # in bfloat16, 1 + small is 1
    # The sum of the first rank alone would be rounded to 1.
    choices = torch.tensor([0, 1, EXPERTS // 2], device=one.device).repeat(len(one), 1)
    out, _, _, handle, _ = buffer.dispatch(one, choices, num_experts=EXPERTS, do_expand=True)
    rows = torch.full_like(out, small)
    first = int(handle.psum_num_recv_tokens_per_expert[0]) if inputs.rank == 0 else 0
    rows[:first] = 1.0  # of expert 0
    sums, _, _ = buffer.combine(rows, handle)
    assert sums.dtype == torch.bfloat16
    assert torch.equal(sums, torch.full_like(sums, 1 + 2 * small))
    buffer.destroy()


@variants(0, "nodes", [1, nightly(2)])
@ranks.on(timeout=280)
def test_elastic_buffer(nodes):
    group = dist.group.WORLD
    sizes = nodes, 2 // nodes
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=MOST, num_bytes=1 << 20, explicitly_destroy=True)
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == deep_ep.get_logical_domain_size(group) == sizes
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(buffer.rank_idx, sizes[1])
    assert (buffer.num_bytes, buffer.num_allocated_qps, buffer.deterministic, buffer.runtime) == (
        1 << 20,
        0,
        False,
        None,
    )
    inputs = Inputs(group, 7 + buffer.rank_idx, 11)
    quantised = tuple(t.to(tsn.device()) for t in reference.quantise(inputs.random.cpu()))
    for x in (inputs.random, quantised):
        _once_per_rank(buffer, inputs, x)
        _expanded(buffer, inputs, x, group)
    with pytest.raises(ValueError, match="topk_idx, or the handle"):
        buffer.dispatch(inputs.random)
    _other_strides(buffer, inputs)
    _rounded_once(group, inputs)
    buffer.barrier(with_cpu_sync=True)
    buffer.destroy()
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint
    big = SimpleNamespace(size=lambda: 32)
    expert = dict(layout="expert", zero_copy=False)
    needed = [AllToAll.heap_bytes(256, 128, 7168, 8, **how, ranks=32, nodes=4) for how in (dict(layout="rank"), expert)]
    assert hint(big, 128, 7168) >= sum(needed)
    assert hint(group, MOST, HIDDEN, TOP_K, True) > hint(group, MOST, HIDDEN, TOP_K) > 4 * MOST * HIDDEN * 2
