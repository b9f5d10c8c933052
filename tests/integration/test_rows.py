"""Boxes and columns end to end: all scopes and copies, in many schedules, on mapped memory and through the fabric."""

import os
import random

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
import tilescale_net.runtime.settings as settings
from tests import ranks
from tests.integration.pool import pool_fixture
from tests.kernels.support import assert_same, random_tensor, schedule
from tests.shorthand import f32, u64
from tests.variants import variants

SCOPES = ("block", "warp", "thread")
# What is copied to what: a box to a box, a box to contiguous memory (packed), and back (unpacked), a column to a column.
SHAPES = ("box", "pack", "unpack", "column")
WAYS = [(primitive, scope, shape) for primitive in ("put", "put_signal", "get") for scope in SCOPES for shape in SHAPES]
HEIGHT, WIDTH, FLAT = 48, 72, 2048


def ends(shape, dst, src, flat_dst, flat_src, dr, dc, sr, sc, rows, columns):
    """Destination and source of a copy of one of SHAPES."""
    to, of = dst[dr : dr + rows, dc : dc + columns], src[sr : sr + rows, sc : sc + columns]
    column = dst[dr : dr + rows, dc], src[sr : sr + rows, sc]
    return {"box": (to, of), "pack": (flat_dst[dc], of), "unpack": (to, flat_src[sc]), "column": column}[shape]


@tsn.jit
def copy_rows_all_ways(dtype, threads=64):
    """Kernel `(dst, src, flat_dst, flat_src, flag, way, to, dst_row, dst_column, src_row, src_column, rows, columns, turn)`.

    `way` is an index into WAYS. The first warp, or the first thread, of the block makes a call of its scope. The flag is
    set to `turn` when the data are there, and waited for.
    """
    whose = {"block": threads, "warp": 32, "thread": 1}

    @T.macro
    def copy(primitive, call, thread, scope, dst, src, to, flag, turn):
        if thread < whose[scope]:
            if primitive == "put_signal":
                call(dst, src, to, flag[0], turn)
            else:
                call(dst, src, to)

    @T.prim_func
    def main(
        ctx: N.Context(), dst: T.Tensor((HEIGHT, WIDTH), dtype), src: T.Tensor((HEIGHT, WIDTH), dtype),
        flat_dst: T.Tensor((FLAT,), dtype), flat_src: T.Tensor((FLAT,), dtype), flag: u64(1), way: T.int32, to: T.int32,
        dr: T.int32, dc: T.int32, sr: T.int32, sc: T.int32, rows: T.int32, columns: T.int32, turn: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            for index, (primitive, scope, shape) in enumerate(WAYS):
                call = getattr(N, f"{primitive}_{scope}")
                if way == index:
                    copy(
                        primitive, call, thread, scope,
                        *ends(shape, dst, src, flat_dst, flat_src, dr, dc, sr, sc, rows, columns), to, flag, turn,
                    )  # fmt: skip
                    if primitive == "put":
                        N.signal_block(flag[0], turn, to)
                    if primitive != "get":
                        N.wait_block(flag[0], "ge", turn)
            N.quiet_block()

    return main


class Boxes:
    """Tensors of a rank that outlive the examples."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.kernel = copy_rows_all_ways(str(dtype).removeprefix("torch."))
        self.dst, self.src = (tsn.empty((HEIGHT, WIDTH), dtype) for _ in range(2))
        self.flat_dst, self.flat_src = (tsn.empty(FLAT, dtype) for _ in range(2))
        self.flag = tsn.zeros(1, torch.uint64)
        self.turn = 0

    def run(
        self, way: tuple[str, str, str], place: tuple[int, int, int, int], rows: int, columns: int, seed: int
    ) -> None:
        """Every PE puts to its right neighbour or gets from it; checks all bytes of the destination."""
        rank, n = tsn.rank(), tsn.size()
        primitive, _, shape = way
        dr, dc, sr, sc = place
        columns = 1 if shape == "column" else columns
        source = (rank + 1) % n if primitive == "get" else (rank - 1) % n
        self.turn += 1

        def made(name: str, like: torch.Tensor, pe: int) -> torch.Tensor:
            return random_tensor(tuple(like.shape), self.dtype, seed, self.turn, name, pe)

        for name in ("src", "flat_src", "dst", "flat_dst"):
            getattr(self, name).copy_(made(name, getattr(self, name), rank))
        tsn.barrier()
        schedule(seed, self.turn)
        self.kernel(
            self.dst, self.src, self.flat_dst, self.flat_src, self.flag, WAYS.index(way), (rank + 1) % n, dr, dc, sr, sc,
            rows, columns, self.turn,
        )  # fmt: skip
        tsn.barrier()
        name = "flat_dst" if shape == "pack" else "dst"
        expected = made(name, getattr(self, name), rank)
        if shape == "unpack":
            data = made("flat_src", self.flat_src, source)[sc : sc + rows * columns].view(rows, columns)
        else:
            data = made("src", self.src, source)[sr : sr + rows, sc : sc + columns]
        if shape == "pack":
            expected[dc : dc + rows * columns] = data.reshape(-1)
        else:
            expected[dr : dr + rows, dc : dc + columns] = data
        assert_same(
            getattr(self, name).cpu(), expected, f"{way} {self.dtype} at {place}, {rows} x {columns}, seed {seed}"
        )


@tsn.jit
def through_views(m=4, w=32, pitch=48, planes=2):
    """Kernel `(x, cube, tiles, packed, pulled, back, peer)`: reads and writes through views of a peer's padded tensors."""
    apart = m * pitch + 16

    @T.prim_func
    def main(
        ctx: N.Context(), x: T.StridedTensor((m, w), (pitch, 1), "float32"),
        cube: T.StridedTensor((planes, m, w), (apart, pitch, 1), "float32"), tiles: f32(m, w), packed: f32(m, w),
        pulled: f32(m, w), back: T.StridedTensor((m, w), (pitch, 1), "float32"), peer: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            view = N.remote(x, peer)
            theirs = N.remote(cube, peer)
            there = N.remote(back, peer)
            T.copy(view, tiles)
            N.put_block(packed, view, N.my_pe())
            N.get_block(pulled, x, peer)
            for i, j in T.Parallel(m, w):
                there[i, j] = view[i, j] + theirs[planes - 1, i, j]
            N.quiet_block()

    return main


def views_of_padded(m=4, w=32, pitch=48, planes=2) -> None:
    """Every PE reads its neighbour's padded tensors and writes one, of which only the rows may change."""
    rank, n = tsn.rank(), tsn.size()
    apart = m * pitch + 16
    base, back, planes_of = tsn.zeros((m, pitch)), tsn.zeros((m, pitch)), tsn.zeros((planes, apart))
    tiles, packed, pulled = (tsn.zeros((m, w)) for _ in range(3))

    def of(pe: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(m * pitch, dtype=torch.float32).view(m, pitch) + 1000 * pe
        return x, torch.arange(planes * apart, dtype=torch.float32).view(planes, apart) * (pe + 2)

    base.copy_(of(rank)[0])
    planes_of.copy_(of(rank)[1])
    cube = planes_of.as_strided((planes, m, w), (apart, pitch, 1))
    tsn.barrier()
    through_views(m, w, pitch, planes)(base[:, :w], cube, tiles, packed, pulled, back[:, :w], (rank + 1) % n)
    tsn.barrier()
    x = of((rank + 1) % n)[0][:, :w]
    for name, got in (("T.copy", tiles), ("put", packed), ("get", pulled)):
        assert got.cpu().equal(x), name
    mine, planes_of_mine = of(rank)
    written = torch.zeros((m, pitch))
    written[:, :w] = mine[:, :w] + planes_of_mine.as_strided((planes, m, w), (apart, pitch, 1))[-1]
    assert back.cpu().equal(written), back


_boxes: dict = {}


def boxes(dtype: torch.dtype, cases: list, visibility: str) -> None:
    """Run copies of rows on this rank."""
    os.environ["TSN_SIM_VISIBILITY"] = visibility
    if dtype not in _boxes:
        _boxes[dtype] = Boxes(dtype)
    for case in cases:
        _boxes[dtype].run(*case)


def random_cases(n: int, seed: int) -> list:
    """Boxes of all sizes and at all places, half of them at multiples of 16 bytes, for each of WAYS in turn."""
    pace = random.Random(seed)
    cases = []
    for i in range(n):
        aligned = 16 if pace.random() < 0.5 else 1
        rows, columns = pace.choice([0, 1, 2, 5, 17]), pace.choice([0, 1, 3, 16, 33, 48])
        place = tuple(pace.randrange(0, 24) // aligned * aligned for _ in range(4))
        cases.append((WAYS[i % len(WAYS)], place, rows, columns, seed + i))
    return cases


@pytest.mark.skipif(settings.device_kind() == "cuda", reason="a GPU knows the limits of the heap alone")
@pytest.mark.parametrize("operation", ["put", "put_signal", "get"])
@ranks.fails("OutOfBounds", "run 4 bytes past the end of empty([48, 72], torch.float32)", size=1)
def test_a_row_past_the_end(operation):
    """A box whose last row runs past the end of the heap's last tensor."""
    dst, src = (tsn.empty((HEIGHT, WIDTH), torch.float32) for _ in range(2))
    flat_dst, flat_src = (tsn.empty(FLAT, torch.float32) for _ in range(2))
    way = WAYS.index((operation, "block", "box"))
    copy_rows_all_ways("float32")(
        dst, src, flat_dst, flat_src, tsn.zeros(1, torch.uint64), way, tsn.rank(), 40, 60, 0, 0, 8, 13, 1
    )


# -- tests ----------------------------------------------------------------------------------------------------------

near = pool_fixture(2)
far = pool_fixture(2, env={"VIRTUAL_NODES": "2", "TSN_CHAOS": "on"})


@pytest.mark.parametrize("visibility", ["eager", "late", "random"])
@variants(3, "dtype", [torch.float32, torch.uint8])
def test_mapped_memory(near, dtype, visibility):
    near(boxes, dtype, random_cases(2 * len(WAYS), 11), visibility)


def test_views_of_padded_tensors(near):
    near(views_of_padded)


def test_another_node(far):
    far(boxes, torch.bfloat16, random_cases(2 * len(WAYS), 12), "random")
