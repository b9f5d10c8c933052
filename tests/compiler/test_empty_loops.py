"""A loop runs as often as its extent, also where that can only be never or once."""

import tilelang.language as T
import torch

import tilescale_net as tsn
from tests import ranks
from tilescale_net.compiler import inspect

BLOCKS = 4


@T.prim_func
def turns(x: T.Tensor((8,), "int32"), out: T.Tensor((BLOCKS, 12), "int32")):
    with T.Kernel(BLOCKS, threads=32) as bx:
        if T.get_thread_binding() == 0:
            for _ in T.serial((5 - bx) // 4):
                out[bx, 0] = out[bx, 0] + 1
            once = (bx + 2) // 4
            for _ in T.serial(once):
                out[bx, 1] = out[bx, 1] + 1
            for _ in T.unroll((5 - bx) // 4):
                out[bx, 2] = out[bx, 2] + 1
            for i in T.serial(4):
                for _ in T.serial((i + 1) // 3):
                    out[bx, 3] = out[bx, 3] + 1
            for _ in T.serial(x[bx] % 2):
                out[bx, 4] = out[bx, 4] + 1
            if bx < 2:
                for _ in T.serial((bx + 3) // 4):
                    out[bx, 5] = out[bx, 5] + 1
            for _ in T.serial(1, (9 - bx) // 4):
                out[bx, 6] = out[bx, 6] + 1
            for _ in T.serial(bx % 2):
                out[bx, 7] = out[bx, 7] + 1
            for _ in T.serial(T.min(bx, 1)):
                out[bx, 8] = out[bx, 8] + 1
            for _ in T.serial(2 * ((5 - bx) // 4)):
                out[bx, 9] = out[bx, 9] + 1
            for _ in T.serial(T.ceildiv(6 - 2 * bx, 6)):
                out[bx, 10] = out[bx, 10] + 1


@ranks.on(1, TSN_DEVICE="simulator")
def test_empty_loops_do_not_run():
    x, out = torch.tensor([3, 2, 0, 7, 0, 0, 0, 0], dtype=torch.int32), tsn.zeros((BLOCKS, 12), dtype=torch.int32)
    tsn.compile(turns)(x, out)
    for bx, row in enumerate(out.tolist()):
        wanted = [(5 - bx) // 4, (bx + 2) // 4, (5 - bx) // 4, sum((i + 1) // 3 for i in range(4)), [1, 0, 0, 1][bx]]
        wanted += [(bx + 3) // 4 if bx < 2 else 0, max((9 - bx) // 4 - 1, 0), bx % 2, min(bx, 1), 2 * ((5 - bx) // 4)]
        wanted += [max(-(-(6 - 2 * bx) // 6), 0), 0]
        assert row == wanted, f"block {bx}"


@T.prim_func
def ordinary(x: T.Tensor((8,), "int32"), out: T.Tensor((BLOCKS,), "int32")):
    with T.Kernel(BLOCKS, threads=32) as bx:
        if T.get_thread_binding() == 0:
            for _ in T.serial(x[0]):
                out[bx] = out[bx] + 1
            for _ in T.serial(8 - bx):
                out[bx] = out[bx] + 1


def test_other_loops_stay_as_they_are():
    assert inspect.cuda_source(ordinary).count("if (") == 1
