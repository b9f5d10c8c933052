"""Adds to signal words that come through the proxy wait for a kernel that waits, as on GPUs, or for a barrier or free."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.variants import variants

ADDS = 5
MANY = 700  # more than a mailbox holds
WORLD = {"VIRTUAL_NODES": "3", "TSN_DEVICE": "simulator", "TSN_PROXY_QUEUES": "2", "TSN_PROXY_THREADS": "2"}


def adds(tests: bool):
    """The other PEs add `count` ones each to a word of PE 0; PE 0 waits for `least` in it, or tests until it is there."""

    @T.prim_func
    def kernel(ctx: N.Context(), word: T.Tensor((1,), "uint64"), count: T.int32, least: T.int32):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            if tx == 0 and N.my_pe() != 0:
                for _i in T.serial(count):
                    N.signal(word[0], 1, 0, op="add")
                N.quiet(0)
            # Two warps take the adds out of the mailboxes at the same time.
            if tx % 32 == 0 and N.my_pe() == 0:
                if tests:
                    while not N.test(word[0], "ge", least):
                        T.evaluate(0)
                else:
                    N.wait(word[0], "ge", least)

    return kernel


@variants(1, "tests", [False, True], ids=["wait", "test"])
@ranks.on(3, init=False, **WORLD)
def test_adds_wait_for_a_kernel(tests):
    tsn.init()
    me, total = tsn.rank(), 0
    kernel = tsn.compile(adds(tests))
    word, other = tsn.zeros((1,), torch.uint64), tsn.zeros((1,), torch.uint64)

    def send(count: int) -> None:
        """Adds that have arrived, though not in the word."""
        nonlocal total
        if me != 0:
            kernel(word, count, 0)
        torch.distributed.barrier()
        assert me != 0 or word.item() == total, (word.item(), total)
        total += 2 * count

    def take() -> None:
        if me == 0:
            kernel(word, 0, total)
            assert word.item() == total
        torch.distributed.barrier()

    for count in (ADDS, MANY, ADDS):
        send(count)
        take()
    send(ADDS)
    tsn.barrier()
    assert me != 0 or word.item() == total
    send(MANY)
    # Freed and given out again, the word is other data, which later waits leave alone.
    place = word.data_ptr()
    tsn.free(word)
    data = tsn.empty((1,), torch.uint64)
    data.fill_(1000)
    tsn.barrier()
    assert data.data_ptr() == place
    word, total = other, 0
    send(ADDS)
    take()
    assert data.item() == 1000
    # What is pending when the job ends has gone with it.
    send(MANY)
    tsn.finalize()
    tsn.init()
    word, total = tsn.zeros((1,), torch.uint64), 0
    send(ADDS)
    take()
    tsn.finalize()
