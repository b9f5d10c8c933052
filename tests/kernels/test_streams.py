"""Calls of one object on several CUDA streams run one after the other."""

import contextlib
import functools
import itertools

import pytest
import torch

import tilescale_net as tsn
import tilescale_net.runtime.settings as settings
from tests import ranks
from tests.kernels.fused.test_all_gather_matmul import SMALL
from tests.kernels.moe.support import without_kernels
from tests.kernels.support import assert_same, nothing_launched, random_tensor
from tests.kernels.test_reduce_scatter import reference, values
from tilescale_net import ops
from tilescale_net.kernels import moe
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.all_reduce import AllReduce
from tilescale_net.kernels.all_reduce_norm import AllReduceNorm
from tilescale_net.kernels.all_to_all import AllToAll
from tilescale_net.kernels.all_to_all_transposed import AllToAllTransposed
from tilescale_net.kernels.attention_merge import AttentionMerge
from tilescale_net.kernels.broadcast import Broadcast
from tilescale_net.kernels.collective import Collective
from tilescale_net.kernels.fused import gemm, scaled_gemm
from tilescale_net.kernels.fused.all_gather_matmul import AllGatherMatmul, PipelinedAllGatherMatmul
from tilescale_net.kernels.fused.expert_matmul import ExpertMatmul, ScaledExpertMatmul
from tilescale_net.kernels.fused.matmul_all_reduce import MatmulAllReduce
from tilescale_net.kernels.fused.matmul_reduce_scatter import MatmulReduceScatter
from tilescale_net.kernels.reduce_scatter import ReduceScatter
from tilescale_net.kernels.send_recv import SendRecv
from tilescale_net.ops import group_objects
from tilescale_net.runtime.launch_args import StreamOrder

BASES = {"Exchange", "Parted", *(c.__name__ for c in (gemm.DistributedMatmul, gemm.FusedMatmul, gemm.PreparedMatmul))}


def _classes(base: type) -> set[type]:
    return {c for sub in base.__subclasses__() for c in {sub, *_classes(sub)}}


def _calls_with_data() -> dict[type, list]:
    """Every call of every class, between two ranks."""
    me, dtype = tsn.rank(), torch.float16
    few = dict(threads=64, blocks=2)
    shared, row, rows = tsn.zeros((2, 64)), torch.zeros(64), torch.zeros((2, 64))
    heads, sequence, weight = tsn.zeros((2, 4, 1, 8)), torch.zeros((2, 2, 2, 8)), torch.ones(64, dtype=dtype)
    how, rows_k_n = dict(dtype=dtype, tiling=SMALL, threads=64, blocks=2), (SMALL.tile[0], SMALL.tile[2], SMALL.tile[1])
    x, w, wide = (torch.zeros(s, dtype=dtype) for s in (rows_k_n[:2], rows_k_n[1:], (2 * rows_k_n[0], rows_k_n[1])))
    gather, exchange, scatter, reduce = AllGather(**few), AllToAll(**few), ReduceScatter(**few), AllReduce(**few)
    transpose, spread, norm = AllToAllTransposed(**few), Broadcast(**few), AllReduceNorm(64, **few)
    neighbour, merge = SendRecv(**few, chunk=1024), AttentionMerge(**few)
    products = [
        AllGatherMatmul(*rows_k_n, **how),
        PipelinedAllGatherMatmul(*rows_k_n, dtype=dtype, threads=64),
        MatmulReduceScatter(*rows_k_n, **how),
        MatmulAllReduce(2 * rows_k_n[0], *rows_k_n[1:], **how),
    ]
    layer = moe.AllToAll(4, 4, 64, 2, tile_rows=SMALL.tile[0], alignment=SMALL.tile[0])
    experts = ExpertMatmul(layer, 64, 64, tiling=SMALL)
    tokens, choices = torch.zeros((4, 64), dtype=torch.bfloat16), torch.zeros((4, 2), dtype=torch.int64)
    matrices = torch.zeros((2, 64, 64), dtype=torch.bfloat16)
    received = layer.dispatch(tokens, choices)
    y, handle, pending = received.x, received.handle, []
    fp8, tile_rows = torch.float8_e4m3fn, 128 if ranks.gpus() else 32
    layer_fp8 = moe.AllToAll(4, 4, 512, 2, fp8, tile_rows=tile_rows, alignment=tile_rows)
    tiling = scaled_gemm.ScaledTiling() if ranks.gpus() else scaled_gemm.SIMULATED
    scaled_experts = ScaledExpertMatmul(layer_fp8, 512, 64, tiling=tiling)
    received_fp8 = layer_fp8.dispatch((torch.zeros((4, 512), dtype=fp8), torch.zeros((4, 4))), choices)
    scales = dict(x_scales=received_fp8.scales, w_scales=torch.zeros((2, 1, 4)))
    return {
        AllGather: [lambda: gather(shared, row)],
        AllToAll: [lambda: exchange(shared, rows), lambda: exchange(shared, rows, [1, 1], [1, 1])],
        ReduceScatter: [lambda: scatter(row, rows)],
        AllReduce: [lambda: reduce(rows, torch.zeros((2, 64)))],
        AllToAllTransposed: [lambda: transpose(heads, sequence, cut=2, join=1)],
        Broadcast: [lambda: spread(shared)],
        AllReduceNorm: [lambda: norm(torch.zeros_like(weight[None]), torch.zeros_like(weight[None]), weight)],
        AttentionMerge: [
            lambda: merge(torch.zeros((1, 1, 8)), torch.zeros((1, 1)), torch.zeros((1, 2, 8)), torch.zeros((1, 2)))
        ],
        SendRecv: [lambda: neighbour.send(row, 1 - me), lambda: neighbour.recv(row, 1 - me)],
        AllGatherMatmul: [lambda: products[0](x, w)],
        PipelinedAllGatherMatmul: [lambda: products[1](x, w)],
        MatmulReduceScatter: [lambda: products[2](wide, w)],
        MatmulAllReduce: [lambda: products[3](wide, w)],
        ExpertMatmul: [lambda: experts(y, matrices, handle)],
        ScaledExpertMatmul: [
            lambda: scaled_experts(
                received_fp8.x, torch.zeros((2, 64, 512), dtype=fp8).mT, received_fp8.handle, **scales
            )
        ],
        moe.AllToAll: [
            lambda: layer.dispatch(tokens, choices),
            lambda: pending.append(layer.dispatch_send(tokens, choices)),
            lambda: layer.dispatch_recv(pending[-1]),
            lambda: layer.combine(y, handle),
            lambda: layer.combine_values(y, torch.zeros(y.shape[0]), handle),
            lambda: pending.append(layer.combine_send(y, handle)),
            lambda: layer.combine_recv(pending[-1]),
        ],
    }


@contextlib.contextmanager
def _noted():
    """A list of what has followed earlier calls inside."""
    follow, followed = StreamOrder.follow, []
    StreamOrder.follow = lambda order: followed.append(order) or follow(order)
    try:
        yield followed
    finally:
        StreamOrder.follow = follow


@ranks.on(heap="64M")
@without_kernels()  # the order of calls is the host's
@nothing_launched()
def test_every_call_is_ordered():
    torch.set_default_device(tsn.device())
    calls = _calls_with_data()
    known = {c for c in _classes(Collective) if c.__module__.startswith("tilescale_net.")}
    assert {c for c in known if c.__name__ not in BASES} == set(calls)
    x, w = torch.zeros((16, 16), dtype=torch.float16), torch.zeros((16, 16), dtype=torch.float16)
    operators = [
        functools.partial(op, x) for op in (ops.all_gather, ops.reduce_scatter, ops.all_reduce, ops.all_to_all)
    ]
    for op in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        operators.append(functools.partial(op, x, w, fused=False))
    for operator in operators:
        operator()  # makes the objects
    for i, call in enumerate([*itertools.chain(*calls.values()), *operators]):
        with _noted() as followed:
            call()
        assert group_objects.of("").order in followed if call in operators else followed, i


@ranks.on()
def test_messages_of_two_directions():
    """Messages to a rank and from it do not wait for each other: two ranks may exchange large ones on two streams."""
    messages, x, other = SendRecv(threads=64, blocks=2, chunk=1024), torch.zeros(8, device=tsn.device()), 1 - tsn.rank()
    with _noted() as followed:
        for _ in range(2):
            messages.send(x, other)
            messages.recv(x, other)
    assert len(followed) == 4 and followed[:2] == followed[2:] and followed[0] is not followed[1]


@pytest.mark.gpu
@pytest.mark.skipif(
    settings.device_kind() != "cuda" or torch.cuda.device_count() < 2, reason="needs two GPUs; streams are CUDA's"
)
@ranks.on(heap="512M")
def test_two_streams():
    rank, n, device, count, turns = tsn.rank(), tsn.size(), tsn.device(), 100_000, 12
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    outs = [tsn.empty((n, count)) for _ in range(turns)]
    tsn.barrier()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(200_000_000)  # the constructors' writes wait for it
        gather, scatter, reduce = AllGather(blocks=8), ReduceScatter(blocks=8), AllReduce(blocks=8)
        layer = moe.AllToAll(8, 64, 1024, 4)
    xs = [random_tensor((count,), torch.float32, turn, rank, "x").to(device) for turn in range(turns)]
    parts = [values((n, count), torch.float32, turn, rank, "parts").to(device) for turn in range(turns)]
    tokens = torch.randn((64, 1024), generator=torch.Generator().manual_seed(rank)).to(device, torch.bfloat16)
    choices = torch.stack(
        [torch.randperm(8, generator=torch.Generator().manual_seed(64 * rank + t))[:4] for t in range(64)]
    )
    choices, found = choices.to(device), []
    torch.cuda.synchronize()
    for turn in range(turns):
        with torch.cuda.stream(streams[(turn + 1) % 2]):
            torch.cuda._sleep(3_000_000 if turn % 3 else 100)
            gather(outs[turn], xs[turn])
            part, whole = torch.empty(count, device=device), torch.empty((n, count), device=device)
            scatter(part, parts[turn])
            reduce(whole, parts[turn])
            received = layer.dispatch(tokens, choices)
        with torch.cuda.stream(streams[turn % 2]):
            summed = layer.combine(received.x, received.handle)
            found.append((part, whole, summed, ops.all_gather(xs[turn]), ops.all_reduce(parts[turn])))
    tsn.synchronize()
    for turn, (part, whole, summed, gathered, reduced) in enumerate(found):
        everyone = torch.stack([random_tensor((count,), torch.float32, turn, p, "x") for p in range(n)])
        sent = [values((n, count), torch.float32, turn, p, "parts") for p in range(n)]
        assert_same(outs[turn].cpu(), everyone)
        assert_same(gathered.cpu().view(n, count), everyone)
        assert_same(part.cpu(), reference([s[rank] for s in sent]))
        assert_same(whole.cpu(), reference(sent))
        assert_same(reduced.cpu(), reference(sent))
        assert_same(summed.cpu(), found[0][2].cpu())
    tsn.barrier()
