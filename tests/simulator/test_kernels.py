"""Code that tilelang generates without tensor cores runs on the CPU, with a GPU's results."""

import time

import pytest
import torch

from tests.kernels.support import assert_close
from tests.simulator import kernels
from tests.simulator.kernels import simulate
from tests.variants import variants
from tilescale_net.compiler.simulator.host_source import Parameter
from tilescale_net.compiler.simulator.kernel import SimulatedFunction
from tilescale_net.runtime import simulator

SEEDS = range(4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rows", [1, 7, 150])
def test_gather_scale_scatter(dtype, rows):
    torch_type = getattr(torch, dtype)
    kernel = simulate(kernels.gather_scale_scatter, 256, dtype)
    x = torch.randn(rows, 256).to(torch_type)
    source, target = torch.randperm(rows).int(), torch.randperm(rows).int()
    weight = torch.randn(rows)
    out = torch.full((rows, 256), float("nan"), dtype=torch_type)
    kernel(x, source, target, weight, out)
    expected = torch.empty_like(out)
    expected[target.long()] = (x[source.long()].float() * weight[:, None]).to(torch_type)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@variants(4, "threads", [32, 128, 256])
def test_reductions(dtype, threads):
    torch_type = getattr(torch, dtype)
    # Small whole numbers: every order of additions gives the same sum, in every type.
    x = torch.randint(-4, 5, (16, 512)).to(torch_type)
    total, high, low, extent = (torch.empty(16, dtype=torch_type) for _ in range(4))
    for seed in SEEDS:
        with simulator.schedule(seed):
            simulate(kernels.row_reductions, 16, 512, threads, dtype)(x, total, high, low, extent)
        assert torch.equal(total.double(), x.double().sum(1))
        assert torch.equal(high, x.max(1).values)
        assert torch.equal(low, x.min(1).values)
        assert torch.equal(extent, x.abs().max(1).values)


def test_reduction_over_random_numbers():
    x = torch.randn(16, 512)
    outs = [torch.empty(16) for _ in range(4)]
    simulate(kernels.row_reductions, 16, 512, 128, "float32")(x, *outs)
    assert_close(outs[0], x.sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("threads", [32, 96])
def test_lanes_exchange_values(threads):
    x = torch.randint(-50, 50, (threads,), dtype=torch.int32)
    out = torch.zeros(8, threads, dtype=torch.int32)
    for seed in SEEDS:
        with simulator.schedule(seed):
            simulate(kernels.lanes, threads)(x, out)
        warps = x.view(-1, 32)
        lane = torch.arange(32)
        assert torch.equal(out[0].view(-1, 32), warps[:, lane ^ 5])
        assert torch.equal(out[1].view(-1, 32), warps[:, torch.where(lane + 3 < 32, lane + 3, lane)])
        assert torch.equal(out[2].view(-1, 32), warps[:, torch.where(lane - 7 >= 0, lane - 7, lane)])
        assert torch.equal(out[3].view(-1, 32), warps[:, 9:10].expand(-1, 32))
        assert torch.equal(out[4].view(-1, 32), warps.sum(1, keepdim=True).int().expand(-1, 32))
        assert torch.equal(out[5].view(-1, 32), warps.max(1, keepdim=True).values.expand(-1, 32))
        assert (out[6] == (x > 0).sum()).all()
        ballots = ((warps > 0).long() << lane).sum(1, keepdim=True)
        assert torch.equal(out[7].view(-1, 32).long() & 0xFFFFFFFF, ballots.expand(-1, 32))


def test_atomics():
    n, bins = 1024, 8
    key = torch.randint(0, bins, (n,), dtype=torch.int32)
    counts = torch.bincount(key, minlength=bins)
    for seed in SEEDS:
        count, wide = torch.zeros(bins, dtype=torch.int32), torch.zeros(bins, dtype=torch.int64)
        weight, edge, pair = torch.zeros(bins), torch.zeros(2, dtype=torch.int32), torch.zeros(2)
        half, brain = torch.zeros(bins, dtype=torch.float16), torch.zeros(bins, dtype=torch.bfloat16)
        place = torch.full((n,), -1, dtype=torch.int32)
        with simulator.schedule(seed):
            simulate(kernels.atomics, n, bins)(
                key, count, weight, half, brain, wide, edge, torch.tensor([1.0, -1.0]), pair, place
            )
        assert torch.equal(count.long(), counts)
        assert torch.equal(wide, counts << 33)
        assert torch.equal(weight, counts * 0.5)
        assert torch.equal(half.long(), counts)
        assert torch.equal(brain.long(), counts.clamp(max=256))  # 257 is no bfloat16
        assert edge.tolist() == [n - 1, 1 - n]
        assert pair.tolist() == [n, -n]
        for b in range(bins):  # every place is drawn once
            assert sorted(place[key == b].tolist()) == list(range(counts[b]))


def test_casts_round_like_torch():
    n = 8192
    x = torch.randn(n) * torch.logspace(-6, 3, n)
    x[:4] = torch.tensor([0.0, -0.0, 448.0, -448.0])
    f8, f5 = torch.float8_e4m3fn, torch.float8_e5m2
    outs = [torch.empty(n, dtype=t) for t in (f8, f5, torch.float16, torch.bfloat16, torch.bfloat16, torch.float16)]
    small = torch.empty(n, dtype=torch.int8)
    simulate(kernels.casts, n)(x, *outs, small)
    e4, e5, half, brain, back4, back5 = outs
    # CUDA's conversions to 8 bits saturate.
    assert torch.equal(e4.view(torch.uint8), x.clamp(-448, 448).to(f8).view(torch.uint8))
    assert torch.equal(e5.view(torch.uint8), x.clamp(-57344, 57344).to(f5).view(torch.uint8))
    assert torch.equal(half, x.half())
    assert torch.equal(brain, x.bfloat16())
    assert torch.equal(back4, e4.bfloat16())
    assert torch.equal(back5, e5.half())
    assert torch.equal(small, x.clamp(-100, 100).to(torch.int8))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pipelined_loop(dtype):
    x = torch.randint(-3, 4, (64, 256)).to(getattr(torch, dtype))
    out = torch.empty(64, 64, dtype=x.dtype)
    for seed in SEEDS:
        with simulator.schedule(seed):
            simulate(kernels.pipelined_sum, 64, 256, dtype)(x, out)
        assert torch.equal(out, x.view(64, 4, 64).sum(1))


def test_prefix_sum():
    x = torch.randint(-9, 9, (200,), dtype=torch.int32)
    out = torch.empty_like(x)
    simulate(kernels.prefix_sum, 200)(x, out)
    assert torch.equal(out, x.cumsum(0).int())


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_dynamic_shapes_strides_and_scalars(rows):
    x = torch.randn(rows, 80)[:, :64]
    out = torch.zeros(rows * 2, 64)
    simulate(kernels.strided, 64)(x, out, (1 << 20) + 1, -0.5)
    assert torch.equal(out, (x * -0.5 + ((1 << 20) + 1)).repeat_interleave(2, 0))


def test_static_shared_memory_belongs_to_a_block():
    x, out = torch.randint(-9, 9, (4, 96)).float(), torch.empty(4, 96)
    for seed in SEEDS:
        with simulator.schedule(seed):
            simulate(kernels.static_shared)(x, out)
        assert (out == 0).all()


def test_empty_grid():
    empty = torch.empty(0, 256)
    none = torch.empty(0, dtype=torch.int32)
    simulate(kernels.gather_scale_scatter, 256, "float32")(empty, none, none, torch.empty(0), torch.empty(0, 256))


def test_a_body_that_does_nothing():
    x = torch.arange(4, dtype=torch.int32)
    simulate(kernels.nothing, 4)(x)
    assert x.tolist() == [0, 1, 2, 3]


def test_big_launch_is_fast():
    x = torch.randn(132, 256)
    source = torch.arange(132, dtype=torch.int32)
    out = torch.empty_like(x)
    kernel = simulate(kernels.gather_scale_scatter, 256, "float32")
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        kernel(x, source, source, torch.ones(132), out)
        times.append(time.perf_counter() - begin)
    assert torch.equal(out, x)
    assert min(times) < 0.05, times


def test_a_scalar_of_two_bytes_where_the_default_device_is_another():
    function = SimulatedFunction.__new__(SimulatedFunction)
    function.name = "kernel"
    torch.set_default_device("meta")
    try:
        raw = function._pack(Parameter("value", "bfloat16_t", False), 1.5)
    finally:
        torch.set_default_device(None)
    assert raw == b"\xc0\x3f".ljust(16, b"\0")
