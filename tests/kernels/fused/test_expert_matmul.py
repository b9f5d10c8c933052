"""Products of experts beside the dispatch and the combine of their rows, against torch: whole numbers, exact in any order."""

import random
from unittest import mock

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.kernels.fused.test_all_gather_matmul import SCALED, SMALL, SMALL_SCALED, powers_of_two, whole_numbers
from tests.kernels.moe import reference
from tests.kernels.moe.support import make_inputs
from tests.kernels.support import assert_same, unsettle
from tests.variants import nightly, variants
from tilescale_net.kernels.fused.expert_matmul import ExpertMatmul, matmul_experts
from tilescale_net.kernels.moe import AllToAll, Tuning
from tilescale_net.kernels.moe.buffers import crosses_once
from tilescale_net.kernels.moe.combine import combine_throughput, sum_combined
from tilescale_net.kernels.moe.config import configure
from tilescale_net.kernels.moe.dispatch import dispatch_throughput
from tilescale_net.kernels.moe.layout import PlanOffsets
from tilescale_net.kernels.moe.routing import plan_routing
from tilescale_net.kernels.moe.throughput import ThroughputMode
from tilescale_net.kernels.moe.tiles import Tiles

# As in docs/expert-products.md, whose kernels are these.
ROWS = SMALL.tile[0]  # of a tile
MOE = dict(num_experts=8, max_tokens=40, hidden=48, top_k=3, tile_rows=ROWS, alignment=ROWS, capacity=8 * ROWS)
TUNING = Tuning(once_per_node=False)
KINDS = ("random", "one expert", "none", "twice")
INNER = 48  # columns, which tiles do not divide; as many as hidden, so that both products are one kernel


def _weights(seed, rank, local):
    """Both matrices of each expert of a rank."""
    shapes = ("up", (local, MOE["hidden"], INNER)), ("down", (local, INNER, MOE["hidden"]))
    return [whole_numbers(shape, torch.bfloat16, seed, name, rank) for name, shape in shapes]


def _everyone(seed, call, config, kind):
    shared = random.Random(f"{seed} {call}")
    most = config.max_tokens
    tokens = [shared.choice((1, shared.randrange(most + 1), most)) for _ in range(tsn.size())]
    everyone = [make_inputs((seed, call, r), config, n, kind) for r, n in enumerate(tokens)]
    for r, one in enumerate(everyone):
        one.x = whole_numbers(one.x.shape, torch.bfloat16, seed, call, r)
    return everyone


def _product(rows, w):
    return (rows.float() @ w.float()).to(torch.bfloat16)


def _check(moe, everyone, matrices, received, h, out, label):
    """Everything against torch: rows, first products, sums."""
    c, rank = moe.config, moe.rank
    choices, outputs = [e.topk_idx for e in everyone], []
    for host in range(c.ranks):
        rows = reference.expert_rows(reference.route(choices, c.num_experts, host), [e.x for e in everyone])
        up, down = matrices[host]
        inner = [_product(r, up[e]) for e, r in enumerate(rows)]
        outputs.append([_product(r, down[e]) for e, r in enumerate(inner)])
        if host == rank:
            assert received.counts.tolist() == [len(r) for r in rows], label
            for e, begin in enumerate(received.offsets.tolist()[:-1]):
                assert_same(received.x[begin : begin + len(rows[e])].cpu(), rows[e], f"{label}: rows of expert {e}")
                assert_same(h[begin : begin + len(rows[e])].cpu(), inner[e], f"{label}: products of expert {e}")
    _check_sums(moe, everyone, outputs, out, label)


def _check_sums(moe, everyone, outputs, out, label):
    c, choices, weights = moe.config, [e.topk_idx for e in everyone], [e.weights for e in everyone]
    expected = reference.combine(
        outputs, choices, weights, c.num_experts, moe.rank, c.combine_dtype, False, None, True, 1
    )
    assert_same(out.cpu(), expected, f"{label}: sums")


def layers(seed, options, transposed, kinds=KINDS, shape=MOE):
    """Dispatch, two products and combine, in one go and one after the other, by turns."""
    moe = AllToAll(**shape, **options)
    pace, device, c = random.Random(f"{seed} {moe.rank}"), moe.device, moe.config
    up = ExpertMatmul(moe, MOE["hidden"], INNER, tiling=SMALL)
    down = ExpertMatmul(moe, INNER, MOE["hidden"], tiling=SMALL)
    matrices = [_weights(seed, r, c.local_experts) for r in range(c.ranks)]
    w_up, w_down = (w.to(device) for w in matrices[moe.rank])
    if transposed:
        w_up, w_down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w_up, w_down))
    for call, kind in enumerate(kinds):
        everyone = _everyone(seed, call, c, kind)
        mine, label = everyone[moe.rank], f"seed {seed}, call {call}, {kind}, rank {moe.rank}"
        choices = mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device)
        unsettle(pace)
        pending = moe.dispatch_send(*choices)
        h = up.arriving(pending, w_up)
        received = moe.dispatch_recv(pending)
        unsettle(pace)
        out = down.combined(h, w_down, received.handle, blocks=2)
        moe.check()
        _check(moe, everyone, matrices, received, h, out, label)
        # The same, one after the other; with the choices of before, and with them.
        received = moe.dispatch(choices[0], handle=received.handle) if call % 2 else moe.dispatch(*choices)
        h = up(received.x, w_up, received.handle)
        out = moe.combine(down(h, w_down, received.handle), received.handle)
        moe.check()
        _check(moe, everyone, matrices, received, h, out, f"{label}, one after the other")
    up.free()
    down.free()
    moe.free()


# Between two ranks of a node: test_all_sms_send_the_rest.
@variants(0, "size, nodes, transposed", [(4, 1, False), nightly(2, 2, True)])
@ranks.on(timeout=300)
def test_equals_torch(size, nodes, transposed, seed):
    layers(seed, dict(tuning=TUNING), transposed)


@ranks.on(timeout=300)
def test_all_sms_send_the_rest(seed):
    """The blocks beside the product send all or nothing, as when they are slow; the kernel that sums finds the rest."""
    pace = random.Random(f"{seed} {tsn.rank()}")

    def receive(mode, pending):
        if pending.sums is None:
            return mode._stream.wait(pending.rest)
        sending, taken = mode._constants["combine"]["tickets"][:, 0], pace.choice((0, 1 << 20))
        sending.fill_(taken)
        mode._stream.wait(pending.rest)
        if taken:
            sending.zero_()
        pending.sums()

    with mock.patch.object(ThroughputMode, "receive", receive):
        layers(seed, dict(tuning=TUNING), False, ("random", "twice", "one expert"))


@pytest.mark.nightly
@ranks.on(timeout=300)
def test_eight_bits(seed):
    """Rows of 8 bits with a scale each; the second product takes the rows that came, too."""
    moe = AllToAll(**MOE, dtype=SCALED, scale_words=1, tuning=TUNING)
    pace, device, c, n = random.Random(f"{seed} {moe.rank}"), moe.device, moe.config, INNER
    up, down = (ExpertMatmul(moe, MOE["hidden"], n, dtype=SCALED, tiling=SMALL_SCALED) for _ in range(2))
    matrices = [_weights(seed, r, c.local_experts) for r in range(c.ranks)]
    w_scales = [powers_of_two(c.local_experts * n, seed, r).view(-1, n).clamp(0.5, 2) for r in range(c.ranks)]
    w_up, w_down = (w.to(device, SCALED).transpose(1, 2).contiguous().transpose(1, 2) for w in matrices[moe.rank])
    mine_scales = w_scales[moe.rank].to(device)
    for call in range(2):
        everyone = _everyone(seed, call, c, "random")
        scales = [powers_of_two(len(e.x), seed, call, r).view(-1, 1) for r, e in enumerate(everyone)]
        mine, label = everyone[moe.rank], f"seed {seed}, call {call}, rank {moe.rank}"
        rows = mine.x.to(device, SCALED), scales[moe.rank].to(device)
        unsettle(pace)
        pending = moe.dispatch_send(rows, mine.topk_idx.to(device), mine.weights.to(device))
        if call == 0:
            with pytest.raises(ValueError, match="w_scales has shape .*scales of 128 elements are not supported"):
                up.arriving(pending, w_up, w_scales=mine_scales[..., None].repeat(1, 1, 2))
            with pytest.raises(
                TypeError, match="w_scales is None; torch.float8_e4m3fn takes a float32 tensor \\[4, 48\\]"
            ):
                up.arriving(pending, w_up)
            with pytest.raises(ValueError, match="w of torch.float8_e4m3fn has strides.*takes? contiguous columns"):
                up.arriving(pending, w_up.contiguous(), w_scales=mine_scales)
        h = up.arriving(pending, w_up, w_scales=mine_scales)
        received = moe.dispatch_recv(pending)
        scale_options = dict(x_scales=received.scales, w_scales=mine_scales)
        out = down.combined(received.x, w_down, received.handle, **scale_options)
        moe.check()
        choices, outputs = [e.topk_idx for e in everyone], []
        for host in range(c.ranks):
            routing = reference.route(choices, c.num_experts, host)
            of_rows = [reference.expert_rows(routing, part) for part in ([e.x for e in everyone], scales)]
            first, second = (
                [
                    (r.float() @ w[e].float() * s * w_scales[host][e]).bfloat16()
                    for e, (r, s) in enumerate(zip(*of_rows))
                ]
                for w in matrices[host]
            )
            outputs.append(second)
            if host == moe.rank:
                for e, begin in enumerate(received.offsets.tolist()[:-1]):
                    assert_same(h[begin : begin + len(first[e])].cpu(), first[e], f"{label}: products of expert {e}")
        _check_sums(moe, everyone, outputs, out, label)
    for thing in (up, down, moe):
        thing.free()


@tsn.jit
def feed(capacity, k, dtype, rows):
    """Puts tiles of `source` to the other PE's `target`, the last first, and says so in its `words`."""
    tiles = capacity // rows

    @T.prim_func
    def main(
        ctx: N.Context(), target: T.Tensor((capacity, k), dtype), source: T.Tensor((capacity, k), dtype),
        words: T.Tensor((tiles + 1,), "uint64"), growth: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            for t in T.serial(tiles):
                row = (tiles - 1 - t) * rows
                N.put_signal_block(
                    target[row, 0], source[row, 0], N.my_pe() ^ 1, words[tiles - 1 - t], T.cast(growth, "uint64"), op="add",
                    count=rows * k, engine="ldst",
                )  # fmt: skip

    return main


def _totals(counts):
    """The plan's totals on a rank of two, by rows of its experts."""
    at = PlanOffsets(2, len(counts))
    totals = torch.zeros(at.words, dtype=torch.int32)
    ends = torch.tensor([-(-n // ROWS) * ROWS for n in counts]).cumsum(0)
    totals[at.counts : at.counts + len(counts)] = torch.tensor(counts)
    totals[at.offsets + 1 : at.offsets + 1 + len(counts)] = ends
    return totals


def fed(seed, k=MOE["hidden"], tiling=SMALL, workers=3):
    """A product waits for tiles that come from another rank while it runs: the simulator runs no two kernels of a rank at
    once, so that one beside a dispatch of its own rank never waits there."""
    counts, n = [33, 0, 70, 5], INNER
    totals, capacity, device = _totals(counts), MOE["capacity"], tsn.device()
    pace, at = random.Random(f"{seed} {tsn.rank()}"), PlanOffsets(2, len(counts))
    target, words = tsn.zeros((capacity, k), torch.bfloat16), tsn.zeros((capacity // ROWS + 1,), torch.uint64)
    source = tsn.zeros((capacity, k), torch.bfloat16)
    w = whole_numbers((len(counts), k, n), torch.bfloat16, seed).to(device)
    sizes = 2, len(counts), capacity, n, k, "bfloat16", "bfloat16"
    kernel = matmul_experts(*sizes, **vars(tiling), workers=workers, waits=True)
    calls, tickets = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    for call in range(1, 4):
        source.copy_(whole_numbers((capacity, k), torch.bfloat16, seed, call, tsn.rank()))
        unsettle(pace)
        feed(capacity, k, "bfloat16", ROWS)(target, source, words, ROWS)
        calls.add_(1)
        out = torch.zeros((1, capacity, n), dtype=torch.bfloat16, device=device)
        none = words.view(1, -1)
        kernel(out, target, w, totals.to(device), calls, tickets, calls, none, none)
        tsn.synchronize()
        theirs = whole_numbers((capacity, k), torch.bfloat16, seed, call, tsn.rank() ^ 1)
        for e, count in enumerate(counts):
            begin = int(totals[at.offsets + e])
            wanted = _product(theirs[begin : begin + count], w[e].cpu())
            assert_same(out[0, begin : begin + count].cpu(), wanted, f"seed {seed}, call {call}, expert {e}")
        tsn.barrier()
    for tensor in (target, words, source):
        tsn.free(tensor)


@ranks.on(TSN_SIM_VISIBILITY="late", timeout=200)
def test_a_product_waits_for_tiles(seed):
    fed(seed)


def fed_combine(seed):
    """A combine waits for tiles that come from another rank while it runs, see `fed`."""
    moe = AllToAll(**MOE, tuning=TUNING)
    c, device, rank = moe.config, moe.device, moe.rank
    y, source = (tsn.zeros((c.capacity, c.hidden), torch.bfloat16) for _ in range(2))
    words, pace = tsn.zeros((c.tiles + 1,), torch.uint64), random.Random(f"{seed} {rank}")
    tiles = Tiles(ROWS, words, torch.zeros(1, dtype=torch.int64, device=device), 5, moe.blocks)
    for call in range(3):
        everyone = _everyone(seed, call, c, "random")
        mine, choices = everyone[rank], [e.topk_idx for e in everyone]
        received = moe.dispatch(mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device))
        products = [whole_numbers(y.shape, torch.bfloat16, seed, call, r) for r in range(c.ranks)]
        source.copy_(products[rank ^ 1])
        unsettle(pace)
        feed(c.capacity, c.hidden, "bfloat16", ROWS)(y, source, words, 5)
        tiles.next_call()
        pending = moe.combine_send(y, received.handle, tiles=tiles, blocks=2)
        if device.type == "cuda":  # the second half sends the rest, when the current stream has finished the tiles
            torch.cuda.current_stream().synchronize()
            tsn.barrier()
        out = moe.combine_recv(pending)
        moe.check()
        outputs = []
        for host in range(c.ranks):
            counts = [len(rows) for rows in reference.route(choices, c.num_experts, host).order]
            begins = [sum(-(-n // ROWS) * ROWS for n in counts[:e]) for e in range(len(counts))]
            outputs.append([products[host][begin : begin + n] for begin, n in zip(begins, counts)])
        _check_sums(moe, everyone, outputs, out, f"seed {seed}, call {call}, rank {rank}")
        tsn.barrier()
    for tensor in (y, source, words):
        tsn.free(tensor)
    moe.free()


@ranks.on(TSN_SIM_VISIBILITY="late", timeout=200)
def test_a_combine_waits_for_tiles(seed):
    fed_combine(seed)


def _refused_when_made(moe, plain):
    with pytest.raises(ValueError, match=f"tile_rows is {ROWS}; alignment, 16, must be a multiple of it"):
        AllToAll(**(MOE | dict(alignment=16)))
    with pytest.raises(
        ValueError, match=f'tile_rows is {ROWS}; tiles are counted in throughput mode with layout "expert"'
    ):
        AllToAll(**MOE, layout="rank")
    with pytest.raises(ValueError, match="tile_rows is 0; it must be a positive integer"):
        AllToAll(**(MOE | dict(tile_rows=0)))
    with pytest.raises(TypeError, match="moe is None; it must be an AllToAll"):
        ExpertMatmul(None, 48, 40, tiling=SMALL)
    with pytest.raises(ValueError, match="an AllToAll with tile_rows None do not go together"):
        ExpertMatmul(plain, 48, 40, tiling=SMALL)
    with pytest.raises(TypeError, match="dtype torch.float32 is not one of"):
        ExpertMatmul(moe, 48, 40, dtype=torch.float32, tiling=SMALL)


def _refused_calls(moe, plain, up, choices, w):
    """Errors of this rank alone: nothing is sent, or all data sent are received."""
    narrow = ExpertMatmul(moe, 48, 40, tiling=SMALL)
    pending = plain.dispatch_send(*choices)
    with pytest.raises(ValueError, match="the object was made without tile_rows"):
        plain.alongside(pending)
    with pytest.raises(ValueError, match="alongside: this phase is not in flight"):
        up.arriving(pending, w)
    plain.dispatch_recv(pending)

    pending = moe.dispatch_send(*choices)
    with pytest.raises(ValueError, match="w has shape \\[4, 48, 48\\]; it must be \\[4, 48, 40\\]"):
        narrow.arriving(pending, w)
    with pytest.raises(TypeError, match="pending is None; it must be the result of dispatch_send"):
        up.arriving(None, w)
    h = up.arriving(pending, w)
    received = moe.dispatch_recv(pending)
    with pytest.raises(ValueError, match="alongside: this phase is not in flight"):
        up.arriving(pending, w)
    with pytest.raises(ValueError, match="products have 40 columns of torch.bfloat16; the AllToAll combines rows of"):
        narrow.combined(received.x, w, received.handle)
    with pytest.raises(TypeError, match="tiles must be Tiles, not int"):
        moe.combine_send(h, received.handle, tiles=3)
    text = f"tiles are 8 of 16 rows, begun by 4 blocks; those of this object are 8 of {ROWS} rows"
    with pytest.raises(ValueError, match=text):
        moe.combine_send(h, received.handle, tiles=Tiles(16, up._finished.words, up._finished.calls, 1, 4))
    with pytest.raises(TypeError, match="handle must be the handle of a dispatch, not NoneType"):
        up(received.x, w, None)
    narrow.free()


def _misuse():
    moe = AllToAll(**MOE, tuning=TUNING)
    plain = AllToAll(**(MOE | dict(tile_rows=None)), tuning=TUNING)
    _refused_when_made(moe, plain)
    up, down = (ExpertMatmul(moe, 48, INNER, tiling=SMALL) for _ in range(2))
    seed, device = 11, moe.device
    matrices = [_weights(seed, r, 4) for r in range(2)]
    w_up, w_down = (w.to(device) for w in matrices[moe.rank])
    everyone = _everyone(seed, 0, moe.config, "random")
    mine = everyone[moe.rank]
    choices = mine.x.to(device), mine.topk_idx.to(device), mine.weights.to(device)
    _refused_calls(moe, plain, up, choices, w_up)

    def everything_works(label):
        pending = moe.dispatch_send(*choices)
        h = up.arriving(pending, w_up)
        received = moe.dispatch_recv(pending)
        _check(moe, everyone, matrices, received, h, down.combined(h, w_down, received.handle), label)
        return h, received

    for compile_one in (*up.kernels(w_up), *down.kernels(w_down), *moe.kernels_of_tiles()):
        compile_one()
    factories = matmul_experts, plan_routing, dispatch_throughput, combine_throughput, sum_combined
    made = [set(factory._kernels) for factory in factories]
    with mock.patch.object(Tiles, "await_start", autospec=True) as starts:
        h, received = everything_works("after misuse")
        assert not starts.called, "the first launch of a combine's kernel waits for running kernels to end"
        everything_works("a combine that begins late")
        assert starts.call_count == 1
    assert [set(factory._kernels) for factory in factories] == made, "a call compiles what was not listed"
    # Mistakes of one rank are errors of all, and later calls work.
    with pytest.raises(TypeError if moe.rank else ValueError, match="x"):
        if moe.rank:
            moe.dispatch_send(choices[0].float(), *choices[1:])
        else:
            pending = moe.dispatch_send(*choices)
            up.arriving(pending, w_up)
            moe.dispatch_recv(pending)
            moe.check()
    everything_works("after a dispatch with a wrong x")
    with pytest.raises(ValueError, match="out"):
        down.combined(h, w_down, received.handle, **(dict(out=h[:3]) if moe.rank else {}))
        moe.check()
    everything_works("after a combine with a wrong out")
    if ROWS == 32:  # of tiles of 128 rows, which GPUs take, as many as there are experts hold any 80 tokens
        crowded = torch.arange(3, device=device).expand(40, 3).contiguous()
        with pytest.raises(tsn.HeapError, match="capacity is 256"):
            x = torch.ones((40, 48), dtype=torch.bfloat16, device=device)
            pending = moe.dispatch_send(x, crowded)
            up.arriving(pending, w_up)
            moe.dispatch_recv(pending)
            moe.check()
        everything_works("after a dispatch that had no room")
    for thing in (up, down, moe, plain):
        thing.free()


def test_misuse():
    ranks.run(2, _misuse, timeout=300)
    config = configure(4, **MOE)
    with pytest.raises(
        ValueError, match="rows that cross the network once per node are not counted by tiles: give tuning"
    ):
        crosses_once(config, Tuning(), 2)
    assert not crosses_once(config, Tuning(once_per_node=False), 2)
