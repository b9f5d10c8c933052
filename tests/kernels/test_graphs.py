"""Collectives captured in a CUDA graph and replayed: no argument of a call depends on how often it was made."""

import pytest
import torch

import tilescale_net as tsn
import tilescale_net.runtime.settings as settings
from tests import ranks
from tests.kernels.support import assert_same, random_tensor
from tests.kernels.test_all_reduce import reference_of
from tests.kernels.test_reduce_scatter import reference, values
from tilescale_net import ops
from tilescale_net.kernels.all_gather import AllGather
from tilescale_net.kernels.all_reduce import ALGORITHMS, AllReduce
from tilescale_net.kernels.all_reduce_norm import AllReduceNorm
from tilescale_net.kernels.all_to_all import AllToAll
from tilescale_net.kernels.all_to_all_transposed import AllToAllTransposed
from tilescale_net.kernels.attention_merge import AttentionMerge
from tilescale_net.kernels.broadcast import Broadcast
from tilescale_net.kernels.fused.all_gather_matmul import PipelinedAllGatherMatmul
from tilescale_net.kernels.reduce_scatter import ReduceScatter
from tilescale_net.kernels.send_recv import SendRecv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        settings.device_kind() != "cuda" or torch.cuda.device_count() < 2, reason="needs two GPUs; graphs are CUDA's"
    ),
]
COUNT = 50_000


@ranks.on(heap="384M")
def test_replay():
    rank, n, device = tsn.rank(), tsn.size(), tsn.device()
    gather, exchange, reduce = AllGather(blocks=8), AllToAll(blocks=8), ReduceScatter(blocks=8)
    reductions = [AllReduce(algorithm=algorithm, blocks=8) for algorithm in ALGORITHMS]
    x, gathered = tsn.empty(COUNT), tsn.empty((n, COUNT))
    parts, exchanged = tsn.empty((n, COUNT)), tsn.empty((n, COUNT))
    rows, uneven = tsn.empty((n * 8, 100)), tsn.empty((n * 8, 100))
    everywhere = [torch.empty((n, COUNT), device=device) for _ in reductions]
    summed = torch.empty(COUNT, device=device)
    splits = torch.zeros((2, n), dtype=torch.int64, device=device)

    def calls():
        gather(gathered, x)
        exchange(exchanged, parts)
        exchange(uneven, rows, splits[0], splits[1])
        reduce(summed, parts)
        for all_reduce, total in zip(reductions, everywhere):
            all_reduce(total, parts)

    def fill(turn):
        x.copy_(random_tensor((COUNT,), torch.float32, turn, rank, "x"))
        parts.copy_(values((n, COUNT), torch.float32, turn, rank, "parts"))
        rows.copy_(random_tensor(rows.shape, torch.float32, turn, rank, "rows"))
        # Two PEs exchange 8 + turn % 8 rows, all others 8; changing splits need no new capture.
        table = torch.full((n, n), 8)
        table[0, 1] = table[1, 0] = 8 - turn % 8
        table[0, 0] = table[1, 1] = 8 + turn % 8
        splits.copy_(torch.stack([table[:, rank], table[rank]]))
        return table

    fill(0)
    calls()
    tsn.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        calls()
    for turn in range(1, 30):
        table = fill(turn)
        graph.replay()
        torch.cuda.synchronize()
        exchange.check()
        sent = [values((n, COUNT), torch.float32, turn, p, "parts") for p in range(n)]
        assert_same(
            gathered.cpu(), torch.stack([random_tensor((COUNT,), torch.float32, turn, p, "x") for p in range(n)])
        )
        assert_same(exchanged.cpu(), torch.stack([s[rank] for s in sent]))
        assert_same(summed.cpu(), reference([s[rank] for s in sent]))
        for name, total in zip(ALGORITHMS, everywhere):
            assert_same(total.cpu(), reference_of(name, sent), name)
        moved = [
            random_tensor(rows.shape, torch.float32, turn, p, "rows").split(table[p].tolist())[rank] for p in range(n)
        ]
        assert_same(uneven.cpu(), torch.cat(moved))
        gather(gathered, x)  # direct calls and replays may alternate
    tsn.barrier()


@ranks.on(heap="512M", timeout=400)
def test_replay_of_operators():
    """The other collectives and the fused products, against the same calls outside of the graph."""
    rank, n, device = tsn.rank(), tsn.size(), tsn.device()
    spread, norm, transpose, neighbour = Broadcast(), AllReduceNorm(512), AllToAllTransposed(), SendRecv()
    by_engines, merge = PipelinedAllGatherMatmul(128, 256, 512), AttentionMerge()
    shared, heads = tsn.empty((n, 1000)), tsn.empty((2, 2 * n, 4, 8), torch.bfloat16)
    sequence = torch.empty((2, 2, 4 * n, 8), dtype=torch.bfloat16, device=device)
    hidden, weight, got = (torch.empty(s, dtype=torch.bfloat16, device=device) for s in ((6, 512), 512, (3, 70)))
    x, w, rows = (torch.empty(s, dtype=torch.bfloat16, device=device) for s in ((128, 256), (256, 512), (128 * n, 256)))
    partial = torch.empty((5, 2 * n, 64), dtype=torch.bfloat16, device=device)
    lse = torch.empty((5, 2 * n), device=device)
    everything = [shared, sequence, hidden, weight, got, x, w, rows, partial, lse]

    def calls():
        spread(shared, root=n - 1)
        normed = norm(torch.empty_like(hidden), hidden, weight, residual=hidden.clone())
        transpose(heads, sequence, cut=2, join=1)
        back = torch.empty_like(got)
        if rank == 0:
            neighbour.send(got, 1)
            neighbour.recv(back, 1)
        elif rank == 1:
            neighbour.recv(back, 0)
            neighbour.send(got, 0)
        products = [by_engines(x, w)]
        for fused in (True, False):
            products.append(ops.all_gather_matmul(x, w, fused=fused))
            products += [op(rows, w, fused=fused) for op in (ops.matmul_reduce_scatter, ops.matmul_all_reduce)]
        return [
            shared,
            normed,
            heads,
            back,
            *merge(torch.empty_like(partial[:, :2]), torch.empty_like(lse[:, :2]), partial, lse),
            *ops.merge_attention(partial, lse, all_heads=True),
            *products,
            ops.all_reduce(rows),
            ops.reduce_scatter(rows),
            ops.all_gather(x),
        ]

    def fill(turn):
        numbers = torch.Generator().manual_seed(100 * turn + rank)
        for tensor in everything:
            tensor.copy_(torch.randn(tensor.shape, generator=numbers) / 16)

    fill(0)
    calls()
    tsn.synchronize()
    tsn.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = calls()
    for turn in range(1, 12):
        fill(turn)
        graph.replay()
        tsn.synchronize()
        replayed = [t.clone() for t in captured]
        tsn.barrier()
        fill(turn)
        for i, (once, again) in enumerate(zip(calls(), replayed)):
            assert torch.equal(once, again), (turn, i)
        tsn.synchronize()
        tsn.barrier()
