"""A kernel that carries out a short program, which is one of its arguments: many jobs to explore for one compilation."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

STEPS = 4
SET, ADD, WAIT, WAIT_EXACTLY, TEST, ATOMIC, PUT, FENCE, QUIET, LOAD, WAIT_VALUE = range(1, 12)


@tsn.jit
def interpreter():
    @T.prim_func
    def main(
        ctx: N.Context(),
        program: T.Tensor((STEPS, 4), "int32"),
        words: T.Tensor((2,), "uint64"),
        data: T.Tensor((2,), "int64"),
        out: T.Tensor((STEPS,), "int64"),
    ):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                for i in T.serial(STEPS):
                    at, pe, value = program[i, 1], program[i, 2], program[i, 3]
                    if program[i, 0] == SET:
                        N.signal(words[at], T.cast(value, "uint64"), pe)
                    if program[i, 0] == ADD:
                        N.signal(words[at], T.cast(value, "uint64"), pe, op="add")
                    if program[i, 0] == WAIT:
                        N.wait(words[at], "ge", value)
                    if program[i, 0] == WAIT_EXACTLY:
                        N.wait(words[at], "eq", value)
                    if program[i, 0] == WAIT_VALUE:
                        out[i] = T.cast(N.wait(words[at], "ge", value), "int64")
                    if program[i, 0] == TEST:
                        out[i] = T.if_then_else(N.test(words[at], "ge", value), T.int64(1), T.int64(2))
                    if program[i, 0] == ATOMIC:
                        out[i] = T.cast(N.atomic_add(words[at], T.cast(value, "uint64"), pe), "int64")
                    if program[i, 0] == PUT:
                        N.put_value(data[at], T.cast(value, "int64"), pe)
                    if program[i, 0] == FENCE:
                        N.fence(pe)
                    if program[i, 0] == QUIET:
                        N.quiet(pe)
                    if program[i, 0] == LOAD:
                        out[i] = data[at]

    return main


def job(programs):
    """The function that sets up a rank. `programs`: steps (operation, index, pe, value) of each rank."""

    def program():
        steps = torch.zeros((STEPS, 4), dtype=torch.int32)
        mine = torch.tensor(programs[tsn.rank()], dtype=torch.int32).reshape(-1, 4)
        steps[: len(mine)] = mine
        words, data = tsn.zeros((2,), torch.uint64), tsn.zeros((2,), torch.int64)
        out = torch.zeros(STEPS, dtype=torch.int64)
        return lambda: interpreter()(steps, words, data, out)

    return program


def random_programs(lot, ranks, steps):
    """A job's programs; every rank may send to and wait for any."""

    def step():
        operation = lot.choice((SET, ADD, ADD, WAIT, WAIT_VALUE, TEST, TEST, ATOMIC, PUT, PUT, FENCE, QUIET, LOAD, LOAD, LOAD))
        return operation, int(lot.random() < 0.2), lot.randrange(ranks), 1 if operation in (WAIT, WAIT_VALUE) else lot.randrange(1, 3)

    return [[step() for _ in range(lot.randint(1, steps))] for _ in range(ranks)]
