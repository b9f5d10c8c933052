"""Every primitive becomes the call of its device function, with its choices as template arguments."""

import pytest
import tilelang.language as T

import tilescale_net.language as N
from tests.language.tracing import generated

BLOCK = "tsn::Scope::block, tsn::Engine::automatic, 32, 0, 0"
CALLS = {
    "my_pe": (lambda k: N.st(k.i32[0], N.my_pe()), "tsn::my_pe(CTX)"),
    "n_pes": (lambda k: N.st(k.i32[0], N.n_pes()), "tsn::n_pes(CTX)"),
    "node_pe": (lambda k: N.st(k.i32[0], N.node_pe()), "tsn::node_pe(CTX)"),
    "n_node_pes": (lambda k: N.st(k.i32[0], N.n_node_pes()), "tsn::n_node_pes(CTX)"),
    "is_direct": (lambda k: N.st(k.i32[0], T.if_then_else(N.is_direct(k.r), 1, 2)), "tsn::is_direct(CTX, r)"),
    "put_block": (
        lambda k: N.put_block(k.b, k.a, 1),
        f"tsn::put<{BLOCK}>(CTX, (&(b[0])), (&(a[0])), 16384, 1, static_cast<void*>(0));",
    ),
    "put_warp": (
        lambda k: N.put_warp(k.b[5], k.a[6:10], k.r, unroll=4, engine="ldst"),
        "tsn::put<tsn::Scope::warp, tsn::Engine::ldst, 4, 0, 0>(CTX, (&(b[5])), (&(a[6])), 16, r, "
        "static_cast<void*>(0));",
    ),
    "put_thread": (
        lambda k: N.put_thread(k.b[k.tx], k.a[0], k.r, count=3),
        "tsn::put<tsn::Scope::thread, tsn::Engine::automatic, 32, 0, 0>(CTX, (&(b[((int)threadIdx.x)])), (&(a[0])), 12",
    ),
    "put_block bulk": (
        lambda k: N.put_block(k.b, k.a, 1, engine="bulk", ring=(4, 1024)),
        "tsn::put<tsn::Scope::block, tsn::Engine::bulk, 32, 4, 1024>(CTX, (&(b[0])), (&(a[0])), 16384, 1, "
        "(&(tsn_ring[0])));",
    ),
    "put_block bulk, default ring": (
        lambda k: N.put_block(k.b, k.a, 1, engine="bulk"),
        "tsn::put<tsn::Scope::block, tsn::Engine::bulk, 32, 8, 16384>(CTX,",
    ),
    "put_block auto with ring": (
        lambda k: N.put_block(k.b, k.a, 1, ring=(2, 128)),
        "tsn::put<tsn::Scope::block, tsn::Engine::automatic, 32, 2, 128>(CTX, (&(b[0])), (&(a[0])), 16384, 1, "
        "(&(tsn_ring[0])));",
    ),
    "get_block": (
        lambda k: N.get_block(k.b, k.a, 1, count=k.n),
        "tsn::get<tsn::Scope::block, tsn::Engine::automatic, 32, 6, 16384>(CTX, (&(b[0])), (&(a[0])), "
        "(min(n, (int64_t)4096) * (int64_t)4), 1, (&(tsn_ring[0])));",
    ),
    "get_warp": (lambda k: N.get_warp(k.b, k.a, 1), "tsn::get<tsn::Scope::warp,"),
    "get_thread": (lambda k: N.get_thread(k.h[3], k.h[4], 1), "(CTX, (&(h[3])), (&(h[4])), 2, 1,"),
    "put_signal_block": (
        lambda k: N.put_signal_block(k.b, k.a, 1, k.flags[2], 7),
        f"tsn::put_signal<{BLOCK}, tsn::SignalOp::set>(CTX, (&(b[0])), (&(a[0])), 16384, 1, "
        "reinterpret_cast<uint64_t*>((&(flags[2]))), (uint64_t)7, static_cast<void*>(0));",
    ),
    "put_signal_warp": (
        lambda k: N.put_signal_warp(k.b, k.a, 1, k.words[2], k.n, op="add"),
        "tsn::put_signal<tsn::Scope::warp, tsn::Engine::automatic, 32, 0, 0, tsn::SignalOp::add>(CTX, (&(b[0])), "
        "(&(a[0])), 16384, 1, reinterpret_cast<uint64_t*>((&(words[2]))), ((uint64_t)n), static_cast<void*>(0));",
    ),
    "put_signal_thread": (
        lambda k: N.put_signal_thread(k.b[0], k.a[0], 1, k.flags[0], 2**64 - 1),
        "(&(flags[0]))), (uint64_t)18446744073709551615, static_cast<void*>(0));",
    ),
    "put_block of a tile": (
        lambda k: N.put_block(k.b[5], k.shared, 1),
        "tsn::put_shared<tsn::Scope::block>(CTX, (&(b[5])), (&(shared[0])), 512, 1);",
    ),
    "put_signal_warp of a part of a tile": (
        lambda k: N.put_signal_warp(k.b[5], k.shared[3], k.r, k.flags[0], 1, count=k.n),
        "tsn::put_signal_shared<tsn::Scope::warp, tsn::SignalOp::set>(CTX, (&(b[5])), (&(shared[3])), (n * (int64_t)4), r,",
    ),
    "put_block of a box": (
        lambda k: N.put_block(k.m[0:4, 0:50], k.m[8:12, 50:100], 1),
        "tsn::put_rows<tsn::Scope::block, 16>(CTX, (&(m[0])), (&(m[850])), 4, 200, 400, 400, 1);",
    ),
    "put_block packing": (
        lambda k: N.put_block(k.a[9], k.d[k.r : k.r + k.n, 10:20], 1, unroll=20),
        "tsn::put_rows<tsn::Scope::block, 20>(CTX, (&(a[9])), (&(d[((((int64_t)r) * (int64_t)100) + (int64_t)10)])), n, 40, "
        "40, 400, 1);",
    ),
    "get_warp of a column": (
        lambda k: N.get_warp(k.a[0:8], k.m[0:8, 3], k.r),
        "tsn::get_rows<tsn::Scope::warp, 16>(CTX, (&(a[0])), (&(m[3])), 8, 4, 4, 400, r);",
    ),
    "put_signal_warp of a box": (
        lambda k: N.put_signal_warp(k.m[0:4, 0:5], k.m[4:8, 0:5], 1, k.flags[0], 1, op="add"),
        "tsn::put_signal_rows<tsn::Scope::warp, 16, tsn::SignalOp::add>(CTX, (&(m[0])), (&(m[400])), 4, 20, 400, 400, 1, "
        "reinterpret_cast<uint64_t*>((&(flags[0]))), (uint64_t)1);",
    ),
    "whole rows are one piece": (lambda k: N.put_block(k.m[0:4, :], k.m[8:12, :], 1), "tsn::put<tsn::Scope::block,"),
    "put_value": (lambda k: N.put_value(k.i64[3], k.r, 1), "tsn::put_value(CTX, (&(i64[3])), r, 1);"),
    "put_vector": (
        lambda k: N.put_vector(k.a[4:8], T.alloc_local((4,), "float32"), k.r),
        "tsn::put_vector(CTX, (&(a[4])), (&(",
    ),
    "put_vectors": (
        lambda k: N.put_vectors(k.a[4:8], T.alloc_local((12,), "float32"), 3, k.r),
        "tsn::put_vectors<3, 3>(CTX, (&(a[4])), (&(",
    ),
    "put_vectors of one": (
        lambda k: N.put_vectors(k.a[4:8], T.alloc_local((4,), "float32"), 3, k.r),
        "tsn::put_vectors<3, 1>(CTX, (&(a[4])), (&(",
    ),
    "take_vectors": (lambda k: N.take_vectors(T.alloc_local((3, 4), "float32"), k.m[1:4, 8:12]), "(&(m[108])), 400);"),
    "put_value float16": (lambda k: N.put_value(k.h[3], 1.5, 1), "tsn::put_value(CTX, (&(h[3])), half_t("),
    "signal": (
        lambda k: N.signal(k.flags[1], 5, k.r),
        "tsn::signal<tsn::Scope::thread, tsn::SignalOp::set, 0>(CTX, reinterpret_cast<uint64_t*>((&(flags[1]))), (uint64_t)5, r);",
    ),
    "signal add": (
        lambda k: N.signal(k.flags[1], 5, 0, op="add"),
        "tsn::signal<tsn::Scope::thread, tsn::SignalOp::add, 0>(CTX,",
    ),
    "signal fence": (
        lambda k: N.signal(k.flags[1], 5, 0, fence=True),
        "tsn::signal<tsn::Scope::thread, tsn::SignalOp::set, 1>",
    ),
    "signal_block": (
        lambda k: N.signal_block(k.flags[1], 5, 0),
        "tsn::signal<tsn::Scope::block, tsn::SignalOp::set, 1>",
    ),
    "signal_warp": (
        lambda k: N.signal_warp(k.flags[1], 5, 0, "add", fence=False),
        "tsn::signal<tsn::Scope::warp, tsn::SignalOp::add, 0>",
    ),
    "wait": (
        lambda k: N.wait(k.flags[1], "ge", k.n),
        "tsn::wait<tsn::Scope::thread, tsn::Compare::ge, 0>(CTX, reinterpret_cast<uint64_t*>((&(flags[(int64_t)1]))), n);",
    ),
    "wait of a difference": (lambda k: N.wait(k.flags[1], "ge", k.r - 1), "(((int64_t)r) - (int64_t)1));"),
    "wait for a negative value": (lambda k: N.wait(k.flags[1], "ge", -3), "(int64_t)-3);"),
    "wait for all bits": (lambda k: N.wait(k.flags[1], "eq", 2**64 - 1), "(int64_t)-1);"),
    "wait_warp": (lambda k: N.wait_warp(k.flags[1], "lt", 3), "tsn::wait<tsn::Scope::warp, tsn::Compare::lt, 0>(CTX,"),
    "wait_block": (
        lambda k: N.wait_block(k.flags[1], "ne", 3),
        "tsn::wait<tsn::Scope::block, tsn::Compare::ne, 0>(CTX,",
    ),
    "wait for TMA": (
        lambda k: N.wait_block(k.flags[1], "ne", 3, proxy="async"),
        "tsn::wait_async<tsn::Scope::block, tsn::Compare::ne, 0>(CTX,",
    ),
    "test": (
        lambda k: N.st(k.i32[0], T.if_then_else(N.test(k.flags[0], "eq", 1), 1, 0)),
        "tsn::test<tsn::Compare::eq>",
    ),
    "atomic_cas": (lambda k: N.atomic_cas(k.i32[1], 3, 4, 1), "tsn::atomic_cas(CTX, (&(i32[1])), 3, 4, 1);"),
    "fence": (lambda k: N.fence(), "tsn::fence<tsn::Scope::thread>(CTX, -1);"),
    "fence one": (lambda k: N.fence(k.r), "tsn::fence<tsn::Scope::thread>(CTX, r);"),
    "quiet": (lambda k: N.quiet(), "tsn::quiet<tsn::Scope::thread>(CTX, -1);"),
    "quiet one": (lambda k: N.quiet(2), "tsn::quiet<tsn::Scope::thread>(CTX, 2);"),
    "fence_block": (lambda k: N.fence_block(2), "tsn::fence<tsn::Scope::block>(CTX, 2);"),
    "fence_warp": (lambda k: N.fence_warp(), "tsn::fence<tsn::Scope::warp>(CTX, -1);"),
    "quiet_block": (lambda k: N.quiet_block(2), "tsn::quiet<tsn::Scope::block>(CTX, 2);"),
    "quiet_warp": (lambda k: N.quiet_warp(), "tsn::quiet<tsn::Scope::warp>(CTX, -1);"),
    "flush_async": (
        lambda k: N.flush_wait(N.flush_async(3)),
        "uint64_t tsn_flush_async = tsn::flush_async(CTX, 3); tsn::flush_wait(CTX, tsn_flush_async);",
    ),
    "barrier_all": (lambda k: N.barrier_all(), "tsn::barrier_all<tsn::BarrierScope::block>(CTX);"),
    "barrier_all of grids": (lambda k: N.barrier_all(scope="grid"), "tsn::barrier_all<tsn::BarrierScope::grid>(CTX);"),
    "barrier_grid": (lambda k: N.barrier_grid(), "tsn::barrier_grid(CTX);"),
    "barrier_node": (lambda k: N.barrier_node(), "tsn::barrier_node<tsn::BarrierScope::block>(CTX);"),
    "benign_race": (lambda k: N.benign_race(k.b[2:5]), "tsn::benign_race(CTX, (&(b[2])), 12);"),
    "range": (
        lambda k: (r := N.range("a part"), r.__enter__(), r.__exit__(None, None, None)),
        "tsn::range_begin(CTX); tsn::range_end(CTX);",
    ),
    "ld": (
        lambda k: N.put_value(k.a[0], N.ld(k.b[1], sem="acquire", scope="gpu"), 1),
        "tsn::ld<tsn::Order::acquire, tsn::MemScope::gpu>((&(b[1])))",
    ),
    "ld volatile": (lambda k: N.ld(k.h[1], sem="volatile"), "tsn::ld<tsn::Order::volatile_, tsn::MemScope::sys>"),
    "st": (
        lambda k: N.st(k.b[1], 2.0, sem="release", scope="cta"),
        "tsn::st<tsn::Order::release, tsn::MemScope::cta>((&(b[1])), 0x1p+1f",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name):
    call, expected = CALLS[name]
    body = generated(call)
    assert expected in body, body


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
