"""Offsets, extents and contiguity of operands against numpy; 64-bit arithmetic; guards."""

import re

import numpy as np
import pytest
import tilelang.language as T
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm.ir import Range

import tilescale_net.language as N
from tests.language.tracing import generated
from tilescale_net.compiler import inspect
from tilescale_net.language._operands import constant, operand
from tilescale_net.language._trace import PrimitiveError


@st.composite
def boxes(draw):
    """A tensor's shape, its order of axes in memory, and a box inside it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    low = [draw(st.integers(0, extent - 1)) for extent in shape]
    size = [draw(st.integers(1, extent - start)) for extent, start in zip(shape, low)]
    return shape, order, low, size


@settings(max_examples=300, deadline=None)
@given(boxes())
def test_regions_against_numpy(box):
    shape, order, low, size = box
    memory = np.arange(np.prod(shape)).reshape([shape[axis] for axis in order])
    array = memory.transpose(np.argsort(order))  # logical shape, permuted in memory
    strides = [s // array.itemsize for s in array.strides]
    buffer = tirx.decl_buffer(shape, "float32", "x", strides=strides)
    region = tirx.BufferRegion(buffer, [Range.from_min_extent(a, n) for a, n in zip(low, size)])
    addresses = array[tuple(slice(a, a + n) for a, n in zip(low, size))].ravel()
    run = np.arange(addresses[0], addresses[0] + addresses.size)
    # Row-major order of the box must be the order of the addresses, without holes.
    if np.array_equal(addresses, run):
        place = operand("x", region)
        assert (place.offset, place.extent) == (addresses[0], addresses.size)
        assert place.room == array.size - addresses[0]
        assert not place.is_element
    else:
        with pytest.raises(PrimitiveError, match="not contiguous"):
            operand("x", region)


@settings(max_examples=100, deadline=None)
@given(boxes())
def test_elements_against_numpy(box):
    shape, _, low, _ = box
    place = operand("x", tirx.BufferLoad(tirx.decl_buffer(shape, "int32", "x"), low))
    offset = int(np.ravel_multi_index(low, shape))
    assert (place.offset, place.extent, place.room) == (offset, 1, int(np.prod(shape)) - offset)
    assert place.is_element and place.inside is None


def test_static_offsets_beyond_32_bits():
    huge = tirx.decl_buffer((1 << 20, 1 << 20), "float32", "x")
    place = operand("x", tirx.BufferLoad(huge, [1 << 19, 5]))
    assert place.offset == (1 << 39) + 5 and place.room == (1 << 40) - place.offset
    assert constant(place.pointer().args[2]) == place.offset


def pointers(body: str) -> list[str]:
    return re.findall(r"\(&\((?:a|b|m|d)\[(.*?)\]\)\)", body)


def test_products_of_run_time_values_are_computed_in_64_bits():
    body = generated(lambda k: N.put_block(k.d[k.bx * k.r, 0], k.a[0], 1, count=k.r * k.r), blocks=1 << 20)
    index = pointers(body)[0]
    assert "((int64_t)((int)blockIdx.x)) * ((int64_t)r)" in index
    assert "(((int64_t)r) * ((int64_t)r)) * (int64_t)4" in body


def test_named_products_are_computed_again_in_64_bits():
    @T.prim_func
    def kernel(ctx: N.Context(), x: T.Tensor((T.dynamic("rows"), 100), "float32"), r: T.int32):
        with T.Kernel(1 << 20, threads=128) as bx:
            row = bx * r
            N.put_block(x[row, 0], x[0, 0], 1, count=100)

    assert "((int64_t)((int)blockIdx.x)) * ((int64_t)r)" in inspect.cuda_source(kernel)


def test_dynamic_tensors_take_their_size_in_64_bits():
    body = generated(lambda k: N.put_block(k.d, k.d, 1))
    assert "(((int64_t)rows) * (int64_t)400)" in body


def test_small_offsets_stay_32_bit():
    # What cannot overflow costs no 64-bit arithmetic.
    assert "(&(a[(((int)blockIdx.x) * 512)]))" in generated(lambda k: N.put_block(k.a[k.bx * 512], k.b, 1, count=1))


@pytest.mark.parametrize(
    ("call", "guarded"),
    [
        (lambda k: N.put_value(k.d[k.r, 3], 1.0, 1), True),
        (lambda k: N.st(k.a[k.n], 1.0), True),
        (lambda k: N.atomic_add(k.i32[k.r], 1, 1), True),
        (lambda k: N.st(k.b[0], N.ld(k.a[k.r])), True),
        (lambda k: N.st(k.a[k.tx], 1.0), False),  # provably inside
        (lambda k: N.put_value(k.a[4095], 1.0, 1), False),
    ],
)
def test_accesses_outside_their_tensor_vanish(call, guarded):
    """tilelang guards only its own operators, so the primitives bring their own guards."""
    body = generated(call)
    assert (" ? " in body or "if (" in body) == guarded, body


def test_loads_in_operands_are_guarded():
    body = generated(lambda k: N.signal(k.flags[0], k.i64[k.r], 1))
    assert "r < 64" in body or "r <= 63" in body
    assert "if" in body or "?" in body


def test_thread_scope_in_a_parallel_loop_runs_once_per_iteration():
    @T.prim_func
    def kernel(ctx: N.Context(), x: T.Tensor((100,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(100):
                N.put_value(x[i], x[i], 1)

    source = inspect.cuda_source(kernel)
    body = source[source.index("{", source.index("__launch_bounds__")) :]
    assert body.count("tsn::put_value(") == 1
    # 100 iterations on 64 threads: two rounds, the second cut off; tilelang writes the cut in units of four.
    assert "for (int i = 0; i < 2; ++i)" in body and "if (((i * 16) + (((int)threadIdx.x) >> 2)) < 25)" in body
    assert "float4" not in body and "float2" not in body
