"""Adds to signal words that come through the proxy wait for a kernel that waits, as on GPUs, or for a barrier or free."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks

ADDS = 5
MANY = 700  # more than a box holds


def adds():
    """PE 1 adds `count` ones to a word of PE 0; PE 0 waits for `least` in it."""

    @T.prim_func
    def kernel(ctx: N.Context(), word: T.Tensor((1,), "uint64"), count: T.int32, least: T.int32):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                if N.my_pe() == 1:
                    for _i in T.serial(count):
                        N.signal(word[0], 1, 0, op="add")
                    N.quiet(0)
                if N.my_pe() == 0:
                    N.wait(word[0], "ge", least)

    return kernel


def _deferred():
    me = tsn.rank()
    kernel = tsn.compile(adds())
    word, other = tsn.zeros((1,), torch.uint64), tsn.zeros((1,), torch.uint64)

    def send(count: int, expected: int) -> None:
        """Adds that have arrived, though not in the word."""
        if me == 1:
            kernel(word, count, 0)
        torch.distributed.barrier()
        assert me == 1 or word.item() == expected, (word.item(), expected)

    send(ADDS, 0)
    if me == 0:
        kernel(word, 0, ADDS)
        assert word.item() == ADDS
    torch.distributed.barrier()
    send(MANY, ADDS)
    if me == 0:
        kernel(word, 0, ADDS + MANY)
    torch.distributed.barrier()
    send(ADDS, ADDS + MANY)
    tsn.barrier()
    assert me == 1 or word.item() == 2 * ADDS + MANY
    send(MANY, 2 * ADDS + MANY)
    # Freed and given out again, the word is somebody's data, which later waits leave alone.
    place = word.data_ptr()
    tsn.free(word)
    data = tsn.empty((1,), torch.uint64)
    data.fill_(1000)
    tsn.barrier()
    assert data.data_ptr() == place
    word = other
    send(ADDS, 0)
    if me == 0:
        kernel(other, 0, ADDS)
    assert data.item() == 1000
    tsn.barrier()


def test_adds_wait_for_a_kernel():
    ranks.run(2, _deferred, env={"VIRTUAL_NODES": "2", "TSN_DEVICE": "simulator"})
