"""DeepEP's own tests of a Buffer, with small shapes, in a subgroup of a larger job."""

import itertools
import json
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
import tilescale_net.deep_ep
from tests import ranks
from tests.deep_ep.support import EXPERTS, HIDDEN, TOP_K, Inputs, difference, plain_rows
from tests.kernels.moe import reference
from tests.kernels.support import nothing_launched
from tests.variants import nightly, variants
from tilescale_net.deep_ep import Buffer, Config, groups
from tilescale_net.kernels.moe import AllToAll
from tilescale_net.kernels.moe.latency_combine import combine_latency, exchange_weights
from tilescale_net.kernels.moe.latency_dispatch import dispatch_latency
from tilescale_net.runtime import this_host, worlds


def _high_throughput(buffer, group, config) -> None:
    # The second time some rank has more tokens than there was room for.
    for tokens, seed in ((9 - 3 * buffer.rank, 1), (70 * buffer.rank, 5)):
        inputs = Inputs(group, tokens, seed)
        layout = buffer.get_dispatch_layout(inputs.topk_idx, EXPERTS)
        per_rank, per_node, per_expert, in_rank, _ = layout
        if tsn.world(group).topology.nodes == 1:
            assert per_node is None
        else:  # of one rank each
            assert per_node.tolist() == per_rank.tolist() and per_node.dtype == torch.int32
        local, device = EXPERTS // inputs.ranks, tsn.device(group)
        hosts = torch.where(inputs.topk_idx < 0, -1, inputs.topk_idx // local)
        assert torch.equal(in_rank, torch.stack([(hosts == r).any(1) for r in range(inputs.ranks)], 1))
        assert per_rank.tolist() == in_rank.sum(0).tolist()
        assert per_expert.tolist() == [int((inputs.topk_idx == e).sum()) for e in range(EXPERTS)]
        quantised = tuple(t.to(device) for t in reference.quantise(inputs.random.cpu()))
        strided = quantised[0], quantised[1].T.contiguous().T
        for x in (inputs.named, inputs.random, strided) if seed == 1 else (inputs.random,):
            for with_choices in (True, False):
                _round(buffer, inputs, x, layout, with_choices, config)
        # As many as the object has room for that is there already.
        _worst(buffer, inputs, layout, config, (64 if seed == 1 else 128) * inputs.ranks)


def _round(buffer, inputs, x, layout, with_choices: bool, config) -> None:
    """Dispatch with choices or a mask, again with the handle, combine twice."""
    per_rank, _, per_expert, in_rank, _ = layout
    routing = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
    choices = dict(topk_idx=inputs.topk_idx, topk_weights=inputs.weights) if with_choices else {}
    asked = dict(previous_event=buffer.capture(), async_finish=True, allocate_on_comm_stream=True)
    rows, idx, weights, counts, handle, event = buffer.dispatch(
        x, **routing, **choices, config=config, expert_alignment=4, **asked
    )
    event.current_stream_wait()
    assert counts == [-(-n // 4) * 4 for n in inputs.counts]
    ends = [sum(len(t) for t in inputs.routing.tokens[: r + 1]) for r in range(inputs.ranks)]
    assert handle[0][:, inputs.rank].tolist() == ends
    found = plain_rows(rows)
    assert len(found) == ends[-1]
    if x is inputs.named:
        named = [torch.full((HIDDEN - 128,), r + 1.0) for r, _ in inputs.origins]
        assert all(torch.equal(a[:-128], b) and a[-1] == t for a, b, (_, t) in zip(found, named, inputs.origins))
    local = EXPERTS // inputs.ranks
    if with_choices:
        wanted = [inputs.everyone[r][t] for r, t in inputs.origins]
        wanted = torch.stack(wanted) if wanted else torch.zeros((0, TOP_K), dtype=torch.int64)
        here = (wanted >= 0) & (wanted // local == inputs.rank)
        assert torch.equal(idx.cpu(), torch.where(here, wanted % local, -1))
    again, *nothing, _ = buffer.internode_dispatch(x, handle=handle, config=config)
    assert nothing == [None] * 4
    for a, b in zip(*([t] if isinstance(t, torch.Tensor) else t for t in (again, rows))):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    y = found.to(tsn.device(buffer.group), torch.bfloat16)
    for _ in range(2):
        out, back, _ = buffer.combine(y, handle, topk_weights=weights, config=config)
        hosts = in_rank.sum(1, keepdim=True)
        source = plain_rows(x).to(out.device) if isinstance(x, tuple) else x.float()
        assert difference(out.float(), source * hosts) < 5e-6
        if with_choices:  # the weights of choices that are none are not sent back
            assert difference(back, torch.where(inputs.topk_idx >= 0, inputs.weights, 0.0)) < 1e-9
        else:
            assert back is None
    bias = torch.full_like(out, 0.25), torch.full_like(out, 2.0)
    biased, _, _ = buffer.internode_combine(y, handle, bias=bias)
    assert difference(biased.float() - 2.25, source * hosts) < 2e-5


def _worst(buffer, inputs, layout, config, worst: int) -> None:
    """A fixed number of rows, for which the host does not wait."""
    _, _, per_expert, in_rank, _ = layout
    rows, idx, weights, counts, handle, _ = buffer.dispatch(
        inputs.named, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=inputs.topk_idx,
        topk_weights=inputs.weights, num_worst_tokens=worst, config=config,
    )  # fmt: skip
    n = len(inputs.origins)
    assert counts == [] and len(rows) == len(idx) == len(weights) == worst
    assert [int(row[0]) - 1 for row in rows[:n]] == [r for r, _ in inputs.origins] and idx[n:].eq(-1).all()
    out, _, _ = buffer.combine(rows, handle)
    assert torch.equal(out, inputs.named * in_rank.sum(1, keepdim=True))


def _low_latency(buffer, group) -> None:
    most = 12
    inputs = Inputs(group, most - 3 * buffer.rank, 3)
    device, local = tsn.device(group), EXPERTS // inputs.ranks
    for use_fp8, rounded, ue8m0, hooked, x in (
        (False, False, False, True, inputs.named), (True, False, False, False, inputs.random),
        (True, True, True, False, inputs.named),
    ):  # fmt: skip
        stats = torch.zeros(local, dtype=torch.int32, device=device)
        for turn in range(2):
            rows, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, inputs.topk_idx, most, EXPERTS, cumulative_local_expert_recv_stats=stats, use_fp8=use_fp8,
                round_scale=rounded, use_ue8m0=ue8m0, async_finish=not hooked, return_recv_hook=hooked,
            )  # fmt: skip
            hook() if hooked else event.current_stream_wait()
            assert stats.tolist() == [(turn + 1) * n for n in inputs.counts] and counts.tolist() == inputs.counts
        source, layout, *sizes = handle
        assert sizes == [most, HIDDEN, EXPERTS] and len(handle) == 5
        assert torch.equal(handle[1], layout) and torch.equal(handle[:2][1], layout)
        for e, origins in enumerate(inputs.routing.order):
            assert source[e, : len(origins)].tolist() == [t for _, t, _ in origins]
            begins = layout[e] >> 32
            per_rank = [sum(r == other for other, _, _ in origins) for r in range(inputs.ranks)]
            assert (layout[e] & 0xFFFFFFFF).tolist() == per_rank
            assert begins.tolist() == [sum(per_rank[:r]) for r in range(inputs.ranks)]
        plain = rows
        if use_fp8:
            data, scales = rows
            assert scales.stride(1) == 1
            if ue8m0:
                exponents = scales.contiguous().view(torch.uint8).to(torch.int32)  # as DeepEP's tests read them
                scales = (exponents << 23).view(torch.float32)
            flat = reference.dequantise(data.reshape(-1, HIDDEN).cpu(), scales.reshape(-1, HIDDEN // 128).cpu())
            plain = flat.view(data.shape).to(device, torch.bfloat16)
        if x is inputs.named:
            for e, origins in enumerate(inputs.routing.order):
                assert [int(row[0]) - 1 for row in plain[e, : len(origins)]] == [r for r, _, _ in origins]
        wanted = x.float() * torch.where(inputs.topk_idx >= 0, inputs.weights, 0.0).sum(1, keepdim=True)
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:] = plain
            out = torch.empty_like(x)
            found, event, hook = buffer.low_latency_combine(
                plain, inputs.topk_idx, inputs.weights, handle, zero_copy=zero_copy, out=out, async_finish=not hooked,
                return_recv_hook=hooked, use_logfmt=zero_copy,
            )  # fmt: skip
            hook() if hooked else event.current_stream_wait()
            assert found is out and not found.isnan().any()
            assert difference(found.float(), wanted) < (9e-4 if use_fp8 else 1e-5)


def _misuse(buffer, group) -> None:
    """Mistakes of low-latency calls that all ranks make: errors name them, and later calls work."""
    inputs, error = Inputs(group, 5, 3), pytest.raises
    x, idx, weights = inputs.random, inputs.topk_idx, inputs.weights
    sizes: dict = dict(num_max_dispatch_tokens_per_rank=12, num_experts=EXPERTS, use_fp8=False)
    with error(ValueError, match="x has shape .* 2 dimensions"):
        buffer.low_latency_dispatch(x[0], idx, **sizes)
    with error(TypeError, match="topk_idx must be a tensor, not NoneType"):
        buffer.low_latency_dispatch(x, None, **sizes)
    with error(ValueError, match="totals has shape"):
        buffer.low_latency_dispatch(
            x, idx, **sizes, cumulative_local_expert_recv_stats=torch.zeros(1, dtype=torch.int32, device=x.device)
        )
    calls = [buffer.low_latency_dispatch(x, idx, **sizes, return_recv_hook=True) for _ in range(2)]
    for rows, _, handle, _, _ in calls:  # also of the one that another object has sent
        with error(ValueError, match="not been received; .* hook"):
            buffer.low_latency_combine(rows, idx, weights, handle)
    with error(ValueError, match="sent before .* hook"):
        buffer.low_latency_dispatch(x, idx, **sizes, return_recv_hook=True)
    with error(ValueError, match="wait for their hooks"):
        buffer.destroy()
    for *_, hook in calls:
        hook()
    with error(ValueError, match="received once"):
        calls[0][-1]()
    rows, _, handle, *_ = calls[1]
    for wrong, arguments, word in (
        (TypeError, (rows, rows), "y must be a tensor, not tuple"),
        (TypeError, rows.float(), "y has dtype"),
    ):
        with error(wrong, match=word):
            buffer.low_latency_combine(arguments, idx, weights, handle)
    with error(TypeError, match="topk_weights must be a tensor"):
        buffer.low_latency_combine(rows, idx, None, handle)
    with error(TypeError, match="weights has dtype torch.int64"):
        buffer.low_latency_combine(rows, idx, weights.long(), handle)
    wanted = x.float() * torch.where(idx >= 0, weights, 0.0).sum(1, keepdim=True)
    assert difference(buffer.low_latency_combine(rows, idx, weights, handle)[0].float(), wanted) < 1e-5
    other = tilescale_net.deep_ep.Buffer(
        group, low_latency_mode=True
    )  # uses a handle of the first; and it the other way round
    assert difference(other.low_latency_combine(rows, idx, weights, handle)[0].float(), wanted) < 1e-5
    rows, _, handle, *_ = other.low_latency_dispatch(x, idx, **sizes)
    other.destroy()
    assert difference(buffer.low_latency_combine(rows, idx, weights, handle)[0].float(), wanted) < 1e-5
    handle.world = None
    with error(ValueError, match="another group"):
        buffer.low_latency_combine(rows, idx, weights, handle)
    # Rows that lie by column are scaled as others.
    quantised = dict(sizes, use_fp8=True, round_scale=True)
    found = [buffer.low_latency_dispatch(rows, idx, **quantised)[0][1] for rows in (x, x.T.contiguous().T)]
    for e, n in enumerate(inputs.counts):
        assert torch.equal(*(scales[e, :n] for scales in found))


def _by_column(group) -> None:
    """Scales that lie by column, in memory of the caller, equal scales that lie by row."""
    inputs, device = Inputs(group, 7, 3), tsn.device(group)
    sizes = (EXPERTS, 12, HIDDEN, TOP_K, torch.float8_e4m3fn, "latency")
    ops = [AllToAll(*sizes, column_scales=by_column, group=group) for by_column in (False, True)]
    wanted = ops[0].dispatch(inputs.random, inputs.topk_idx)
    rows, scales = ops[1].empty_output()
    found = ops[1].dispatch(inputs.random, inputs.topk_idx, out=(rows, scales))
    assert found.scales.shape == wanted.scales.shape and scales.stride() == found.scales.stride() == (4 * 24, 1, 24)
    assert found.scales.data_ptr() == scales.data_ptr() and found.x is rows
    for e, n in enumerate(inputs.counts):
        assert torch.equal(found.scales[e, :n], wanted.scales[e, :n])
        assert torch.equal(found.x[e, :n].view(torch.uint8), wanted.x[e, :n].view(torch.uint8))
    with pytest.raises(ValueError, match="out has strides"):
        ops[1].dispatch(inputs.random, inputs.topk_idx, out=(rows, scales.contiguous()))
    y = torch.ones(rows.shape, dtype=torch.bfloat16, device=device)
    assert torch.equal(ops[1].combine(y, found.handle), ops[0].combine(y, wanted.handle))
    for op in ops:
        op.free()
    with pytest.raises(ValueError, match="column_scales goes with float8_e4m3fn rows"):
        AllToAll(EXPERTS, 12, HIDDEN, TOP_K, torch.bfloat16, column_scales=True, group=group)


def _waiting(buffer, group) -> None:
    """A rank that waits for a late one counts the wait for it, on top of what was there; other calls do not."""
    inputs = Inputs(group, 5, 3)
    late, other = buffer.group_size - 1, 0
    stats = [torch.zeros(buffer.group_size, dtype=torch.int64, device=tsn.device(group)) for _ in range(2)]
    for turn in range(3):
        waited = [None, None] if turn == 2 else stats
        before = [s.clone() for s in stats]
        for call in range(2):
            dist.barrier(group)
            if buffer.rank == late:
                time.sleep(0.4 if turn == 1 else 0)
            if call == 0:
                rows, _, handle, *_ = buffer.low_latency_dispatch(
                    inputs.named, inputs.topk_idx, 12, EXPERTS, dispatch_wait_recv_cost_stats=waited[0], use_fp8=False
                )
            else:
                out, *_ = buffer.low_latency_combine(
                    rows, inputs.topk_idx, inputs.weights, handle, combine_wait_recv_cost_stats=waited[1]
                )
            tsn.world(group).synchronize()
        for now, then in zip(stats, before):
            grown = (now - then).tolist()
            if turn == 2:
                assert grown == [0] * buffer.group_size
            elif turn == 1 and buffer.rank == other:  # the first time it compiles
                assert grown[late] > max(5e7, grown[other]), grown
    with pytest.raises(TypeError, match="waited has dtype torch.int32"):
        buffer.low_latency_dispatch(
            inputs.named, inputs.topk_idx, 12, EXPERTS, dispatch_wait_recv_cost_stats=stats[0].int(), use_fp8=False
        )


def _refusals(buffer, inputs) -> None:
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        buffer.low_latency_update_mask_buffer(2, True)
    with pytest.raises(ValueError, match="max_tokens is 1025; latency mode takes up to 1024"):
        buffer.get_low_latency_rdma_size_hint(1025, 512, 2, 4)
    with pytest.raises(ValueError, match="allocate_on_comm_stream"):
        buffer.get_dispatch_layout(inputs.topk_idx, EXPERTS, allocate_on_comm_stream=True)
    # An expert that does not exist: nowhere in the layout, and refused on all ranks by dispatch.
    wrong = inputs.topk_idx.clone()
    wrong[0, 0] = EXPERTS + 3 if buffer.rank else -1
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(wrong, EXPERTS)
    assert per_expert.sum() == ((wrong >= 0) & (wrong < EXPERTS)).sum()
    with pytest.raises(ValueError, match="wrong topk_idx|topk_idx .*expert"):
        buffer.dispatch(
            inputs.random, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=wrong,
            topk_weights=inputs.weights,
        )  # fmt: skip
    # What kernels do not see.
    *_, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx, EXPERTS)
    routing: dict = dict(is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=inputs.topk_idx)
    for wrong, word in (
        (dict(x=inputs.random[0]), "x has shape"), (dict(topk_weights=inputs.weights[:, :1]), "but topk_idx is of"),
        (dict(expert_alignment=0), "expert_alignment is 0"), (dict(num_tokens_per_expert=6), "must be a tensor, not int"),
        (dict(is_token_in_rank=None), "give is_token_in_rank"), (dict(handle=(1, 2)), "handle is a tuple of 2"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"Buffer.dispatch on rank {buffer.rank}: .*{word}"):
            buffer.dispatch(**dict(routing, x=inputs.random) | wrong)
    rows, _, _, _, handle, _ = buffer.dispatch(inputs.random, **routing)
    for arguments, word in (
        ((rows, (1, 2)), "handle is a tuple of 2"), (((rows, rows), handle), "x must be a tensor, not tuple"),
        ((rows, handle, torch.ones((len(rows), 7), device=rows.device)), "have 3 choices"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"Buffer.combine on rank {buffer.rank}: .*{word}"):
            buffer.combine(*arguments)
    for experts in (0, "4", -2):
        with pytest.raises(ValueError, match="num_experts is .* positive multiple of 2"):
            buffer.get_dispatch_layout(inputs.topk_idx, experts)
    with pytest.raises(TypeError, match="low_latency_combine on rank .: handle is a tuple"):
        buffer.low_latency_combine(inputs.random, inputs.topk_idx, inputs.weights, (1, 2, 3, 4, 5))
    with pytest.raises(ValueError, match="scales .*shape|wrong scales"):  # one rank's mistake is an error on all
        *_, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx, EXPERTS)
        q, scales = reference.quantise(inputs.random.cpu())
        scales = scales[:2] if buffer.rank == 0 else scales
        x = tuple(t.to(tsn.device(buffer.group)) for t in (q, scales))
        buffer.dispatch(x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)


def _program(which: str) -> None:
    """A job of three ranks, of which two are a group."""
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    if dist.get_rank():
        tilescale_net.deep_ep.install()
        import deep_ep
        from deep_ep.utils.event import EventHandle, EventOverlap

        assert deep_ep.utils.EventOverlap is EventOverlap and deep_ep.__version__ == "1.2.1"
        here = 2 if os.environ["VIRTUAL_NODES"] == "1" else 1
        assert deep_ep.get_physical_domain_size(group) == (2 // here, here)  # before there is a world
        EventOverlap(EventHandle()).current_stream_wait()
        nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(12, HIDDEN, 2, EXPERTS)
        buffer = deep_ep.Buffer(group, 1 << 20, nbytes, low_latency_mode=True, explicitly_destroy=True)
        assert (buffer.rank, buffer.group_size) == (dist.get_rank() - 1, 2)
        if which == "high throughput":
            deep_ep.Buffer.set_num_sms(8)
            _high_throughput(buffer, group, deep_ep.Buffer.get_dispatch_config(2))
            _refusals(buffer, Inputs(group, 5, 7))
        else:
            buffer.clean_low_latency_buffer(12, HIDDEN, EXPERTS)
            _low_latency(buffer, group)
            _misuse(buffer, group)
            _by_column(group)
            _waiting(buffer, group)
        _destroyed(deep_ep.Buffer, group, which)
        buffer.destroy()
        buffer.destroy()
        with pytest.raises(tsn.TileScaleError, match="not initialised"):
            tsn.world(group)
    dist.barrier()
    dist.destroy_process_group()


def _destroyed(make, group, which: str) -> None:
    """A buffer whose world lives on, because another one uses it, takes no calls, whether it had made any or not."""
    inputs = Inputs(group, 5, 7)
    for called in (False, True):
        buffer = make(group, 1 << 20, low_latency_mode=True)

        def call(buffer=buffer):
            if which == "low latency":
                return buffer.low_latency_dispatch(inputs.random, inputs.topk_idx, 12, EXPERTS, use_fp8=False)[2]
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx, EXPERTS)
            return buffer.dispatch(
                inputs.random, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
                topk_idx=inputs.topk_idx, topk_weights=inputs.weights,
            )[4]  # fmt: skip

        handle = call() if called else None
        buffer.destroy()
        live = buffer._world.heap.live
        with pytest.raises(tsn.TileScaleError, match="this buffer was destroyed"):
            call()
        if handle is not None and which == "high throughput":
            with pytest.raises(tsn.TileScaleError):
                buffer.combine(inputs.random, handle)
        assert buffer._world.heap.live == live


@pytest.mark.parametrize("nodes", [1, nightly(3)])
@variants(1, "which", ["high throughput", "low latency"])
def test_buffer(which, nodes):
    # The heap is too small for most of what comes; it grows, or cannot and others join it.
    env = {
        "TSN_HEAP_SIZE": "2M",
        "TSN_HEAP_LIMIT": "0" if which == "low latency" else "1G",
        "VIRTUAL_NODES": str(nodes),
    }
    ranks.run(3, _program, which, init=False, env=env, timeout=280)


@ranks.on(init=False)
def test_a_call_that_one_rank_rejects():
    """Rank 0 waits for a call to which rank 1 gives wrong arguments, and learns of it by name."""
    dist.init_process_group("gloo")
    buffer = tilescale_net.deep_ep.Buffer(dist.group.WORLD, 1 << 20, low_latency_mode=True)
    x, idx = torch.ones((4, HIDDEN), dtype=torch.bfloat16), torch.tensor([[0, 5, -1]] * 4)
    x, idx = x.to(tsn.device()), idx.to(tsn.device())
    buffer.low_latency_dispatch(x, idx, 12, EXPERTS, use_fp8=False)
    dist.barrier()
    begin = time.monotonic()
    with pytest.raises(tsn.RankMismatch if buffer.rank == 0 else ValueError) as raised:
        buffer.low_latency_dispatch(x if buffer.rank == 0 else x[0], idx, 12, EXPERTS, use_fp8=False)
    assert time.monotonic() - begin < 30, "this rank has waited for its timeout"
    dist.barrier()
    with pytest.raises(tsn.RankMismatch):
        tsn.finalize()
    waits = "rank 1 with Buffer.low_latency_dispatch: rejected"
    assert (waits, "Buffer.low_latency_dispatch on rank 1: x has shape [512]")[buffer.rank] in str(raised.value)


@pytest.mark.parametrize("nodes", [1, nightly(2)])
@ranks.on(init=False)
def test_calls_that_differ(nodes):
    """Rank 1 gives an argument otherwise, or makes another call; all are known before."""
    dist.init_process_group("gloo")
    group, messages, rank = dist.group.WORLD, [], dist.get_rank()
    x, idx = torch.ones((4, HIDDEN), dtype=torch.bfloat16), torch.tensor([[0, 5, -1]] * 4)

    def dispatch(buffer):
        *_, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        buffer.dispatch(x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, num_worst_tokens=16)

    for calls in (
        [lambda b, most=most: b.low_latency_dispatch(x, idx, most, EXPERTS, use_fp8=False) for most in (12, 16)],
        [lambda b, fp8=fp8: b.low_latency_dispatch(x, idx, 12, EXPERTS, use_fp8=fp8) for fp8 in (False, True)],
        [dispatch, lambda b: b.low_latency_dispatch(x, idx, 12, EXPERTS, use_fp8=False)],
    ):
        buffer = tilescale_net.deep_ep.Buffer(group, 1 << 20, low_latency_mode=True)
        x, idx = x.to(tsn.device()), idx.to(tsn.device())
        calls[0](buffer)
        if messages:
            calls[1](buffer)
        dist.barrier()
        begin = time.monotonic()
        with pytest.raises(tsn.RankMismatch) as raised:
            calls[rank](buffer)
        assert time.monotonic() - begin < 30, "this rank has waited for its timeout"
        messages.append(str(raised.value))
        with pytest.raises(tsn.RankMismatch):
            tsn.finalize()
        dist.barrier()
    sizes, dtypes, kinds = messages
    assert "low_latency_dispatch: 6 experts, 12 tokens" in sizes and "6 experts, 16 tokens" in sizes
    assert "bfloat16" in dtypes and "float8_e4m3fn" in dtypes
    assert "dispatch: 6 experts, hidden" in kinds and "low_latency_dispatch: 6 experts" in kinds


class _Communicator:
    """An mpi4py communicator, over a store."""

    def __init__(self, port: int):
        self._store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        self._rank, self._size, self._calls = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 0

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, value) -> list:
        self._calls += 1
        self._store.set(f"{self._calls}/{self._rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._calls}/{r}")) for r in range(self._size)]

    def bcast(self, value, root: int = 0):
        return self.allgather(value)[root]


def _of_communicator(port: int) -> None:
    comm = _Communicator(port)
    buffers = [Buffer(comm=comm, num_nvl_bytes=1 << 20) for _ in range(2)]
    assert not dist.is_initialized() and len(worlds.alive()) == 1
    first = buffers[0]
    assert (first.rank, first.group_size) == (comm.Get_rank(), comm.Get_size())
    x = torch.full((3, HIDDEN), float(first.rank + 1), dtype=torch.bfloat16, device=tsn.device())
    idx = torch.tensor([[0, 1, 5]] * 3, device=x.device)
    _, _, per_expert, in_rank, _ = first.get_dispatch_layout(idx, EXPERTS)
    *_, handle, _ = first.dispatch(x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx)
    rows = first.dispatch(x, handle=handle)[0]
    assert torch.equal(first.combine(rows, handle)[0], 2 * x)
    for buffer in buffers:
        buffer.destroy()
    assert not worlds.alive()


def test_a_communicator():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks.run(2, _of_communicator, store.port, init=False)


def test_where_the_ranks_of_a_communicator_meet(monkeypatch):
    assert groups._meeting_place([]) == this_host.address_towards("127.0.0.1") == "127.0.0.1"
    known = {"two": "10.0.0.5", "three": "127.0.0.1"}

    def towards(host: str) -> str:
        if host not in known:
            raise OSError(host)
        return known[host]

    monkeypatch.setattr(this_host, "address_towards", towards)
    assert groups._meeting_place(["one", "three", "two"]) == "10.0.0.5"
    known[socket.gethostname()] = "10.0.0.7"
    assert groups._meeting_place(["one"]) == "10.0.0.7"
    known[socket.gethostname()] = "127.0.0.1"  # as Debian writes it
    with pytest.raises(tsn.ConfigurationError, match="other hosts \\(one\\).* own name .* stands for loopback"):
        groups._meeting_place(["one"])


def test_size_hints():
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288) > 8 * 128 * 7168 * 2
    assert Config(24, 8, 256).get_nvl_buffer_size_hint(7168 * 2, 8) > 8 * 4096 * 7168 * 2
    assert Config(24, 8, 256).get_rdma_buffer_size_hint(7168 * 2, 8) == 0
    # Nodes of 8 take more than one of all; an odd number of ranks has no nodes of 8.
    needed = AllToAll.heap_bytes(256, 4096, 7168, 32, layout="rank", ranks=32, nodes=4)
    assert Config().get_nvl_buffer_size_hint(7168 * 2, 32) >= needed
    sizes = 256, 128, 7168, 16
    needed = [AllToAll.heap_bytes(*sizes, mode="latency", ranks=32, nodes=n) for n in (1, 4)]
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 32, 256) > 2 * max(needed)
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 11, 11 * 8) > 0
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 4, 8) > 0  # fewer experts than the hint has choices
    for ranks_ in (1, 3, 48, 96):
        assert Buffer.get_dispatch_config(ranks_) == Buffer.get_combine_config(ranks_) == Config(Buffer.num_sms)


@ranks.on(1, TSN_DEVICE="simulator")
def test_low_latency_calls_take_few_kernels():
    """Calls of DeepEP's low-latency test: rows of both dtypes, rounded scales, hooks."""
    with nothing_launched():
        buffer, hidden = tilescale_net.deep_ep.Buffer(), 512
        x, idx = torch.ones((4, hidden), dtype=torch.bfloat16), torch.tensor([[0, 1]] * 4)
        weights = torch.ones((4, 2))
        for hooked, (use_fp8, rounded, ue8m0) in itertools.product(
            (False, True), ((False, False, False), (True, False, False), (True, True, False), (True, True, True))
        ):
            scales = dict(use_fp8=use_fp8, round_scale=rounded, use_ue8m0=ue8m0)
            rows, _, handle, _, hook = buffer.low_latency_dispatch(x, idx, 8, 4, **scales, return_recv_hook=hooked)
            if hooked:
                hook()
            y = torch.zeros((rows[0] if use_fp8 else rows).shape, dtype=torch.bfloat16)
            *_, hook = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=hooked)
            if hooked:
                hook()
        buffer.destroy()
    assert sum(len(factory._kernels) for factory in (dispatch_latency, combine_latency, exchange_weights)) == 5
