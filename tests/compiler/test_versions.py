"""Differences between versions of tilelang that compiler/versions.py hides; .ci/run runs these with the oldest one too."""

import inspect

import pytest
import tilelang.language as T
from tilelang.tileop.gemm import registry
from tvm import tirx

import tilescale_net.language as N
from tilescale_net.compiler import versions
from tilescale_net.compiler.ir import collect
from tilescale_net.compiler.simulator import lowering


def kernel_of(threads, seen):
    launch = {} if threads is None else {"threads": threads}

    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32")):
        with T.Kernel(2, **launch):
            seen.append(versions.threads_of_launch(versions.KernelLaunchFrame.Current()))
            x[0] = 1.0
        with T.Kernel(1, threads=32):
            x[1] = 1.0

    return kernel


def test_threads_of_launches():
    for threads, extents in ((64, (64, 1, 1)), ((32, 2), (32, 2, 1))):
        seen = []
        kernel = kernel_of(threads, seen)
        assert versions.launch_threads_of(kernel.body) == [extents, (32, 1, 1)] and seen == [extents]


def test_threads_that_the_author_leaves_open():
    seen = []
    first, second = versions.launch_threads_of(kernel_of(None, seen).body)
    assert (seen, first) in (([None], None), ([(128, 1, 1)], (128, 1, 1))) and second == (32, 1, 1)


def test_statements_carry_the_authors_line():
    @T.prim_func
    def kernel(ctx: N.Context(), x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            x[0] = 1.0
            for i in T.serial(4):
                if x[i] > 0:
                    x[i] = 2.0
            while x[5] > 0:
                x[5] = 0.0

    start = inspect.getsourcelines(test_statements_carry_the_authors_line)[1]
    kinds = (tirx.BufferStore, tirx.For, tirx.IfThenElse, tirx.While)
    inside = collect(kernel.body, lambda node: isinstance(node, tirx.SBlock) and node.name_hint == "tilelang_root")[0]
    found = [
        (type(node).__name__, versions.get_stmt_span(node))
        for node in collect(inside.body, lambda n: isinstance(n, kinds))
    ]
    assert {(kind, span.line - start) for kind, span in found} == {
        ("BufferStore", 4), ("For", 5), ("IfThenElse", 6), ("BufferStore", 7), ("While", 8), ("BufferStore", 9),
    }  # fmt: skip
    assert all(span.source_name.name.endswith("test_versions.py") for _, span in found)


def test_gemms_for_gpus_stay_tilelangs_own():
    ours = {name: implementation for name, _, _, implementation in versions.GEMM_IMPLEMENTATIONS}
    entries = {entry.name: entry for entry in registry._GEMM_IMPLS}
    assert all(entries[name].impl_class is implementation for name, implementation in ours.items())
    replaced = {entry.inst_name for entry in entries.values() if entry.impl_class is lowering.PlainGemm}
    assert replaced == {instruction for _, instruction, _, _ in versions.GEMM_IMPLEMENTATIONS}


def test_loops_over_pythons_values():
    @T.prim_func
    def kernel(x: T.Tensor((8,), "int32"), y: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            for number, tensor in enumerate((x, y)):
                first = number + 1
                for i in range(2):
                    tensor[i] = first
            for value in [3 * n for n in range(1, 3)]:
                y[value] = value

    stores = collect(kernel.body, lambda node: isinstance(node, tirx.BufferStore))
    x, y = (kernel.buffer_map[parameter] for parameter in kernel.params)
    assert all(store.buffer.same_as(tensor) for store, tensor in zip(stores, (x, y, y, y)))
    assert [int(s.value) for s in stores] == [1, 2, 3, 6]


def test_an_error_leaves_no_launch_open():
    with pytest.raises(ValueError, match="an error of the author"):

        @T.prim_func
        def kernel(x: T.Tensor((8,), "int32")):
            with T.Kernel(1, threads=32):
                fail()

    assert versions.KernelLaunchFrame.Current() is None


def fail():
    raise ValueError("an error of the author")
