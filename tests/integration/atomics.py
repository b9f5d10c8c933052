"""Kernels for atomics and put_value, all operations in one kernel per dtype."""

import os
import random

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

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
        ctx: N.Context(),
        word: T.Tensor((1,), dtype),
        values: T.Tensor((THREADS,), dtype),
        old: T.Tensor((THREADS,), dtype),
        operation: T.int32,
        to: T.int32,
    ):
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
    """Kernel `(dst, values, to)`: each thread puts one value; a signal is not needed for what a barrier follows."""

    @T.prim_func
    def main(ctx: N.Context(), dst: T.Tensor((n,), dtype), values: T.Tensor((n,), dtype), to: T.int32):
        with T.Kernel(1, threads=n):
            thread = T.get_thread_binding()
            N.put_value(dst[thread], values[thread], to)
            N.quiet(to)

    return main


_words: dict = {}


def _schedule(seed) -> None:
    os.environ["TSN_SIM_SEED"] = str(random.Random(f"{seed} {tsn.rank()}").randrange(1 << 30))


def atomic(dtype: str, name: str, first: int, values: list[list[int]], seed: int) -> tuple[int, list[int]]:
    """Every rank applies its values to rank 0's word. Returns the word at the end (on rank 0) and the old values."""
    torch_dtype = getattr(torch, dtype)
    if dtype not in _words:
        _words[dtype] = tsn.zeros(1, torch_dtype)
    _schedule(seed)
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
    from tests.kernels.support import assert_same, random_tensor

    torch_dtype = getattr(torch, dtype)
    key = (dtype, n)
    if key not in _words:
        _words[key] = tsn.zeros(n, torch_dtype)
    _schedule(seed)
    rank, size = tsn.rank(), tsn.size()
    tsn.barrier()
    values = random_tensor((n,), torch_dtype, seed, rank).to(tsn.device())
    put_values(dtype, n)(_words[key], values, (rank + 1) % size)
    tsn.barrier()
    assert_same(_words[key].cpu(), random_tensor((n,), torch_dtype, seed, (rank - 1) % size), f"{dtype} x {n}")
