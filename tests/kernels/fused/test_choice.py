"""Which way a call takes, by the table of measured points; geometry; and shapes that the fused kernels refuse."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilescale_net as tsn
from benchmark import gemm_ways
from tilescale_net.kernels.fused import choice
from tilescale_net.kernels.fused.choice import (
    GEOMETRIES,
    WAYS,
    GemmProblem,
    Point,
    are_experts_fused,
    best_tiling,
    choose,
    experts_problem,
    fits,
    measured,
    nearest,
    of_dtype,
    usual_options,
)
from tilescale_net.kernels.fused.gemm import DEFAULT, SCALED, FusedMatmul, Tiling, check_tensor_cores
from tilescale_net.kernels.fused.matmul_reduce_scatter import check_ring

KINDS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
TABLE = json.loads(Path(choice.__file__).with_name("measured.json").read_text())
H100, H200 = TABLE["gpus"]


def _problem(kind: str, ranks: int, m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> GemmProblem:
    return GemmProblem(kind, ranks, m // ranks if kind == "all_gather_matmul" else m, k, n, dtype)


@pytest.fixture
def gpu(monkeypatch):
    """A world on a GPU of the table where nothing was tuned; its name and capability may be changed."""
    this = SimpleNamespace(name=H100, capability=(9, 0), device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: this.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: this.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(choice.tuned, "of", lambda world, name: {})
    return this


@pytest.fixture
def earlier(monkeypatch):
    """The table of ways.json, so that new measurements change no test."""
    monkeypatch.setattr(choice, "MEASURED", Path(__file__).with_name("ways.json"))
    measured.cache_clear()
    yield
    measured.cache_clear()


def _rows():
    for group in TABLE["groups"]:
        for row in group["points"]:
            us = {way: us for way, us in zip(TABLE["columns"][1:], row[1:]) if us is not None and way in WAYS}
            dtype = getattr(torch, group["dtype"])
            yield group, us, _problem(group["operator"], group["ranks"], row[0], group["k"], group["n"], dtype)


def test_no_call_takes_a_way_that_its_own_point_shows_slower(gpu):
    assert TABLE["columns"][: len(WAYS) + 1] == ["m", *WAYS]  # and torch's
    for group, us, problem in _rows():
        assert group["source"] and group["gpu"] in (H100, H200) and "unfused" in us
        gpu.name = group["gpu"]
        if problem.kind in KINDS:
            way, _ = choose(problem, gpu)
        else:
            assert problem.kind.startswith("moe_experts, top ")
            way = "fused" if are_experts_fused(problem, gpu.device) else "unfused"
        assert us[way] <= 1.02 * min(us.values()), (group["source"], problem, way)


# Rows of a GEMM, and the way they take: as measured, between points, and beyond them.
@pytest.mark.parametrize(
    "kind, ranks, dtype, ways",
    [
        (KINDS[0], 2, torch.bfloat16, {128: "unfused", 512: "copy_engines", 1024: "fused", 65536: "fused"}),
        (KINDS[0], 2, SCALED, {512: "fused", 1024: "copy_engines", 16384: "copy_engines"}),
        (KINDS[0], 4, torch.bfloat16, {4: "unfused", 512: "unfused", 1024: "unfused", 1200: "fused", 8192: "fused"}),
        (KINDS[1], 2, torch.bfloat16, {512: "unfused", 1024: "fused", 3000: "fused"}),
        (KINDS[1], 2, SCALED, {1024: "unfused", 2048: "fused", 8192: "fused"}),
        (KINDS[1], 4, torch.bfloat16, {512: "unfused", 2048: "fused", 4096: "fused"}),
        (KINDS[2], 2, torch.bfloat16, {1024: "unfused", 2048: "fused"}),
        (KINDS[2], 2, SCALED, {1024: "unfused", 16384: "unfused"}),
        (KINDS[2], 4, torch.bfloat16, {512: "unfused", 2048: "fused", 4096: "fused"}),
        (KINDS[0], 8, torch.bfloat16, {8192: "unfused"}),  # not measured
        (KINDS[0], 2, torch.float16, {8192: "unfused"}),
    ],
)
def test_ways_of_a_table(gpu, earlier, kind, ranks, dtype, ways):
    k, n = (8192, 14336) if kind == KINDS[0] else (7168, 8192)
    for m, way in ways.items():
        assert choose(_problem(kind, ranks, m, k, n, dtype), gpu)[0] == way, m


def test_experts_overlap_where_that_was_measured_faster(gpu, monkeypatch, tmp_path):
    def problem(tokens: int, top_k: int = 6, ranks: int = 4) -> GemmProblem:
        return experts_problem(ranks, tokens, top_k, 7168, 3072, SCALED)

    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE | {"groups": []}))
    points = [(problem(512), {"fused": 99.0, "unfused": 100.0}), (problem(4096), {"fused": 90.0, "unfused": 100.0})]
    path.write_text(json.dumps(gemm_ways.table_with(path, H100, points, "moe_experts")))
    monkeypatch.setattr(choice, "MEASURED", path)
    measured.cache_clear()
    taken = {n: are_experts_fused(problem(n), gpu.device) for n in (128, 512, 1024, 2048, 8192)}
    assert taken == {128: False, 512: False, 1024: False, 2048: True, 8192: True}
    # Neither with other choices of a token, nor between other numbers of ranks; in the simulator always.
    assert not are_experts_fused(problem(4096, top_k=8), gpu.device)
    assert not are_experts_fused(problem(4096, ranks=2), gpu.device)
    assert are_experts_fused(problem(128), torch.device("cpu"))
    measured.cache_clear()


def test_the_nearest_point_decides():
    points = [Point(m, 1024, 1024, {"unfused": float(m)}) for m in (512, 2048)]

    def near(m: int, k: int = 1024, n: int = 1024) -> int | None:
        found = nearest(points, _problem(KINDS[1], 2, m, k, n))
        return found and found.m

    assert [near(m) for m in (254, 256, 1024, 1026, 1 << 20)] == [None, 512, 512, 2048, 2048]
    assert near(512, 4096) == near(512, 256) == near(512, 2048, 512) == 512  # a factor of four, either way
    assert near(512, 4112) is None and near(512, 240) is None
    mine = Point(512, 1024, 1024, {"fused": 1.0})
    assert nearest([mine, *points], _problem(KINDS[1], 2, 512, 1024, 1024)) is mine  # of equally near ones the first
    # Unfused unless another way gains 2 %; what was not measured is not taken.
    assert [Point(1, 1, 1, {"fused": us, "unfused": 100.0}).best for us in (97.9, 98.1)] == ["fused", "unfused"]
    assert mine.best == "fused"


def test_points_are_of_the_gpu_first_and_never_of_one_that_is_unlike(gpu, earlier):
    problem = _problem(KINDS[0], 4, 4096, 8192, 14336)
    assert {p.gpu for p in measured(KINDS[0], 4, "bfloat16", H200)} == {H100}
    assert choose(problem, gpu)[0] == "fused" and choose(problem, gpu, is_mapped=False)[0] == "unfused"
    gpu.name = "NVIDIA A100"
    assert choose(problem, gpu)[0] == "unfused"
    gpu.name, gpu.capability = H200, (10, 0)
    assert choose(problem, gpu)[0] == "unfused"
    simulated = SimpleNamespace(device=torch.device("cpu"))
    assert choose(problem, simulated) == ("fused", usual_options(problem, simulated.device))


def test_measurements_of_this_machine_count(gpu, monkeypatch, caplog):
    """Its ways, and the geometry of its fused call for calls of the same layer."""
    layer = _problem(KINDS[1], 8, 4096, 1024, 2048)
    options = {"tiling": GEOMETRIES[1][0], "blocks": 2, "engine": "bulk"}
    point = Point(4096, 1024, 2048, {"fused": 1.0, "unfused": 2.0}, options)
    kept = choice.as_choice(point)
    assert json.loads(json.dumps(kept)) == kept and choice.of_choice(kept, layer) == point
    table = {choice.key_of(layer): kept}
    monkeypatch.setattr(choice.tuned, "of", lambda world, name: table)
    assert choose(layer, gpu) == ("fused", options)
    wider = dataclasses.replace(layer, n=2056)
    assert choose(wider, gpu) == ("fused", usual_options(wider, gpu.device))
    assert choose(dataclasses.replace(layer, kind=KINDS[2]), gpu)[0] == "unfused"
    good = kept["fused"]
    for wrong in (
        kept | {"m": 0}, kept | {"us": {}}, kept | {"us": {"fused": -1}}, kept | {"us": {"copy_engines": 1.0}},
        kept | {"us": {"quickly": 1.0}}, kept | {"fused": 3}, kept | {"fused": good | {"tile": [1, 2, 3]}},
        kept | {"fused": good | {"blocks": 65}}, kept | {"fused": good | {"engine": "steam"}},
        kept | {"fused": good | {"depth": 1}},
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            choice.of_choice(wrong, layer)


def test_eight_bits_have_more_senders_where_four_were_too_slow():
    def blocks(kind, ranks, dtype):
        return choice.senders(_problem(kind, ranks, 8192, 7168, 8192, dtype))

    assert [blocks(KINDS[1], ranks, SCALED) for ranks in (2, 4)] == [4, 8]
    assert blocks(KINDS[1], 4, torch.bfloat16) == blocks(KINDS[2], 4, SCALED) == 4 and blocks(KINDS[0], 4, SCALED) == 8


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
def test_shapes_that_do_not_fit_are_named(kind):
    product = _problem(kind, 2, 64, 32, 48)
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
def test_geometry_of_a_problem(m, k, n, columns):
    for kind in KINDS:
        tiling = best_tiling(_problem(kind, 1, m, k, n))
        assert tiling.tile[1] == columns
        check_ring(kind, tiling, torch.bfloat16)
        _check_geometry_of_eight_bits(dataclasses.replace(_problem(kind, 1, m, k, n), dtype=SCALED), tiling.tile)


def test_a_ring_of_eight_bits_has_room_for_half_as_many_summands():
    ring = dict(stages=4, panel=8, columns=64)
    check_ring("x", Tiling((128, 128, 64), **ring), torch.float16)
    with pytest.raises(ValueError, match=r"summands in its depth \(32\), which must divide its columns"):
        check_ring("x", Tiling((128, 128, 64), **ring), SCALED)
    with pytest.raises(ValueError, match=r"summands in its depth \(64\)"):
        check_ring("x", Tiling((128, 96, 128), stages=4, panel=8, columns=32), SCALED)


def _check_geometry_of_eight_bits(problem: GemmProblem, wide: tuple[int, int, int]) -> None:
    """Tiles as many bytes deep; with scales, results and summands they fit into the shared memory of a block."""
    tiling = best_tiling(problem)
    rows, columns, depth = tiling.tile
    assert (rows, columns, depth // 2) == wide
    ring, results = tiling.stages * (rows + columns) * depth, rows * tiling.columns * 2
    scales = (rows + 2 * columns) * 4
    assert 1024 + ring + results + scales + 16 <= 227 << 10  # barriers lie in the first of these
    check_ring(problem.kind, tiling, SCALED)


@pytest.mark.parametrize("dtype, out_dtype", [(torch.bfloat16, torch.bfloat16), (torch.float8_e4m3fn, torch.bfloat16)])
def test_all_geometries_run_on_tensor_cores(dtype, out_dtype):
    for geometry, _ in GEOMETRIES:
        problem = GemmProblem("all_gather_matmul", 2, 8192, 8192, 8192, dtype)
        check_tensor_cores("product", of_dtype(geometry, problem), dtype, out_dtype)


@pytest.mark.parametrize(
    "tiling, said",
    [
        (Tiling(tile=(32, 32, 16), stages=2, columns=16), "128 rows and of 16 columns"),
        (Tiling(tile=(192, 32, 16), stages=2, columns=16), "128 rows and of 16 columns"),
        (Tiling(tile=(128, 40, 16), stages=2, columns=8), "128 rows and of 16 columns"),
        (Tiling(tile=(128, 256, 128), stages=4), "393216 bytes for operands of torch.bfloat16 and 32768 for results"),
    ],
)
def test_tiles_that_tensor_cores_do_not_take_are_refused(tiling, said):
    with pytest.raises(ValueError, match=said):
        check_tensor_cores("product", tiling, torch.bfloat16, torch.bfloat16)
