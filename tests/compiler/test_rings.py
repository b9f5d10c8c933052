"""The shared memory that copies of engine "auto" get, and when they go without."""

import re

import pytest
import tilelang.language as T

import tilescale_net.language as N
from tilescale_net.compiler import inspect
from tilescale_net.compiler.passes import prepare


def _kernel(shared_floats: int, n: int, pull: bool = False, **options):
    copy = N.get_block if pull else N.put_block

    @T.prim_func
    def main(ctx: N.Context(), x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((shared_floats,), "float32")
            for i in T.Parallel(128):
                s[i] = x[i]
            for i in T.Parallel(128):
                y[i] = s[i]
            copy(y, x, 1, **options)

    return main


@pytest.mark.parametrize(
    "shared_floats, n, pull, options, ring",
    [
        (128, 1 << 20, False, {}, 65536),
        (128, 1 << 20, True, {}, 98304),
        (128, 1 << 12, False, {}, 0),  # known to be too small to gain
        (45000, 1 << 20, False, {}, 0),  # the kernel's own shared memory leaves no room
        (128, 1 << 20, False, {"engine": "ldst"}, 0),
        (128, 1 << 12, False, {"engine": "bulk"}, 131072),
        (128, 1 << 20, False, {"ring": (2, 1024)}, 2048),
    ],
)
def test_ring_of_a_copy(shared_floats, n, pull, options, ring):
    func = _kernel(shared_floats, n, pull, **options)
    assert prepare(func).ring_bytes == ring
    source = inspect.cuda_source(func)
    assert ("static_cast<void*>(0)" in source) == (ring == 0)


def _two_copies(aliased: bool):
    @T.prim_func
    def main(ctx: N.Context(), x: T.Tensor((65536,), "float32"), y: T.Tensor((65536,), "float32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((128,), "float32")
            N.put_block(y, x, 1)
            N.put_block(y, x, 1)
            if aliased:
                for i in T.Parallel(128):
                    s[i] = x[i]
                for i in T.Parallel(128):
                    y[i] = s[127 - i]

    return main


def test_copies_that_share_a_ring_need_no_barrier_between_them():
    """Each begins with one of its own; tilelang's would be the third in a row after a wait."""
    assert "__syncthreads" not in inspect.cuda_source(_two_copies(False))


def test_memory_of_a_ring_is_not_written_before_the_copy_is_done():
    source = inspect.cuda_source(_two_copies(True))
    ring, shared = (int(n) for name in ("tsn_ring", "s") for n in re.findall(rf"void\* {name} = .*\+ (\d+)\)", source))
    assert ring <= shared < ring + 65536, "the test needs buffers that share memory"
    copies = source.rindex("tsn::put<")
    assert source.index("__syncthreads", copies) < source.index("((float*)s)[", copies)
