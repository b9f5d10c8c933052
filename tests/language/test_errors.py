"""Wrong use is reported when the kernel is built, with the primitive's name and the author's line."""

import inspect
import logging
import re
import traceback

import pytest
import tilelang.language as T
import torch
from tilelang.language.eager import builder
from tilelang.layout import make_swizzled_layout

import tilescale_net as tsn
import tilescale_net.language as N
from tests.language.tracing import generated, trace
from tilescale_net.compiler import inspect as inspect_code
from tilescale_net.compiler.passes import prepare
from tilescale_net.errors import KernelError

WRONG = [
    (lambda k: N.put_block(k.h, k.a, 1), "N.put_block: dst (h) has dtype float16, src (a)"),
    (lambda k: N.put_block(3, k.a, 1), "N.put_block: dst must be a tensor, an element"),
    (lambda k: N.get_warp(k.a, k.n + 1, 1), "N.get_warp: src must be a tensor"),
    (lambda k: N.get_block(k.shared, k.a, 1), "dst (shared) lives in shared; it must be in global"),
    (lambda k: N.get_block(k.a, k.shared, 1), "src (shared) lives in shared; it must be in global"),
    (lambda k: N.put_block(k.a[0], k.shared, 1, engine="bulk"), "shared memory is not copied in"),
    (lambda k: N.put_warp(k.a, k.shared, 1, count=129), "src (shared) holds 128 elements"),
    (
        lambda k: N.put_block(k.a, k.fragment, 1),
        "src (fragment) lives in fragment; it must be in global or shared memory",
    ),
    (lambda k: N.put_block(k.a, k.b, 1, count=4097), "count is 4097, but dst (a) holds 4096"),
    (lambda k: N.put_warp(k.a[4090], k.b, 1, count=7), "dst (a) holds 6 elements from there"),
    (lambda k: N.put_warp(k.a, k.b[0:8], 1, count=9), "src (b) holds 8 elements"),
    (lambda k: N.put_thread(k.a, k.b, 1, count=-1), "count is -1; it must be at least 0"),
    (lambda k: N.put_block(k.a, k.b, 1, count=1.5), "count must be an integer, not 1.5"),
    (lambda k: N.put_block(k.a[0:8], k.b[0:9], 1), "dst (a) spans 8 elements, src (b) 9"),
    (lambda k: N.put_block(k.a[0 : k.r], k.b[0 : k.r + 1], 1), "dst (a) spans"),
    (lambda k: N.put_value(k.a[0:8], 1, 1), "N.put_value: dst names 8 elements of a; name one, such as a[0]"),
    (
        lambda k: N.put_vector(k.i32[0:4], T.alloc_local((4,), "int32"), 1),
        "dst (i32) has dtype int32; it must be one of float32, float16, bfloat16",
    ),
    (lambda k: N.put_vector(k.a[0:4], k.b[0:4], 1), "src (b) lives in global; it must be an array of"),
    (
        lambda k: N.put_vectors(k.a[0:4], T.alloc_local((2, 4), "float32"), 3, 0),
        "spans 2 vectors of 16 bytes; name one or 3",
    ),
    (
        lambda k: N.put_vectors(k.a[0:4], T.alloc_local((4,), "float32"), 129, 0),
        "n_pes must be an integer from 1 to 128",
    ),
    (lambda k: N.put_vectors(k.a[0:4], T.alloc_local((4,), "float32"), 2, 2), "first is 2"),
    (lambda k: N.put_vector(k.a[0:3], T.alloc_local((4,), "float32"), 1), "name whole vectors of 16 bytes"),
    (
        lambda k: N.take_vectors(T.alloc_local((4, 4), "float32"), k.m[0 : k.r, 0:4]),
        "name whole vectors of 16 bytes, whose number is known when the kernel is built",
    ),
    (
        lambda k: N.take_vectors(T.alloc_local((2, 4), "float32"), k.a[0:16]),
        "holds 2 vectors, src (a) 4; make them equal",
    ),
    (lambda k: N.atomic_add(k.i32, 1, 1), "dst names 64 elements of i32; name one"),
    (lambda k: N.ld(k.a[0 : k.r]), "elements of a; name one, such as a[0]"),
    (lambda k: N.put_block(k.m[0:4, 0:50], k.a, 1), "src (a) spans 4096 elements, the other end 200"),
    (
        lambda k: N.get_warp(k.m[0:4, 0:50], k.m[0:5, 0:40], 1),
        "dst has 4 rows of 50 elements, src 5 of 40; make them equal",
    ),
    (lambda k: N.put_block(k.m[0:4, 0:5], k.a[0], 1, count=5), "count= belongs to contiguous memory"),
    (lambda k: N.put_block(k.m[0:4, 0:5], k.a[0], 1, engine="bulk"), "a strided region is not copied in bulk"),
    (lambda k: N.put_block(k.m[0:4, 60:110], k.a[0], 1), "ends at 110 on an axis of 100"),
    (lambda k: N.signal(k.m[0:4, 0], 1, 1), "sig (m[0:0+4, 0]) is not contiguous in memory; move it"),
    (lambda k: N.put_thread(k.a[4096], k.b[0], 1), "dst: index 4096 is outside a, whose extent"),
    (lambda k: N.put_block(k.a[4090:4100], k.b, 1), "spans 10 elements, but a holds 6"),
    (lambda k: N.put_block(k.a, k.b, -1), "pe is -1; it must be between 0 and"),
    (lambda k: N.put_block(k.a, k.b, 1.0), "pe must be an integer, not 1.0"),
    (lambda k: N.put_block(k.a, k.b, k.i32), "pe must be an integer"),
    (lambda k: N.put_block(k.a, k.b, 1, engine="tma"), "engine is 'tma'; it must be one of 'auto', 'ldst'"),
    (lambda k: N.put_block(k.a, k.b, 1, unroll=0), "unroll is 0; it must be a compile-time integer"),
    (lambda k: N.put_block(k.a, k.b, 1, unroll=65), "from 1 to 64"),
    (lambda k: N.put_block(k.a, k.b, 1, unroll=k.r), "compile-time integer"),
    (lambda k: N.put_warp(k.a, k.b, 1, engine="bulk"), "N.put_warp: bulk copies need shared memory"),
    (lambda k: N.get_thread(k.a, k.b, 1, ring=(2, 128)), "which only block scope has"),
    (lambda k: N.put_block(k.a, k.b, 1, engine="ldst", ring=(2, 128)), "does not use shared memory"),
    (lambda k: N.put_block(k.a, k.b, 1, ring=(1, 128)), "it takes 2 to 32 stages"),
    (lambda k: N.put_block(k.a, k.b, 1, ring=(2, 100)), "multiple of 128 bytes"),
    (lambda k: N.put_block(k.a, k.b, 1, ring=(16, 16384)), "takes 262144 bytes; shared memory"),
    (lambda k: N.put_block(k.a, k.b, 1, ring=4), "it must be a pair"),
    (lambda k: N.signal(k.a[0], 1, 1), "N.signal: sig (a) has dtype float32; signals are uint64"),
    (lambda k: N.wait(k.flags, "eq", 1), "sig names 8 words of flags; name one, such as"),
    (lambda k: N.signal(k.flags[0], 1, 1, op="max"), "op is 'max'; it must be one of 'set', 'add'"),
    (lambda k: N.signal(k.flags[0], -1, 1), "value is -1; it must be between 0 and"),
    (lambda k: N.signal_block(k.flags[0], 1, 1, fence=2), "fence is 2; it must be True or False"),
    (lambda k: N.signal(k.flags[0], 1, 1, "set", True), "N.signal: too many positional"),
    (lambda k: N.barrier_all(scope="world"), "scope is 'world'; it must be one of 'block', 'grid'"),
    (lambda k: N.put_signal_block(k.a, k.b, 1, k.flags[0], 1, op=3), "op is 3; it must be one of"),
    (lambda k: N.wait_block(k.flags[0], ">=", 1), "N.wait_block: cmp is '>='; it must be one of 'eq'"),
    (lambda k: N.wait(k.flags[0], "eq", 2**64), "value is 18446744073709551616; it must be between"),
    (lambda k: N.wait(k.flags[0], "ge", 2**63), "value is 9223372036854775808; it must be between -"),
    (lambda k: N.put_value(k.i32[0], 1.5, 1), "value has a floating-point type, but the tensor"),
    (lambda k: N.put_value(k.i32[0], 2**31, 1), "value is 2147483648, which int32 cannot hold"),
    (lambda k: N.st(k.a[0], "x"), "value must be a number, not 'x'"),
    (lambda k: N.atomic_add(k.h[0], 1.0, 1), "N.atomic_add: dst (h) has dtype float16; atomic_add"),
    (lambda k: N.atomic_or(k.a[0], 1, 1), "atomic_or takes int32"),
    (lambda k: N.ld(k.a[0], sem="release"), "sem is 'release'; it must be one of 'weak', 'relaxed'"),
    (lambda k: N.st(k.a[0], 0.0, sem="acquire"), "sem is 'acquire'"),
    (lambda k: N.ld(k.a[0], scope="system"), "scope is 'system'; it must be one of 'cta', 'gpu', 'sys'"),
    (lambda k: N.remote(k.a[0], 1), "N.remote: buf must be a whole tensor"),
    (
        lambda k: N.put_block(k.a, k.b, 1, k.flags[0], 1),
        "N.put_block: too many positional arguments; it takes dst, src, pe in this order, and count, unroll, engine, ring by",
    ),
    (
        lambda k: N.put_signal_warp(k.a, k.b, 1, k.flags[0], 1, "add", 64),
        "it takes dst, src, pe, sig, value, op in this order, and count, unroll, engine, ring by name only",
    ),
    (lambda k: N.put(k.a, k.b, 1), "N.put; did you mean N.put_block or N.put_signal_block or"),
    (lambda k: N.wait_blok(k.flags[0], "ge", 1), "there is no primitive N.wait_blok; did you mean N.wait_block"),
    (lambda k: N.put_block(k.a, k.b, 1, count=3 - 8), "count is -5; it must be at least 0"),
    (lambda k: N.put_block(k.a, k.b), "N.put_block: missing a required argument: 'pe'"),
    (lambda k: N.quiet(peer=1), "N.quiet: got an unexpected keyword argument 'peer'"),
    (lambda k: N.flush_wait(None), "ticket must be an integer, not None"),
]


@pytest.mark.parametrize("call, expected", WRONG, ids=[expected for _, expected in WRONG])
def test_message_and_line(call, expected):
    with pytest.raises(KernelError) as caught:
        trace(call)
    message = str(caught.value)
    assert expected in message
    line = call.__code__.co_firstlineno
    found = re.search(r"\n  at (.*):(\d+)$", message)
    assert found and found[1] == __file__ and abs(int(found[2]) - line) <= 1, message


def test_line_inside_a_macro():
    @T.macro
    def push(x, y):
        N.put_block(x, y, -5)

    with pytest.raises(KernelError) as caught:
        trace(lambda k: push(k.a, k.b))
    source, first = inspect.getsourcelines(test_line_inside_a_macro)
    line = first + next(i for i, text in enumerate(source) if "-5" in text)
    assert str(caught.value).endswith(f"at {__file__}:{line}")


def test_outside_a_kernel():
    with pytest.raises(KernelError, match="N.my_pe: is only meaningful inside a kernel"):
        N.my_pe()


def test_outside_the_launch():
    def build():
        @T.prim_func
        def kernel(ctx: N.Context(), a: T.Tensor((N.n_pes(),), "float32")):
            with T.Kernel(1, threads=32):
                N.quiet()

    with pytest.raises(KernelError, match="N.n_pes"):
        build()


SPLIT = {
    "block by one thread": (lambda k: k.tx == 0, lambda k: N.put_block(k.a, k.b, 1)),
    "block by one warp": (lambda k: k.tx < 32, lambda k: N.wait_block(k.flags[0], "eq", 1)),
    "grid by one thread": (lambda k: k.tx == 0, lambda k: N.barrier_grid()),
    "block by even threads": (lambda k: k.tx % 2 == 0, lambda k: N.barrier_all()),
    "warp by one lane": (lambda k: k.tx % 32 == 0, lambda k: N.put_warp(k.a, k.b, 1)),
    "signal of a block by one": (lambda k: k.tx == 0, lambda k: N.signal_block(k.flags[0], 1, 1)),
    "quiet of a block by one warp": (lambda k: k.tx < 32, lambda k: N.quiet_block()),
    "fence of a warp by one lane": (lambda k: k.tx == 0, lambda k: N.fence_warp(1)),
    "warp by half": (lambda k: k.tx < 48, lambda k: N.wait_warp(k.flags[0], "eq", 1)),
}
WHOLE = {
    "thread by one": (lambda k: k.tx == 0, lambda k: N.put_thread(k.a, k.b, 1)),
    "warp by one warp": (lambda k: k.tx // 32 == 1, lambda k: N.put_warp(k.a, k.b, 1)),
    "warp by two": (lambda k: k.tx < 64, lambda k: N.put_warp(k.a, k.b, 1)),
    "block by all": (lambda k: k.tx < 128, lambda k: N.put_block(k.a, k.b, 1)),
    "block of the grid": (lambda k: k.bx == 0, lambda k: N.put_block(k.a, k.b, 1)),
    "run-time value": (lambda k: k.tx < k.r, lambda k: N.put_block(k.a, k.b, 1)),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", SPLIT)
def test_split_scope(name, named):
    condition, call = SPLIT[name]
    with pytest.raises(KernelError, match="holds for some threads of a (block|warp) and not for others"):
        trace(call, condition=condition, named=named)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_scope(name):
    condition, call = WHOLE[name]
    assert "tsn::put" in generated(call, condition=condition)


@pytest.mark.parametrize("scope", ["block", "warp"])
def test_block_scope_in_a_parallel_loop(scope):
    put = getattr(N, f"put_{scope}")

    @T.prim_func
    def kernel(ctx: N.Context(), a: T.Tensor((64, 64), "float32"), b: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                put(a[i, 0:64], b[i, 0:64], 1)

    with pytest.raises(KernelError, match=f"at {scope} scope inside T.Parallel.*\n  at .*test_errors.py:"):
        tsn.compile(kernel, target="simulator")


def kernel_without_context():
    @T.prim_func
    def lonely(a: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            N.put_block(a, a, 1)

    return lonely


def test_missing_context():
    with pytest.raises(
        KernelError, match=r"kernel lonely uses N.put_block but has no context; add .*\n  at .*test_errors"
    ):
        tsn.compile(kernel_without_context(), target="simulator")


def test_a_variable_that_no_argument_gives():
    @T.prim_func
    def kernel(ctx: N.Context(), x: T.Tensor((T.dynamic("n"),), "float32")):
        with T.Kernel(1, threads=64):
            N.put_block(x, x, 0)
            for i in T.serial(T.dynamic("n")):
                x[i] = 0.0

    line = inspect.getsourcelines(test_a_variable_that_no_argument_gives)[1] + 5
    with pytest.raises(
        KernelError, match="uses n, which no argument gives: each .* makes a variable of its own"
    ) as error:
        tsn.compile(kernel, target="simulator")
    assert str(error.value).endswith(f"test_errors.py:{line}")


@pytest.mark.parametrize("lanes", ["tx < 7", "tx % 2 == 0", "tx < 64"])
def test_a_barrier_of_a_part_of_a_warp(lanes):
    @T.prim_func
    def kernel(ctx: N.Context(), x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            low, odd = tx < 7, tx % 2 == 0
            if low if lanes == "tx < 7" else odd if lanes == "tx % 2 == 0" else tx < 64:
                T.sync_threads()

    if lanes == "tx < 64":
        prepare(kernel)
        return
    line = inspect.getsourcelines(test_a_barrier_of_a_part_of_a_warp)[1] + 8
    with pytest.raises(
        KernelError, match=r"T.sync_threads\(\) stands under `.*`, which is true for some threads of a warp"
    ) as error:
        tsn.compile(kernel, target="simulator")
    assert str(error.value).endswith(f"test_errors.py:{line}")


@tsn.jit(target="simulator")
def zeroed(n, value=0.0):
    @T.prim_func
    def kernel(x: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=64):
            x[0] = value

    return kernel


# tilelang before 0.1.15 ends the process for a tensor whose extent is None.
@pytest.mark.parametrize("n", [64.0, torch.tensor(64), *([None] if hasattr(builder, "PythonLoopFrame") else [])])
def test_factory_arguments_of_a_wrong_kind(n):
    with pytest.raises(
        KernelError, match=r"kernel zeroed cannot be built: argument n is .*\n  at .*test_errors.py:\d+$"
    ) as error:
        zeroed(n)
    own = [f.name for f in traceback.extract_tb(error.value.__traceback__) if "tilescale_net/compiler" in f.filename]
    assert own == ["__call__"]  # frames above are the author's
    with pytest.raises(TypeError, match="not a number that I like"):
        broken(64.0)


def test_errors_of_tilelang():
    """Its message and the author's line, not the frames of tilelang and TVM between them."""
    line = inspect.getsourcelines(of_no_dtype.__wrapped__)[1] + 3
    with pytest.raises(KernelError) as error:
        of_no_dtype(64)
    assert (
        str(error.value)
        == f"kernel of_no_dtype cannot be built: ValueError: unknown dtype `bf16`\n  at {__file__}:{line}"
    )
    assert error.value.__cause__ is None and error.value.__suppress_context__
    with pytest.raises(
        KernelError, match=r"kernel of_no_shape cannot be built: AssertionError: \n  at .*test_errors.py:\d+$"
    ):
        of_no_shape(64)  # tilelang says nothing


@tsn.jit(target="simulator")
def of_no_shape(n):
    @T.prim_func
    def kernel(x: T.Tensor[n]):
        with T.Kernel(1, threads=64):
            x[0] = 0.0

    return kernel


@tsn.jit(target="simulator")
def of_no_dtype(n):
    @T.prim_func
    def kernel(x: T.Tensor((n,), "bf16")):
        with T.Kernel(1, threads=64):
            x[0] = 0.0

    return kernel


@tsn.jit(target="simulator")
def broken(n):
    raise TypeError(f"{n} is not a number that I like")


def test_two_contexts():
    @T.prim_func
    def greedy(one: N.Context(), a: T.Tensor((64,), "float32"), two: N.Context()):
        with T.Kernel(1, threads=64):
            N.put_block(a, a, 1)

    with pytest.raises(KernelError, match=r"kernel greedy has 2 N.Context\(\) parameters \(one and two\)"):
        tsn.compile(greedy, target="simulator")


@pytest.mark.parametrize("why", ["an operand of T.gemm", "a layout of its own"])
def test_put_of_a_tile_out_of_order(why):
    @T.prim_func
    def kernel(ctx: N.Context(), a: T.Tensor((64, 64), "float16"), d: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float16")
            other = T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.copy(a, tile)
            T.copy(a, other)
            if why.endswith("gemm"):
                T.clear(acc)
                T.gemm(tile, other, acc)
            else:
                T.annotate_layout({tile: make_swizzled_layout(tile)})
            N.put_block(d, tile, 1)

    with pytest.raises(KernelError, match=rf"sends the tile tile, which has .*{why}.*\n  at .*test_errors.py:"):
        inspect_code.cuda_source(kernel)


@pytest.mark.parametrize(
    ("call", "printed"),
    [(lambda k: N.put_block(k.a, k.b, -1), False), (lambda k: N.put(k.a, k.b, 1), False), (lambda k: 1 // 0, True)],
)
def test_tilelang_prints_no_source_before_our_errors(monkeypatch, call, printed):
    """Its output about errors of other kinds still shows."""
    shown = []
    monkeypatch.setattr(builder.logger, "level", logging.INFO)
    monkeypatch.setattr(builder.logger, "_cache", {})
    monkeypatch.setattr(
        builder.logger, "handle", lambda record: shown.append(record) if builder.logger.filter(record) else None
    )
    with pytest.raises((KernelError, ZeroDivisionError)):
        trace(call)
    assert [("Failed to build prim_func" in record.getMessage()) for record in shown] == [True] * printed


def test_names_that_are_no_primitives():
    assert not hasattr(N, "put") and not hasattr(N, "__wrapped__")
    with pytest.raises(ImportError):
        from tilescale_net.language import put  # noqa: F401
    assert {"put_block", "wait"} <= set(dir(N)) == set(N.__all__)
    assert {"jit", "compile", "init"} <= set(dir(tsn))


def test_primitives_explain_themselves():
    for name in N.__all__:
        function = getattr(N, name)
        hints = function.__annotations__
        assert "return" in hints and set(inspect.signature(function).parameters) <= set(hints), name
        assert function.__doc__ and "see the module" not in function.__doc__
        for option in {"count", "unroll", "engine", "ring"} & set(inspect.signature(function).parameters):
            assert re.search(rf"^ +{option}: ", function.__doc__, re.M), (name, option)
