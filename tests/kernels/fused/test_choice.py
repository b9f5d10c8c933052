"""Which shapes are expected to be faster fused, and what the fused kernels do not take."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import tilescale_net as tsn
from tilescale_net.kernels.fused import choice
from tilescale_net.kernels.fused.choice import (
    GEOMETRIES,
    GemmProblem,
    best_tiling,
    blocks_for,
    expected_pipelined_us,
    expected_us,
    fits,
    is_fused_faster,
    is_pipelined,
    of_dtype,
    prefers_fused,
    senders,
)
from tilescale_net.kernels.fused.gemm import DEFAULT, SCALED, FusedMatmul, Tiling, check_tensor_cores
from tilescale_net.kernels.fused.matmul_reduce_scatter import check_ring

KINDS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def _product(kind: str, ranks: int, m: int, k: int, n: int) -> GemmProblem:
    return GemmProblem(kind, ranks, m // ranks if kind == "all_gather_matmul" else m, k, n, torch.bfloat16)


NEVER = 1 << 15


# Layers of a model on as many GPUs: rows of all ranks, and where the fused call begins to pay.
@pytest.mark.parametrize(
    "dtype, kind, k, n, first",
    [
        (torch.bfloat16, "all_gather_matmul", 8192, 14336, {2: 1024, 4: 512, 8: 1024}),
        (torch.bfloat16, "matmul_reduce_scatter", 7168, 8192, {2: 1024, 4: 2048, 8: 2048}),
        (torch.bfloat16, "matmul_all_reduce", 7168, 8192, {2: 2048, 4: 4096, 8: 8192}),
        (SCALED, "all_gather_matmul", 8192, 14336, {2: NEVER, 4: NEVER, 8: NEVER}),
        (SCALED, "matmul_reduce_scatter", 7168, 8192, {2: 2048, 4: 4096, 8: 4096}),
        (SCALED, "matmul_all_reduce", 7168, 8192, {2: 16384, 4: 4096, 8: 8192}),
    ],
)
def test_small_products_run_one_after_the_other(dtype, kind, k, n, first):
    for ranks, start in first.items():
        for m in (256, 512, 1024, 2048, 4096, 8192, 16384):
            product = dataclasses.replace(_product(kind, ranks, m, k, n), dtype=dtype)
            assert is_fused_faster(product) == (m >= start), (ranks, m, *expected_us(product))


# us between two H100s, sides by turns in one run: docs/results/products.md.
@pytest.mark.parametrize(
    "kind, k, n, m, measured, dtype",
    [
        ("all_gather_matmul", 8192, 14336, 1024, 359, torch.bfloat16),
        ("all_gather_matmul", 8192, 14336, 8192, 2727, torch.bfloat16),
        ("matmul_reduce_scatter", 7168, 8192, 1024, 168, torch.bfloat16),
        ("matmul_reduce_scatter", 7168, 8192, 2048, 397, torch.bfloat16),
        ("matmul_reduce_scatter", 7168, 8192, 4096, 719, torch.bfloat16),
        ("matmul_reduce_scatter", 7168, 8192, 16384, 2809, torch.bfloat16),
        ("matmul_all_reduce", 7168, 8192, 2048, 407, torch.bfloat16),
        ("matmul_all_reduce", 7168, 8192, 4096, 775, torch.bfloat16),
        ("matmul_all_reduce", 7168, 8192, 16384, 3092, torch.bfloat16),
        ("all_gather_matmul", 8192, 14336, 2048, 370, SCALED),
        ("all_gather_matmul", 8192, 14336, 16384, 3087, SCALED),
        ("matmul_reduce_scatter", 7168, 8192, 1024, 126, SCALED),
        ("matmul_reduce_scatter", 7168, 8192, 2048, 199, SCALED),
        ("matmul_all_reduce", 7168, 8192, 1024, 169, SCALED),
        ("matmul_all_reduce", 7168, 8192, 4096, 608, SCALED),
    ],
)
def test_the_model_agrees_with_two_gpus(kind, k, n, m, measured, dtype):
    product = dataclasses.replace(_product(kind, 2, m, k, n), dtype=dtype)
    assert expected_us(product)[0] == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    "m, measured", [(512, 103), (1024, 194), (2048, 367), (4096, 749), (8192, 1495), (16384, 2959)]
)
def test_the_model_of_pipelined_products_agrees_with_two_gpus(m, measured):
    product = dataclasses.replace(_product("all_gather_matmul", 2, m, 8192, 14336), dtype=SCALED)
    assert expected_pipelined_us(product) == pytest.approx(measured, rel=0.04)


def test_pipelined_where_it_was_measured(monkeypatch):
    """Copies that cuBLAS hides leave its own time; few rows fill SMs badly, and more ranks have fewer each."""
    gpu, eight = torch.device("cuda", 0), dict(dtype=SCALED)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    large = dataclasses.replace(_product("all_gather_matmul", 2, 8192, 8192, 14336), **eight)
    alone = dataclasses.replace(large, ranks=1, rows=8192)
    assert 1 < expected_pipelined_us(large) / expected_pipelined_us(alone) < 1.02
    assert expected_pipelined_us(large) < min(expected_us(large))
    few = _product("all_gather_matmul", 4, 1024, 8192, 14336)
    assert expected_pipelined_us(few) > expected_us(few)[0]
    # The rows of seven peers take longer than the product of the own ones: 64 columns are soon computed.
    narrow = _product("all_gather_matmul", 8, 8192, 8192, 64)
    assert expected_pipelined_us(narrow) > 7 * 1024 * 8192 * 2 / choice.COPY_ENGINE
    assert is_pipelined(large, gpu) and not is_pipelined(dataclasses.replace(large, ranks=4), gpu)
    # What the host takes longer to launch than the GPU to compute.
    assert is_pipelined(dataclasses.replace(large, rows=256), gpu)
    assert not is_pipelined(dataclasses.replace(large, rows=128), gpu)
    monkeypatch.setattr(choice, "MEASURED_PIPELINED", {(2, SCALED), (4, torch.bfloat16)})
    assert is_pipelined(large, gpu) and not is_pipelined(few, gpu)
    assert not is_pipelined(large, gpu, is_mapped=False) and not is_pipelined(large, torch.device("cpu"))
    assert not is_pipelined(dataclasses.replace(large, kind="matmul_all_reduce"), gpu)


def test_calls_between_nodes_are_not_fused_by_themselves(monkeypatch):
    """Only GPUs that map one another's memory have been measured."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    gpu, product = torch.device("cuda", 0), _product("matmul_reduce_scatter", 2, 8192, 7168, 8192)
    assert prefers_fused(product, gpu) and not prefers_fused(product, gpu, is_mapped=False)
    assert not prefers_fused(dataclasses.replace(product, kind="matmul_all_reduce", dtype=SCALED), gpu)


def test_eight_bits_have_more_senders_where_that_is_faster():
    """As measured: eight blocks let a reduce-scatter of large products keep up, and cost small ones a wave of tiles."""
    large, small = (_product("matmul_reduce_scatter", 4, m, 7168, 8192) for m in (8192, 256))
    assert senders(large) == senders(small) == 4
    large, small = (dataclasses.replace(product, dtype=SCALED) for product in (large, small))
    assert (senders(large), senders(small)) == (8, 4)
    assert expected_us(large)[0] == expected_us(large, blocks=8)[0] < expected_us(large, blocks=4)[0]
    assert senders(dataclasses.replace(large, kind="matmul_all_reduce")) == 4
    assert blocks_for(torch.device("cpu"), large) == {}


def test_the_geometry_counts():
    """That of the call, by default; another one where it is named."""
    product = _product("all_gather_matmul", 4, 1024, 8192, 14336)
    narrow, wide = best_tiling(product), GEOMETRIES[0][0]
    assert narrow.tile[1] == 192
    assert expected_us(product) == expected_us(product, tiling=narrow)
    assert expected_us(product)[0] < expected_us(product, tiling=wide)[0]
    eight = dataclasses.replace(product, dtype=SCALED)
    assert expected_us(eight)[0] < 0.6 * expected_us(product)[0]


def test_gpus_that_the_kernels_are_not_written_for_are_named(monkeypatch):
    here = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(tsn, "world", lambda group: here)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(tsn.ConfigurationError, match=r"^Some: fused kernels are .* 9.0 .*, and cuda:1 is of 8.6; take"):
        FusedMatmul("Some", "", torch.bfloat16, None, DEFAULT, 128, 8, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(TypeError, match="dtype torch.int8"):  # what comes next
        FusedMatmul("Some", "", torch.int8, None, DEFAULT, 128, 8, None)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_named(kind):
    product = _product(kind, 2, 64, 32, 48)
    assert fits(product) is None
    for field, value, text in (
        ("dtype", torch.float32, "dtype torch.float32 is not one of"),
        ("k", 36, "k is 36; it must be a multiple of 8"),
        ("n", 0, "n is 0"),
        ("rows", 0, "rows is 0"),
    ):
        assert text in (fits(dataclasses.replace(product, **{field: value})) or ""), field
    odd = fits(dataclasses.replace(product, rows=63))
    assert odd == (None if kind == "all_gather_matmul" else "rows is 63; it must be a multiple of 2 ranks")


# As measured on one GPU: narrower tiles where they fill the last wave.
@pytest.mark.parametrize(
    "m, k, n, columns",
    [(512, 8192, 28672, 192), (1024, 8192, 14336, 192), (512, 8192, 14336, 256), (8192, 7168, 8192, 256)],
)
def test_geometry_of_a_product(m, k, n, columns):
    for kind in KINDS:
        tiling = best_tiling(_product(kind, 1, m, k, n))
        assert tiling.tile[1] == columns
        check_ring(kind, tiling, torch.bfloat16)
        _check_geometry_of_eight_bits(dataclasses.replace(_product(kind, 1, m, k, n), dtype=SCALED), tiling.tile)


def test_a_ring_of_eight_bits_has_room_for_half_as_many_summands():
    ring = dict(stages=4, panel=8, columns=64)
    check_ring("x", Tiling((128, 128, 64), **ring), torch.float16)
    with pytest.raises(ValueError, match=r"summands in its depth \(32\), which must divide its columns"):
        check_ring("x", Tiling((128, 128, 64), **ring), SCALED)
    with pytest.raises(ValueError, match=r"summands in its depth \(64\)"):
        check_ring("x", Tiling((128, 96, 128), stages=4, panel=8, columns=32), SCALED)


def _check_geometry_of_eight_bits(product: GemmProblem, wide: tuple[int, int, int]) -> None:
    """Tiles as many bytes deep; with scales, results and summands they fit into the shared memory of a block."""
    tiling = best_tiling(product)
    rows, columns, depth = tiling.tile
    assert (rows, columns, depth // 2) == wide
    ring, results = tiling.stages * (rows + columns) * depth, rows * tiling.columns * 2
    scales = (rows + 2 * columns) * 4
    assert 1024 + ring + results + scales + 16 <= 227 << 10  # barriers lie in the first of these
    check_ring(product.kind, tiling, SCALED)


@pytest.mark.parametrize("dtype, out_dtype", [(torch.bfloat16, torch.bfloat16), (torch.float8_e4m3fn, torch.bfloat16)])
def test_all_geometries_run_on_tensor_cores(dtype, out_dtype):
    for geometry, _ in GEOMETRIES:
        product = GemmProblem("all_gather_matmul", 2, 8192, 8192, 8192, dtype)
        check_tensor_cores("product", of_dtype(geometry, product), dtype, out_dtype)


@pytest.mark.parametrize(
    "tiling, said",
    [
        (Tiling(tile=(32, 32, 16), stages=2, columns=16), "128 rows and of 16 columns"),
        (Tiling(tile=(192, 32, 16), stages=2, columns=16), "128 rows and of 16 columns"),
        (Tiling(tile=(128, 40, 16), stages=2, columns=8), "128 rows and of 16 columns"),
        (
            Tiling(tile=(128, 256, 128), stages=4),
            "393216 bytes for operands of torch.bfloat16 and 32768 for what leaves",
        ),
    ],
)
def test_what_tensor_cores_do_not_take_is_refused(tiling, said):
    with pytest.raises(ValueError, match=said):
        check_tensor_cores("product", tiling, torch.bfloat16, torch.bfloat16)
