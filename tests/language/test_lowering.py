"""Every primitive becomes the call of its device function, with its choices as template arguments."""

import pytest
import tilelang.language as T

import tilescale_net.language as N
from tests.language.tracing import generated

BLOCK = "Scope::block, Engine::automatic, 32, 0, 0"
# Without the namespace `tsn` of its names.
CALLS = [
    (lambda k: N.st(k.i32[0], N.my_pe()), "my_pe(CTX)"),
    (lambda k: N.st(k.i32[0], N.n_pes()), "n_pes(CTX)"),
    (lambda k: N.st(k.i32[0], N.node_pe()), "node_pe(CTX)"),
    (lambda k: N.st(k.i32[0], N.n_node_pes()), "n_node_pes(CTX)"),
    (lambda k: N.st(k.i32[0], T.if_then_else(N.is_direct(k.r), 1, 2)), "is_direct(CTX, r)"),
    (lambda k: N.put_block(k.b, k.a, 1), f"put<{BLOCK}>(CTX, (&(b[0])), (&(a[0])), 16384, 1, static_cast<void*>(0));"),
    (
        lambda k: N.put_warp(k.b[5], k.a[6:10], k.r, unroll=4, engine="ldst"),
        "put<Scope::warp, Engine::ldst, 4, 0, 0>(CTX, (&(b[5])), (&(a[6])), 16, r, static_cast<void*>(0));",
    ),
    (
        lambda k: N.put_thread(k.b[k.tx], k.a[0], k.r, count=3),
        "put<Scope::thread, Engine::automatic, 32, 0, 0>(CTX, (&(b[((int)threadIdx.x)])), (&(a[0])), 12",
    ),
    (
        lambda k: N.put_block(k.b, k.a, 1, engine="bulk", ring=(4, 1024)),
        "put<Scope::block, Engine::bulk, 32, 4, 1024>(CTX, (&(b[0])), (&(a[0])), 16384, 1, (&(tsn_ring[0])));",
    ),
    (lambda k: N.put_block(k.b, k.a, 1, engine="bulk"), "put<Scope::block, Engine::bulk, 32, 8, 16384>(CTX,"),
    (
        lambda k: N.put_block(k.b, k.a, 1, ring=(2, 128)),
        "put<Scope::block, Engine::automatic, 32, 2, 128>(CTX, (&(b[0])), (&(a[0])), 16384, 1, (&(tsn_ring[0])));",
    ),
    (
        lambda k: N.get_block(k.b, k.a, 1, count=k.n),
        "get<Scope::block, Engine::automatic, 32, 6, 16384>(CTX, (&(b[0])), (&(a[0])), "
        "(min(n, (int64_t)4096) * (int64_t)4), 1, (&(tsn_ring[0])));",
    ),
    (lambda k: N.get_warp(k.b, k.a, 1), "get<Scope::warp,"),
    (lambda k: N.get_thread(k.h[3], k.h[4], 1), "(CTX, (&(h[3])), (&(h[4])), 2, 1,"),
    (
        lambda k: N.put_signal_block(k.b, k.a, 1, k.flags[2], 7),
        f"put_signal<{BLOCK}, SignalOp::set>(CTX, (&(b[0])), (&(a[0])), 16384, 1, "
        "reinterpret_cast<uint64_t*>((&(flags[2]))), (uint64_t)7, static_cast<void*>(0));",
    ),
    (
        lambda k: N.put_signal_warp(k.b, k.a, 1, k.words[2], k.n, op="add"),
        "put_signal<Scope::warp, Engine::automatic, 32, 0, 0, SignalOp::add>(CTX, (&(b[0])), "
        "(&(a[0])), 16384, 1, reinterpret_cast<uint64_t*>((&(words[2]))), ((uint64_t)n), static_cast<void*>(0));",
    ),
    (
        lambda k: N.put_signal_thread(k.b[0], k.a[0], 1, k.flags[0], 2**64 - 1),
        "(&(flags[0]))), (uint64_t)18446744073709551615, static_cast<void*>(0));",
    ),
    (lambda k: N.put_block(k.b[5], k.shared, 1), "put_shared<Scope::block>(CTX, (&(b[5])), (&(shared[0])), 512, 1);"),
    (
        lambda k: N.put_signal_warp(k.b[5], k.shared[3], k.r, k.flags[0], 1, count=k.n),
        "put_signal_shared<Scope::warp, SignalOp::set>(CTX, (&(b[5])), (&(shared[3])), (n * (int64_t)4), r,",
    ),
    (
        lambda k: N.put_block(k.m[0:4, 0:50], k.m[8:12, 50:100], 1),
        "put_rows<Scope::block, 16>(CTX, (&(m[0])), (&(m[850])), 4, 200, 400, 400, 1);",
    ),
    (
        lambda k: N.put_block(k.a[9], k.d[k.r : k.r + k.n, 10:20], 1, unroll=20),
        "put_rows<Scope::block, 20>(CTX, (&(a[9])), (&(d[((((int64_t)r) * (int64_t)100) + (int64_t)10)])), n, 40, "
        "40, 400, 1);",
    ),
    (
        lambda k: N.get_warp(k.a[0:8], k.m[0:8, 3], k.r),
        "get_rows<Scope::warp, 16>(CTX, (&(a[0])), (&(m[3])), 8, 4, 4, 400, r);",
    ),
    (
        lambda k: N.put_signal_warp(k.m[0:4, 0:5], k.m[4:8, 0:5], 1, k.flags[0], 1, op="add"),
        "put_signal_rows<Scope::warp, 16, SignalOp::add>(CTX, (&(m[0])), (&(m[400])), 4, 20, 400, 400, 1, "
        "reinterpret_cast<uint64_t*>((&(flags[0]))), (uint64_t)1);",
    ),
    (lambda k: N.put_block(k.m[0:4, :], k.m[8:12, :], 1), "put<Scope::block,"),
    (lambda k: N.put_value(k.i64[3], k.r, 1), "put_value(CTX, (&(i64[3])), r, 1);"),
    (lambda k: N.put_vector(k.a[4:8], T.alloc_local((4,), "float32"), k.r), "put_vector(CTX, (&(a[4])), (&("),
    (
        lambda k: N.put_vectors(k.a[4:8], T.alloc_local((12,), "float32"), 3, k.r),
        "put_vectors<3, 3>(CTX, (&(a[4])), (&(",
    ),
    (
        lambda k: N.put_vectors(k.a[4:8], T.alloc_local((4,), "float32"), 3, k.r),
        "put_vectors<3, 1>(CTX, (&(a[4])), (&(",
    ),
    (lambda k: N.take_vectors(T.alloc_local((3, 4), "float32"), k.m[1:4, 8:12]), "(&(m[108])), 400);"),
    (lambda k: N.put_value(k.h[3], 1.5, 1), "put_value(CTX, (&(h[3])), half_t("),
    (
        lambda k: N.signal(k.flags[1], 5, k.r),
        "signal<Scope::thread, SignalOp::set, 0>(CTX, reinterpret_cast<uint64_t*>((&(flags[1]))), (uint64_t)5, r);",
    ),
    (lambda k: N.signal(k.flags[1], 5, 0, op="add"), "signal<Scope::thread, SignalOp::add, 0>(CTX,"),
    (lambda k: N.signal(k.flags[1], 5, 0, fence=True), "signal<Scope::thread, SignalOp::set, 1>"),
    (lambda k: N.signal_block(k.flags[1], 5, 0), "signal<Scope::block, SignalOp::set, 1>"),
    (lambda k: N.signal_warp(k.flags[1], 5, 0, "add", fence=False), "signal<Scope::warp, SignalOp::add, 0>"),
    (
        lambda k: N.wait(k.flags[1], "ge", k.n),
        "wait<Scope::thread, Compare::ge, 0>(CTX, reinterpret_cast<uint64_t*>((&(flags[(int64_t)1]))), n);",
    ),
    (lambda k: N.wait(k.flags[1], "ge", k.r - 1), "(((int64_t)r) - (int64_t)1));"),
    (lambda k: N.wait(k.flags[1], "ge", -3), "(int64_t)-3);"),
    (lambda k: N.wait(k.flags[1], "eq", 2**64 - 1), "(int64_t)-1);"),
    (lambda k: N.wait_warp(k.flags[1], "lt", 3), "wait<Scope::warp, Compare::lt, 0>(CTX,"),
    (lambda k: N.wait_block(k.flags[1], "ne", 3), "wait<Scope::block, Compare::ne, 0>(CTX,"),
    (lambda k: N.wait_block(k.flags[1], "ne", 3, proxy="async"), "wait_async<Scope::block, Compare::ne, 0>(CTX,"),
    (lambda k: N.st(k.i32[0], T.if_then_else(N.test(k.flags[0], "eq", 1), 1, 0)), "test<Compare::eq>"),
    (lambda k: N.atomic_cas(k.i32[1], 3, 4, 1), "atomic_cas(CTX, (&(i32[1])), 3, 4, 1);"),
    (lambda k: N.fence(), "fence<Scope::thread>(CTX, -1);"),
    (lambda k: N.fence(k.r), "fence<Scope::thread>(CTX, r);"),
    (lambda k: N.quiet(), "quiet<Scope::thread>(CTX, -1);"),
    (lambda k: N.quiet(2), "quiet<Scope::thread>(CTX, 2);"),
    (lambda k: N.fence_block(2), "fence<Scope::block>(CTX, 2);"),
    (lambda k: N.fence_warp(), "fence<Scope::warp>(CTX, -1);"),
    (lambda k: N.quiet_block(2), "quiet<Scope::block>(CTX, 2);"),
    (lambda k: N.quiet_warp(), "quiet<Scope::warp>(CTX, -1);"),
    (
        lambda k: N.flush_wait(N.flush_async(3)),
        "uint64_t tsn_flush_async = flush_async(CTX, 3); flush_wait(CTX, tsn_flush_async);",
    ),
    (lambda k: N.barrier_all(), "barrier_all<BarrierScope::block>(CTX);"),
    (lambda k: N.barrier_all(scope="grid"), "barrier_all<BarrierScope::grid>(CTX);"),
    (lambda k: N.barrier_grid(), "barrier_grid(CTX);"),
    (lambda k: N.barrier_node(), "barrier_node<BarrierScope::block>(CTX);"),
    (lambda k: N.benign_race(k.b[2:5]), "benign_race(CTX, (&(b[2])), 12);"),
    (
        lambda k: (r := N.range("a part"), r.__enter__(), r.__exit__(None, None, None)),
        "range_begin(CTX); range_end(CTX);",
    ),
    (
        lambda k: N.put_value(k.a[0], N.ld(k.b[1], sem="acquire", scope="gpu"), 1),
        "ld<Order::acquire, MemScope::gpu>((&(b[1])))",
    ),
    (lambda k: N.ld(k.h[1], sem="volatile"), "ld<Order::volatile_, MemScope::sys>"),
    (lambda k: N.st(k.b[1], 2.0, sem="release", scope="cta"), "st<Order::release, MemScope::cta>((&(b[1])), 0x1p+1f"),
]


@pytest.mark.parametrize("call, expected", CALLS, ids=[expected for _, expected in CALLS])
def test_call(call, expected):
    body = generated(call)
    assert "tsn::" in body and expected in body.replace("tsn::", ""), body


@pytest.mark.parametrize("op", ["add", "and", "or", "xor", "min", "max", "exch"])
def test_atomics(op):
    body = generated(lambda k: getattr(N, f"atomic_{op}")(k.i64[2], k.r, 1))
    enumerator = {"and": "and_", "or": "or_", "xor": "xor_"}.get(op, op)  # C++ reserves the short names
    assert f"tsn::atomic<tsn::AtomicOp::{enumerator}>(CTX, (&(i64[(int64_t)2])), ((int64_t)r), 1);" in body


@pytest.mark.parametrize(("threads", "unroll"), [(32, 32), (128, 32), (160, 25), (256, 16), (512, 8), (1024, 4)])
def test_default_unroll_follows_the_block(threads, unroll):
    assert f"tsn::Engine::automatic, {unroll}, 0, 0>" in generated(lambda k: N.put_block(k.b, k.a, 1), threads=threads)


def test_rings_of_a_kernel_share_the_largest():
    def calls(k):
        T.evaluate(N.put_block(k.b, k.a, 1, ring=(2, 1024)))
        T.evaluate(N.get_block(k.b, k.a, 1, engine="bulk", ring=(4, 2048)))
        T.evaluate(N.put_block(k.b, k.a, 1, engine="ldst"))

    body = generated(calls)
    assert body.count("(&(tsn_ring[0]))") == 2 and body.count("static_cast<void*>(0)") == 1
    assert body.count("tsn_ring[]") == 1  # one allocation


def test_remote_views_work_in_tile_operations():
    def copy(k):
        view = N.remote(k.m, k.r)
        T.copy(view[0:16, 0:64], k.m[16:32, 0:64])

    body = generated(copy)
    assert "tsn::remote(CTX, (&(m[0])), r);" in body
    assert body.count("tsn::remote") == 1  # the address is computed once


def test_value_results_can_be_used():
    def use(k):
        seen = N.wait(k.flags[0], "ge", 1)
        T.evaluate(N.put_block(k.b, k.a, seen, count=seen))

    assert "tsn::put" in generated(use)
