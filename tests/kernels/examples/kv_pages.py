"""Pages of a cache of keys and values go to the places that their receiver has for them: dynamic sizes, one byte each."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.examples.support import check, same_on_all

PAGE = 37  # bytes


@tsn.jit
def kv_pages():
    """Kernel `(pages, places, cache, arrived, total, call)`: page i goes to row `places[i]` of the next rank's cache."""
    count, room = T.dynamic("count"), T.dynamic("room")

    @T.prim_func
    def main(
        ctx: N.Context(), pages: T.Tensor((count, PAGE), "uint8"), places: T.Tensor((count,), "int32"),
        cache: T.Tensor((room, PAGE), "uint8"), arrived: T.Tensor((1,), "uint64"),
        read: T.Tensor((1,), "uint64"), total: T.Tensor((PAGE,), "int32"), call: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            tx, me, n = T.get_thread_binding(), N.my_pe(), N.n_pes()
            warp, to, source = tx // 32, (me + 1) % n, (me + n - 1) % n
            N.wait_block(read[0], "ge", call - 1)
            for i in T.serial(T.ceildiv(count, 2)):
                page = i * 2 + warp
                if page < count:
                    N.put_signal_warp(cache[places[page], 0:PAGE], pages[page, 0:PAGE], to, arrived[0], 1, op="add")
            N.wait_block(arrived[0], "ge", call * count)
            if tx < PAGE:
                total[tx] = 0
                for i in T.serial(room):
                    total[tx] += T.cast(cache[i, tx], "int32")
            T.sync_threads()
            if tx == 0:
                N.signal(read[0], call, source)
            N.quiet_block(to)

    return main


def small_run(seed):
    n, me = tsn.size(), tsn.rank()
    random, kernel, count, room = same_on_all(seed), kv_pages(), 5, 7
    pages, cache = tsn.empty((count, PAGE), torch.uint8), tsn.zeros((room, PAGE), torch.uint8)
    arrived, read = tsn.zeros((1,), torch.uint64), tsn.zeros((1,), torch.uint64)
    expected = torch.zeros((room, PAGE), dtype=torch.uint8)
    for call in (1, 2):
        sent = torch.randint(256, (n, count, PAGE), generator=random, dtype=torch.uint8)
        places = torch.stack([torch.randperm(room, generator=random)[:count] for _ in range(n)]).to(torch.int32)
        pages.copy_(sent[me])
        total = torch.zeros(PAGE, dtype=torch.int32)
        kernel(pages, places[me], cache, arrived, read, total, call)
        expected[places[(me - 1) % n].long()] = sent[(me - 1) % n]
        check(total, expected.to(torch.int32).sum(0).to(torch.int32))
    tsn.barrier()
