"""A kernel that carries out a short program, which is one of its arguments: many jobs to explore for one compilation."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.shorthand import i32, i64, u64

STEPS = 5
SET, ADD, WAIT, WAIT_EXACTLY, TEST, ATOMIC, PUT, FENCE, QUIET, LOAD, WAIT_VALUE = range(1, 12)


@tsn.jit
def interpreter(blocks):
    @T.prim_func
    def main(ctx: N.Context(), program: i32(blocks, STEPS, 4), words: u64(2), data: i64(2), out: i64(blocks, STEPS)):
        with T.Kernel(blocks, threads=32) as b:
            if T.get_thread_binding() == 0:
                for i in T.serial(STEPS):
                    at, pe, value = program[b, i, 1], program[b, i, 2], program[b, i, 3]
                    if program[b, i, 0] == SET:
                        N.signal(words[at], T.cast(value, "uint64"), pe)
                    if program[b, i, 0] == ADD:
                        N.signal(words[at], T.cast(value, "uint64"), pe, op="add")
                    if program[b, i, 0] == WAIT:
                        N.wait(words[at], "ge", value)
                    if program[b, i, 0] == WAIT_EXACTLY:
                        N.wait(words[at], "eq", value)
                    if program[b, i, 0] == WAIT_VALUE:
                        out[b, i] = T.cast(N.wait(words[at], "ge", value), "int64")
                    if program[b, i, 0] == TEST:
                        out[b, i] = T.if_then_else(N.test(words[at], "ge", value), T.int64(1), T.int64(2))
                    if program[b, i, 0] == ATOMIC:
                        out[b, i] = T.cast(N.atomic_add(words[at], T.cast(value, "uint64"), pe), "int64")
                    if program[b, i, 0] == PUT:
                        N.put_value(data[at], T.cast(value, "int64"), pe)
                    if program[b, i, 0] == FENCE:
                        N.fence(pe)
                    if program[b, i, 0] == QUIET:
                        N.quiet(pe)
                    if program[b, i, 0] == LOAD:
                        out[b, i] = data[at]

    return main


def job(programs, blocks=1, right=lambda out: True):
    """The function that sets up a rank.

    Args:
        programs: steps (operation, index, pe, value) of each block, rank 0's blocks first.
        right: whether the results of a rank are, int64 [blocks, STEPS].
    """

    def program():
        steps = torch.zeros((blocks, STEPS, 4), dtype=torch.int32)
        for block, mine in enumerate(programs[tsn.rank() * blocks : (tsn.rank() + 1) * blocks]):
            steps[block, : len(mine)] = torch.tensor(mine, dtype=torch.int32).reshape(-1, 4)
        words, data = tsn.zeros((2,), torch.uint64), tsn.zeros((2,), torch.int64)
        out = torch.zeros((blocks, STEPS), dtype=torch.int64)
        return lambda: interpreter(blocks)(steps, words, data, out), lambda: right(out)

    return program


def random_programs(lot, ranks, steps, blocks=1):
    """A job's programs; every rank may send to and wait for any, itself too."""

    def step():
        kinds = (SET, ADD, ADD, WAIT, WAIT_VALUE, TEST, TEST, ATOMIC, PUT, PUT, FENCE, QUIET, LOAD, LOAD, LOAD)
        operation = lot.choice(kinds)
        value = 1 if operation in (WAIT, WAIT_VALUE) else lot.randrange(1, 3)
        return operation, int(lot.random() < 0.2), lot.randrange(ranks), value

    return [[step() for _ in range(lot.randint(1, steps))] for _ in range(ranks * blocks)]
