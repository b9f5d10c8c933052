"""Threads that wait for each other by loads in a loop, as blocks of a CUDA grid do."""

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.errors import SimulatorDeadlock
from tilescale_net.runtime import simulator

BLOCKS = 3


def wait_by_loads(sem, scope):
    """The last block stores a number; all threads of every block load until they see it."""

    @T.prim_func
    def kernel(flag: T.Tensor((1,), "int32"), out: T.Tensor((BLOCKS, 32), "int32")):
        with T.Kernel(BLOCKS, threads=32) as block:
            tx = T.get_thread_binding()
            seen = T.alloc_var("int32")
            if block == BLOCKS - 1:
                if tx == 0:
                    N.st(flag[0], 7, sem="release", scope=scope)
            seen = N.ld(flag[0], sem=sem, scope=scope)
            while seen == 0:
                seen = N.ld(flag[0], sem=sem, scope=scope)
            out[block, tx] = seen

    return kernel


def wait_by_plain_loads():
    @T.prim_func
    def kernel(flag: T.Tensor((1,), "int32"), out: T.Tensor((2, 32), "int32")):
        with T.Kernel(2, threads=32) as block:
            tx = T.get_thread_binding()
            if block == 1:
                if tx == 0:
                    flag[0] = 7
            while flag[0] == 0:
                out[block, tx] = out[block, tx] + 1

    return kernel


ORDERS = [(s, m) for s in ("acquire", "volatile") for m in ("cta", "gpu", "sys")] + [("relaxed", "gpu")]


@pytest.mark.parametrize("sem,scope", ORDERS)
def test_loads_with_an_order_let_others_run(sem, scope, monkeypatch):
    monkeypatch.setenv("TSN_SIM_STALL", "5")
    kernel = tsn.compile(wait_by_loads(sem, scope), target="simulator")
    for seed in range(6):
        out = torch.zeros((BLOCKS, 32), dtype=torch.int32)
        with simulator.schedule(seed):
            kernel(torch.zeros(1, dtype=torch.int32), out)
        assert (out == 7).all()


def test_plain_loads_do_not(monkeypatch):
    monkeypatch.setenv("TSN_SIM_STALL", "1")
    kernel = tsn.compile(wait_by_plain_loads(), target="simulator")
    with pytest.raises(SimulatorDeadlock, match="reads memory in a loop without N.ld or a wait"):
        for seed in range(20):
            with simulator.schedule(seed):
                kernel(torch.zeros(1, dtype=torch.int32), torch.zeros((2, 32), dtype=torch.int32))
