"""Traces one primitive call inside a small kernel, and cuts its generated code out."""

import logging
from types import SimpleNamespace

import tilelang.language as T

import tilescale_net.language as N
from tests.shorthand import f16, f32, f64, i32, i64, u64
from tilescale_net.compiler import inspect

# tilelang logs the whole rewritten source of every kernel that fails to trace.
logging.getLogger("tilelang").setLevel(logging.CRITICAL + 1)

CTX = "reinterpret_cast<const tsn::Context*>((&(ctx[0])))"


def trace(call, threads=128, blocks=4, condition=None, named=False):
    """A kernel whose body is `call(k)`, under `if condition(k)` when there is one, bound to a name first if `named`.

    `k` has tensors a, b (float32[4096]), m (float32[64, 100]), d (float32[rows, 100]), h (float16[64]), i32, i64, f64,
    flags (uint64[8]), words (int64[8]), shared, fragment, and run-time integers n (int64), r (int32), bx, tx.
    """
    rows = T.dynamic("rows")

    @T.prim_func
    def kernel(
        ctx: N.Context(), a: f32(4096), b: f32(4096), m: f32(64, 100), d: f32(rows, 100), h: f16(64), i32: i32(64),
        i64: i64(64), f64: f64(64), flags: u64(8), words: i64(8), n: T.int64, r: T.int32,
    ):  # fmt: skip
        with T.Kernel(blocks, threads=threads) as bx:
            tx = T.get_thread_binding()
            shared = T.alloc_shared((128,), "float32")
            fragment = T.alloc_fragment((128,), "float32")
            k = SimpleNamespace(
                a=a, b=b, m=m, d=d, h=h, i32=i32, i64=i64, f64=f64, flags=flags, words=words,
                n=n, r=r, bx=bx, tx=tx, shared=shared, fragment=fragment, rows=rows,
            )  # fmt: skip
            if condition is None:
                call(k)
            elif named:
                holds = condition(k)
                if holds:
                    call(k)
            else:
                if condition(k):
                    call(k)

    return kernel


def generated(call, **options) -> str:
    """The body of the generated kernel, casts of the context abbreviated to CTX."""
    source = inspect.cuda_source(trace(call, **options))
    body = source[source.index("{", source.index("__launch_bounds__")) :]
    return " ".join(body.replace(CTX, "CTX").split())
