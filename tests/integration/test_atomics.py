"""Atomics on a peer's memory against their definition, and put_value for every width."""

import functools
import itertools
import operator
import random

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.integration.pool import pool_fixture
from tests.kernels.support import assert_same, random_tensor, schedule
from tests.variants import variants

THREADS = 64
OPERATIONS = ("add", "and", "or", "xor", "min", "max", "exch", "cas")
INTEGERS = ("int32", "uint32", "int64", "uint64")
FLOATS = ("float32", "float64")


def operations(dtype: str) -> tuple[str, ...]:
    return OPERATIONS if dtype in INTEGERS else ("add", "exch")


@tsn.jit
def atomic_all_ways(dtype):
    """Kernel `(word, values, old, operation, to)`: each of THREADS threads applies its value to the word of PE `to`.

    For "cas" the value expected is the thread's index, so that the threads go one after the other.
    """
    names = operations(dtype)
    calls = {name: getattr(N, f"atomic_{name}") for name in names}

    @T.prim_func
    def main(
        ctx: N.Context(), word: T.Tensor((1,), dtype), values: T.Tensor((THREADS,), dtype),
        old: T.Tensor((THREADS,), dtype), operation: T.int32, to: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=THREADS):
            thread = T.get_thread_binding()
            for index, name in enumerate(names):
                if operation == index:
                    if name == "cas":
                        old[thread] = N.atomic_cas(word[0], thread, values[thread], to)
                    else:
                        old[thread] = calls[name](word[0], values[thread], to)

    return main


@tsn.jit
def put_values(dtype, n):
    """Kernel `(dst, values, to)`: each thread puts one value; before a barrier no signal is needed."""

    @T.prim_func
    def main(ctx: N.Context(), dst: T.Tensor((n,), dtype), values: T.Tensor((n,), dtype), to: T.int32):
        with T.Kernel(1, threads=n):
            thread = T.get_thread_binding()
            N.put_value(dst[thread], values[thread], to)
            N.quiet(to)

    return main


_words: dict = {}


def atomic(dtype: str, name: str, first: int, values: list[list[int]], seed: int) -> tuple[int, list[int]]:
    """Every rank applies its values to rank 0's word. Returns the word at the end (on rank 0) and the old values."""
    torch_dtype = getattr(torch, dtype)
    if dtype not in _words:
        _words[dtype] = tsn.zeros(1, torch_dtype)
    schedule(seed)
    word = _words[dtype]
    word.copy_(torch.tensor([first], dtype=torch_dtype))
    tsn.barrier()
    mine = torch.tensor(values[tsn.rank()], dtype=torch_dtype, device=tsn.device())
    old = torch.zeros(THREADS, dtype=torch_dtype, device=tsn.device())
    atomic_all_ways(dtype)(word, mine, old, operations(dtype).index(name), 0)
    tsn.barrier()
    return word.item(), old.tolist()


def put_each(dtype: str, n: int, seed: int) -> None:
    """Every rank puts random values to its right neighbour."""
    torch_dtype = getattr(torch, dtype)
    key = (dtype, n)
    if key not in _words:
        _words[key] = tsn.zeros(n, torch_dtype)
    schedule(seed)
    rank, size = tsn.rank(), tsn.size()
    tsn.barrier()
    values = random_tensor((n,), torch_dtype, seed, rank).to(tsn.device())
    put_values(dtype, n)(_words[key], values, (rank + 1) % size)
    tsn.barrier()
    assert_same(_words[key].cpu(), random_tensor((n,), torch_dtype, seed, (rank - 1) % size), f"{dtype} x {n}")


# -- tests ----------------------------------------------------------------------------------------------------------

pool = pool_fixture(2)
FOLDS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "min": min, "max": max}


def _wrap(value: int, dtype: str) -> int:
    width = int(dtype.lstrip("uint"))
    value %= 1 << width
    return value if dtype.startswith("u") or value < 1 << (width - 1) else value - (1 << width)


def _random(dtype: str, pace: random.Random) -> int:
    width = int(dtype.lstrip("uint"))
    # torch cannot make a uint64 tensor of Python integers beyond int64.
    return pace.randrange(1 << min(width, 63)) if dtype.startswith("u") else _wrap(pace.getrandbits(width), dtype)


def _chain(first, end, old, operands, step) -> bool:
    """Whether the operations happened one after the other: each found another's result, from the first to the end."""
    left = dict(zip(old, operands))
    if len(left) != len(old):
        return False  # two found the same state; random values make every state another
    state = first
    while state in left:
        state = step(state, left.pop(state))
    return not left and state == end


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(pool, dtype):
    seed = random.randrange(1 << 30)
    pace = random.Random(seed)
    for turn, name in itertools.product(range(3), operations(dtype)):
        first = _random(dtype, pace)
        values = [[_random(dtype, pace) for _ in range(THREADS)] for _ in range(2)]
        if name == "cas":
            # Both ranks hand the word on from i to i + 1; exactly one of the two threads i does it.
            first, values = 0, [[i + 1 for i in range(THREADS)]] * 2
        (end, old_0), (_, old_1) = pool(atomic, dtype, name, first, values, seed + turn)
        operands, old = values[0] + values[1], old_0 + old_1
        label = f"seed {seed}, {name}, {dtype}"
        if name == "add":
            assert end == _wrap(first + sum(operands), dtype), label
            assert _chain(first, end, old, operands, lambda state, value: _wrap(state + value, dtype)), label
        elif name in FOLDS:
            assert end == _wrap(functools.reduce(FOLDS[name], operands, first), dtype), label
        elif name == "exch":
            assert _chain(first, end, old, operands, lambda state, value: value), label
        else:
            done = [old_0[i] == i or old_1[i] == i for i in range(THREADS)]
            reached = done.index(False) if False in done else THREADS
            assert end == reached and not any(old_0[i] == old_1[i] == i for i in range(THREADS)), label


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(pool, dtype):
    seed = random.randrange(1 << 30)
    pace = random.Random(seed)
    values = [[float(pace.randrange(1000)) for _ in range(THREADS)] for _ in range(2)]
    (end, old_0), (_, old_1) = pool(atomic, dtype, "add", 5.0, values, seed)
    assert end == 5.0 + sum(values[0]) + sum(values[1]), "whole numbers of this size add up without rounding"
    (end, old_0), (_, old_1) = pool(atomic, dtype, "exch", 5.0, values, seed)
    assert sorted([*values[0], *values[1], 5.0]) == sorted([*old_0, *old_1, end]), "every value is found once"


@variants(
    4,
    "dtype",
    ["int8", "uint8", "int16", "float16", "bfloat16", "int32", "uint32", "float32", "int64", "uint64", "float64"],
)
def test_put_value(pool, dtype):
    for turn in range(3):
        pool(put_each, dtype, 64, random.randrange(1 << 30))
