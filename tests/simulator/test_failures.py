"""A kernel's error comes back as an exception that names it, and the process goes on."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.integration import test_vectors
from tests.simulator import kernels, wrong_kernels
from tests.simulator.kernels import simulate
from tilescale_net.compiler.simulator import host_compiler
from tilescale_net.errors import SimulatorDeadlock
from tilescale_net.runtime import simulator


def still_works():
    out = torch.empty(64, dtype=torch.int32)
    x = torch.arange(64, dtype=torch.int32)
    simulate(kernels.prefix_sum, 64)(x, out)
    return torch.equal(out, x.cumsum(0).int())


@pytest.mark.parametrize("bad", [100, -1, 1 << 28])
def test_argument_out_of_bounds(bad):
    index = torch.zeros(64, dtype=torch.int32)
    index[41] = bad
    for seed in range(3):
        with pytest.raises(tsn.OutOfBounds) as info, simulator.schedule(seed):
            simulate(wrong_kernels.read_at, 100, guarded=False)(torch.zeros(100), index, torch.empty(64))
        text = str(info.value)
        assert f"seed {seed}" in text and "block (1, 0, 0) thread (9, 0, 0)" in text
        assert f"x: access to 4 bytes at byte offset {4 * bad}, but it has 400 bytes" in text
    assert still_works()


def test_slice_is_the_bound_and_not_the_storage():
    index = torch.full((64,), 50, dtype=torch.int32)
    whole = torch.zeros(200)
    simulate(wrong_kernels.read_at, 100, guarded=False)(whole[100:], index, torch.empty(64))
    index[0] = 100
    with pytest.raises(tsn.OutOfBounds):
        simulate(wrong_kernels.read_at, 100, guarded=False)(whole[:100], index, torch.empty(64))


@pytest.mark.parametrize("bad,text", [(64, "past its end"), (-1, "before its start")])
def test_shared_memory_out_of_bounds(bad, text):
    index = torch.zeros(64, dtype=torch.int32)
    index[3] = bad
    with pytest.raises(tsn.OutOfBounds, match=rf"outside its shared memory.*{text}.*256 bytes"):
        simulate(wrong_kernels.write_shared_at, 64, guarded=False)(index, torch.empty(64))


def test_fresh_shared_memory_is_nan():
    out = torch.zeros(64)
    simulate(wrong_kernels.uninitialised_shared)(out)
    assert out.isnan().all()


def test_unmapped_address():
    with pytest.raises(tsn.OutOfBounds, match=r"access to address 0x1234.*not mapped"):
        simulate(wrong_kernels.read_address)(torch.tensor([0x123400], dtype=torch.int64), torch.empty(32))
    assert still_works()


def test_division_by_zero():
    a, b = torch.ones(32, dtype=torch.int32), torch.ones(32, dtype=torch.int32)
    b[7] = 0
    with pytest.raises(tsn.KernelError, match=r"thread \(7, 0, 0\): integer division by zero"):
        simulate(wrong_kernels.divide)(a, b)
    assert still_works()


def test_stack_overflow():
    index = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(tsn.KernelError, match=r"more than its stack of 262144 bytes.*TSN_SIM_STACK"):
        simulate(wrong_kernels.large_local, 1 << 17)(index, torch.empty(32))
    assert still_works()


def test_larger_stack(monkeypatch):
    monkeypatch.setenv("TSN_SIM_STACK", "1M")
    out = torch.empty(32)
    simulate(wrong_kernels.large_local, 1 << 17)(torch.zeros(32, dtype=torch.int32), out)
    assert (out == 2).all()


def test_barrier_that_some_threads_left():
    with pytest.raises(SimulatorDeadlock, match=r"32 of 64 threads at __syncthreads, 32 ended"):
        simulate(wrong_kernels.barrier_in_half, 64)(torch.zeros(64, dtype=torch.int32))
    assert still_works()


def test_warp_operation_that_some_lanes_leave_out():
    for seed in range(4):
        with pytest.raises(tsn.KernelError, match=r"lane.* ended|lanes 0xffff0000 of it have ended"):
            with simulator.schedule(seed):
                simulate(wrong_kernels.shuffle_in_half)(torch.zeros(32, dtype=torch.int32))


def test_lanes_in_different_operations():
    for seed in range(4):
        with pytest.raises(tsn.KernelError, match="different operations"), simulator.schedule(seed):
            simulate(wrong_kernels.different_operations)(torch.zeros(32, dtype=torch.int32))


def test_named_barriers():
    x = torch.zeros(64, dtype=torch.int32)
    simulate(wrong_kernels.named_barriers, 64, 64)(x)
    assert x.sum() == 64
    with pytest.raises(tsn.KernelError, match=r"barrier 1 is used with \d+ threads while others wait"):
        simulate(wrong_kernels.named_barriers, 64, 96)(x)


def test_grid_larger_than_the_gpu(monkeypatch):
    kernel = simulate(kernels.last_block_first, 40)
    flag = torch.zeros(1, dtype=torch.int32)
    kernel(flag)  # 40 blocks fit on 132 SMs
    assert flag[0] == 1
    monkeypatch.setenv("TSN_SIM_SMS", "1")
    monkeypatch.setenv("TSN_SIM_STALL", "0.5")
    begin = time.monotonic()
    with pytest.raises(SimulatorDeadlock, match=r"8 of 40 blocks never started, because only 32 are resident"):
        kernel(torch.zeros(1, dtype=torch.int32))
    assert time.monotonic() - begin < 20


def test_waves_of_blocks(monkeypatch):
    monkeypatch.setenv("TSN_SIM_SMS", "1")
    for seed in range(4):
        flag, seen = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        with simulator.schedule(seed):
            simulate(kernels.producer_consumer, 100)(flag, seen)
        assert seen[0] == 99


def test_grid_barrier(monkeypatch):
    kernel = simulate(kernels.grid_phases, 50)
    for seed in range(4):
        x, out = torch.zeros(50, dtype=torch.int32), torch.zeros(50, dtype=torch.int32)
        with simulator.schedule(seed):
            kernel(x, out)
        assert torch.equal(out, torch.arange(50, 0, -1, dtype=torch.int32))
    monkeypatch.setenv("TSN_SIM_SMS", "1")
    with pytest.raises(tsn.KernelError, match="grid barrier needs all 50 blocks"):
        kernel(x, out)


def test_endless_loop_without_a_pause(monkeypatch):
    monkeypatch.setenv("TSN_SIM_STALL", "1.5")
    kernel, zero = simulate(wrong_kernels.endless), torch.zeros(1, dtype=torch.int32)
    begin = time.monotonic()
    with pytest.raises(SimulatorDeadlock, match=r"thread \(5, 0, 0\): the thread ran for"):
        kernel(zero, torch.zeros(1, dtype=torch.int32))
    assert time.monotonic() - begin < 20
    assert still_works()


@pytest.mark.parametrize("busy", [False, True])
def test_interrupt_ends_a_kernel(busy):
    def interrupt(*_):
        raise KeyboardInterrupt

    kernel = simulate(wrong_kernels.barriers_forever) if busy else simulate(kernels.producer_consumer, 2)
    previous = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            kernel(torch.full((1,), -(1 << 20), dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, previous)
    assert still_works()


def test_assertion_on_the_device():
    x = torch.zeros(32, dtype=torch.int32)
    simulate(wrong_kernels.asserting)(x)
    x[4] = -1
    with pytest.raises(tsn.KernelError, match=r"thread \(4, 0, 0\).*x is negative"):
        simulate(wrong_kernels.asserting)(x)


def test_print(capfd):
    simulate(wrong_kernels.printing)(torch.tensor([1, 42], dtype=torch.int32))
    assert re.search(r"thread 3,0,0\] 42\n", capfd.readouterr().out)


@pytest.mark.parametrize(
    "args,text",
    [
        (lambda x, i, o: (x.double(), i, o), "x dtype mismatch, expected float32"),
        (lambda x, i, o: (x[:99], i, o), r"x shape\[0\].*float32\[99\]"),
        (lambda x, i, o: (torch.zeros(200)[::2], i, o), r"x strides\[0\].*strides \(2,\)"),
        (lambda x, i, o: (x[None], i, o), "x ndim mismatch, expected 1"),
        (lambda x, i, o: (x, i), "takes 3 arguments, got 2"),
        (lambda x, i, o: (x, i, None), "kernel"),
        (lambda x, i, o: (x, i, 3), "out expected pointer or tensor"),
    ],
)
def test_arguments_are_checked(args, text):
    arguments = args(torch.zeros(100), torch.zeros(64, dtype=torch.int32), torch.zeros(64))
    with pytest.raises(tsn.KernelError, match=text):
        simulate(wrong_kernels.read_at, 100)(*arguments)


def test_scalars_are_checked():
    kernel, x, out = simulate(kernels.strided, 64), torch.zeros(2, 64), torch.zeros(4, 64)
    with pytest.raises(tsn.KernelError, match="n expected integer"):
        kernel(x, out, 1.5, 1.0)
    with pytest.raises(tsn.KernelError, match="does not fit"):
        kernel(x, out, 1 << 63, 1.0)


def test_unsupported_constructs_are_named():
    with pytest.raises(tsn.SimulatorUnsupported, match=r"T.gemm.*tl::mma_sync"):
        simulate(wrong_kernels.matrix_product)
    with pytest.raises(tsn.SimulatorUnsupported, match="it has no somebody_elses_function"):
        simulate(wrong_kernels.unknown_function)


def test_compiler_must_exist(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    host_compiler.compiler.cache_clear()
    try:
        with pytest.raises(tsn.ConfigurationError, match="no-such-compiler.*install g\\+\\+ or clang"):
            host_compiler.build("kernel", "int x;")
    finally:
        monkeypatch.undo()
        host_compiler.compiler.cache_clear()


def test_faults_of_other_code_are_not_swallowed():
    code = (
        "import torch, ctypes; from tests.simulator import kernels, wrong_kernels;"
        "kernels.simulate(wrong_kernels.printing)(torch.tensor([1, 42], dtype=torch.int32));"
        "ctypes.string_at(0x1234)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=os.getcwd(), capture_output=True)
    assert done.returncode == -signal.SIGSEGV


def test_seed_decides_the_schedule():
    kernel = simulate(kernels.order_of_blocks, 24)

    def places(seed):
        out = torch.empty(24, dtype=torch.int32)
        with simulator.schedule(seed):
            kernel(torch.zeros(1, dtype=torch.int32), out)
        assert sorted(out.tolist()) == list(range(24))
        return tuple(out.tolist())

    schedules = [places(seed) for seed in range(12)]
    assert schedules == [places(seed) for seed in range(12)]
    assert len(set(schedules)) >= 6


def _too_early() -> None:
    n, dtype = tsn.size(), "float32"
    inbox = tsn.zeros((2, n, test_vectors.VECTORS, 4))
    if tsn.rank() == 0:
        inbox.fill_(1)
    tsn.barrier()
    x = torch.ones((test_vectors.VECTORS, 4), device=tsn.device())
    test_vectors.to_all(n, dtype)(torch.empty((n, test_vectors.VECTORS, 4), device=tsn.device()), x, inbox, 0)
    tsn.synchronize()


def test_a_vector_that_is_put_too_early_is_an_error():
    outcomes = ranks.launch(2, _too_early)
    assert any(o.error and "put_vector writes to memory that is not empty" in o.error[1] for o in outcomes), outcomes
