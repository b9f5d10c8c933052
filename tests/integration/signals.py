"""Kernels that wait for, test and send signals in every way, chosen at run time."""

import os
import random
import time

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")
WAITERS = ("thread", "warp", "block", "test")
HOLDS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "ge": lambda a, b: a >= b, "gt": lambda a, b: a > b,
    "le": lambda a, b: a <= b, "lt": lambda a, b: a < b,
}  # fmt: skip
THREADS = 96


@tsn.jit
def wait_all_ways():
    """Kernel `(word, value, way, seen, seconds)`: waits for the word; `seen[t]` is what thread t found then.

    `way` is an index into WAITERS x COMPARISONS.
    """

    @T.prim_func
    def main(
        ctx: N.Context(),
        word: T.Tensor((1,), "uint64"),
        value: T.Tensor((1,), "uint64"),
        way: T.int32,
        seen: T.Tensor((THREADS,), "uint64"),
    ):
        with T.Kernel(1, threads=THREADS):
            thread = T.get_thread_binding()
            wanted = value[0]
            for c, compare in enumerate(COMPARISONS):
                if way == c:
                    seen[thread] = N.wait(word[0], compare, wanted)
                if way == len(COMPARISONS) + c:
                    seen[thread] = N.wait_warp(word[0], compare, wanted)
                if way == 2 * len(COMPARISONS) + c:
                    seen[thread] = N.wait_block(word[0], compare, wanted)
                if way == 3 * len(COMPARISONS) + c:
                    while not N.test(word[0], compare, wanted):
                        pass
                    seen[thread] = N.ld(word[0], sem="acquire")

    return main


@tsn.jit
def send():
    """Kernel `(word, values, op, to)`: one thread sends the values to the word of PE `to`, in order; op 0 sets, 1 adds."""
    n = T.dynamic("n")

    @T.prim_func
    def main(
        ctx: N.Context(),
        word: T.Tensor((1,), "uint64"),
        values: T.Tensor((n,), "uint64"),
        op: T.int32,
        to: T.int32,
    ):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                for i in T.serial(n):
                    if op == 0:
                        N.signal(word[0], values[i], to)
                    else:
                        N.signal(word[0], values[i], to, op="add")

    return main


_words: list[torch.Tensor] = []


def word() -> torch.Tensor:
    """One signal word, made once per rank."""
    if not _words:
        _words.append(tsn.zeros(1, torch.uint64))
    return _words[0]


def _u64(*numbers: int) -> torch.Tensor:
    signed = [n - (1 << 64) if n >= 1 << 63 else n for n in numbers]
    return torch.tensor(signed, dtype=torch.int64).view(torch.uint64).to(tsn.device())


def wait_for(waiter: str, compare: str, first: int, wanted: int, values: list[int], op: str, delay: float, seed: int):
    """Rank 0 sends `values`; rank 1, whose word is `first`, waits. Returns what rank 1's threads saw, and the word."""
    os.environ["TSN_SIM_SEED"] = str(random.Random(f"{seed} {tsn.rank()}").randrange(1 << 30))
    flag = word()
    flag.copy_(_u64(first))
    tsn.barrier()
    seen = None
    if tsn.rank() == 0:
        time.sleep(delay)
        send()(flag, _u64(*values), ("set", "add").index(op), 1)
    elif tsn.rank() == 1:
        found = torch.zeros(THREADS, dtype=torch.uint64, device=tsn.device())
        way = WAITERS.index(waiter) * len(COMPARISONS) + COMPARISONS.index(compare)
        wait_all_ways()(flag, _u64(wanted), way, found)
        tsn.synchronize()
        seen = [n % (1 << 64) for n in found.view(torch.int64).tolist()]
    tsn.barrier()
    return seen, flag.view(torch.int64).item() % (1 << 64)
