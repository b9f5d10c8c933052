"""put, get and put_signal end to end: all scopes, engines, dtypes, sizes and alignments, in many schedules."""

import os
import random

import pytest
import tilelang.language as T
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilescale_net as tsn
import tilescale_net.language as N
from tests.integration.pool import pool_fixture
from tests.kernels.support import assert_same, random_tensor, schedule
from tests.shorthand import u64
from tests.variants import variants

# Parts of a warp- or thread-scope copy share a signal word, so that they can only add.
WAYS = [
    ("put", "block"), ("put_signal_set", "block"), ("put_signal_add", "block"), ("get", "block"),
    ("put", "warp"), ("put_signal_add", "warp"), ("get", "warp"),
    ("put", "thread"), ("put_signal_add", "thread"), ("get", "thread"),
]  # fmt: skip
CAPACITY = 24 * 1024
SLACK = 64


def _plain(primitive, options):
    return lambda dst, src, to, count, flags, expected: primitive(dst, src, to, count=count, **options)


def _signalling(primitive, op, options):
    def copy(dst, src, to, count, flags, expected):
        sig, value = (flags[0], expected) if op == "set" else (flags[1], 1)
        return primitive(dst, src, to, sig, value, op=op, count=count, **options)

    return copy


@tsn.jit
def copy_all_ways(dtype, threads, capacity, engine, unroll, ring):
    """Kernel `(dst, src, seen, flags, mode, to, first_dst, first_src, count, expected)`.

    `mode` is an index into WAYS; warps and threads each copy a share. `seen` gets the values that the receiver reads
    from `dst` after its wait. flags[0] is set, flags[1] is added to; the wait is for `expected`.
    """
    block = dict(unroll=unroll, engine=engine, ring=ring)
    part = dict(unroll=unroll)
    # mode: how many share the copy, the copy of one share, the flag that it is done (None: none needed)
    ways = []
    for scope, sharers in (("block", 1), ("warp", threads // 32), ("thread", threads)):
        put, get, put_signal = (getattr(N, f"{name}_{scope}") for name in ("put", "get", "put_signal"))
        ways.append(("put", scope, sharers, _plain(put, block if scope == "block" else part), 0))
        if scope == "block":
            ways.append(("put_signal_set", scope, 1, _signalling(put_signal, "set", block), 0))
        ways.append(
            ("put_signal_add", scope, sharers, _signalling(put_signal, "add", block if scope == "block" else part), 1)
        )
        ways.append(("get", scope, sharers, _plain(get, block if scope == "block" else part), None))
    assert [way[:2] for way in ways] == WAYS

    @T.macro
    def copy_share(dst, src, flags, thread, to, first_dst, first_src, count, expected, scope, sharers, copy):
        share = T.ceildiv(count, T.int64(sharers))
        first = T.min(share * (thread // (threads // sharers)), count)
        copy(dst[first_dst + first], src[first_src + first], to, T.min(share, count - first), flags, expected)

    @T.prim_func
    def main(
        ctx: N.Context(), dst: T.Tensor((capacity,), dtype), src: T.Tensor((capacity,), dtype),
        seen: T.Tensor((capacity,), dtype), flags: u64(2), mode: T.int32, to: T.int32, first_dst: T.int64,
        first_src: T.int64, count: T.int64, expected: T.int64,
    ):  # fmt: skip
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            for index, (primitive, scope, sharers, copy, flag) in enumerate(ways):
                if mode == index:
                    copy_share(dst, src, flags, thread, to, first_dst, first_src, count, expected, scope, sharers, copy)
                    T.sync_threads()
                    if primitive == "put":
                        if thread == 0:
                            N.fence(to)
                            N.signal(flags[0], expected, to)
                    if flag is not None:
                        N.wait_block(flags[flag], "ge", expected)
            for turn in T.serial(T.ceildiv(count, T.int64(threads))):
                if turn * threads + thread < count:
                    seen[turn * threads + thread] = dst[first_dst + turn * threads + thread]
            T.sync_threads()
            if thread == 0:
                N.quiet(to)

    return main


class Exchange:
    """Tensors and counters of a rank that outlive the examples."""

    def __init__(self, dtype: torch.dtype, threads: int, engine: str, unroll, ring):
        self.dtype, self.threads = dtype, threads
        name = str(dtype).removeprefix("torch.")
        self.kernel = copy_all_ways(name, threads, CAPACITY, engine, unroll, ring)
        self.dst, self.src = (tsn.empty(CAPACITY, dtype) for _ in range(2))
        self.seen = torch.empty(CAPACITY, dtype=dtype, device=tsn.device())
        self.flags = tsn.zeros(2, torch.uint64)
        self.expected = [0, 0]
        self.calls = 0

    def run(self, way: tuple[str, str], first_dst: int, first_src: int, count: int, seed: int) -> None:
        """Every PE puts to its right neighbour or gets from it; checks data seen in the kernel, and the surroundings."""
        rank, n = tsn.rank(), tsn.size()
        primitive, scope = way
        self.calls += 1
        peer = (rank + 1) % n
        source = peer if primitive == "get" else (rank - 1) % n
        data = [random_tensor((CAPACITY,), self.dtype, seed, self.calls, p) for p in (rank, source)]
        before = random_tensor((CAPACITY,), self.dtype, seed, self.calls, "before", rank)
        self.src.copy_(data[0])
        self.dst.copy_(before)
        self.seen.copy_(before)
        word = int(primitive == "put_signal_add")
        self.expected[word] += {"block": 1, "warp": self.threads // 32, "thread": self.threads}[scope] if word else 1
        tsn.barrier()
        schedule(seed, self.calls)
        self.kernel(
            self.dst, self.src, self.seen, self.flags, WAYS.index(way), peer, first_dst, first_src, count,
            self.expected[word],
        )  # fmt: skip
        tsn.barrier()
        label = f"{primitive} {scope} {self.dtype} dst+{first_dst} src+{first_src} count {count} seed {seed}"
        expected = before.clone()
        expected[first_dst : first_dst + count] = data[1][first_src : first_src + count]
        assert_same(self.dst.cpu(), expected, label)
        assert_same(self.seen[:count].cpu(), expected[first_dst : first_dst + count], label + " (in the kernel)")
        assert_same(self.src.cpu(), data[0], label + " (source)")


_exchanges: dict = {}


def example(key: tuple, cases: list, visibility: str) -> None:
    """Run copies on this rank; `key` is the arguments of Exchange, whose object is made once."""
    os.environ["TSN_SIM_VISIBILITY"] = visibility
    if key not in _exchanges:
        _exchanges[key] = Exchange(*key)
    for case in cases:
        _exchanges[key].run(*case)


# -- tests ----------------------------------------------------------------------------------------------------------

pool = pool_fixture(2)
three = pool_fixture(3)

# dtype, threads, engine, unroll, ring
CONFIGURATIONS = [
    (torch.uint8, 96, "ldst", None, None),
    (torch.bfloat16, 64, "auto", 1, None),
    (torch.float32, 32, "bulk", 3, (2, 1024)),
    (torch.float64, 128, "auto", 4, (3, 2048)),
]
NAMES = [f"{str(c[0]).removeprefix('torch.')}-{c[1]}-{c[2]}" for c in CONFIGURATIONS]
# What goes wrong does so around the unit of an access (16 bytes), of a warp, and of a tile.
COUNTS = [0, 1, 2, 3, 15, 16, 17, 31, 33, 127, 128, 129, 1000, 1024, 4097]


@variants(2, "configuration", CONFIGURATIONS, ids=NAMES)
def test_sizes_around_units(pool, configuration):
    pace = random.Random(str(configuration))
    seed = random.randrange(1 << 30)
    cases = [(way, pace.randrange(SLACK), pace.randrange(SLACK), count, seed) for way in WAYS for count in COUNTS]
    pool(example, configuration, cases, "random")


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cases=st.lists(
        st.tuples(
            st.sampled_from(WAYS),
            st.integers(0, SLACK),
            st.integers(0, SLACK),
            st.one_of(st.integers(0, 300), st.integers(0, CAPACITY - SLACK)),
            st.integers(0, 1 << 30),
        ),
        min_size=1,
        max_size=4,
    ),
    visibility=st.sampled_from(["eager", "late", "random"]),
)
@pytest.mark.sample(2)
def test_any_copy(pool, configuration, cases, visibility):
    pool(example, configuration, cases, visibility)


def test_a_ring_of_three(three):
    pace = random.Random()
    cases = [(pace.choice(WAYS), pace.randrange(9), pace.randrange(9), pace.randrange(2000), i) for i in range(40)]
    three(example, CONFIGURATIONS[1], cases, "random")
