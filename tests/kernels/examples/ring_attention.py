"""Attention of rows that all ranks share: keys and values go round the ring through two slots, with credits."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.examples.support import same_on_all

ROWS, DIM, SLOTS = 64, 8, 2


@T.macro
def attend(query, ring, slot, total, weight):
    for j in T.serial(ROWS):
        score = T.alloc_local((1,), "float32")
        score[0] = 0.0
        for d in T.serial(DIM):
            score[0] += query[d] * ring[slot, 0, j, d]
        score[0] = T.exp(score[0])
        weight[0] += score[0]
        for d in T.serial(DIM):
            total[d] += score[0] * ring[slot, 1, j, d]


@tsn.jit
def ring_attention():
    """Kernel `(q, mine, ring, arrived, credit, out, call)`; `mine`: keys and values of this rank."""

    @T.prim_func
    def main(
        ctx: N.Context(), q: T.Tensor((ROWS, DIM), "float32"), mine: T.Tensor((1, 2, ROWS, DIM), "float32"),
        ring: T.Tensor((SLOTS, 2, ROWS, DIM), "float32"), arrived: T.Tensor((1,), "uint64"),
        credit: T.Tensor((1,), "uint64"), out: T.Tensor((ROWS, DIM), "float32"), call: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=ROWS):
            tx = T.get_thread_binding()
            me, n = N.my_pe(), N.n_pes()
            right, left = (me + 1) % n, (me + n - 1) % n
            query = T.alloc_local((DIM,), "float32")
            total = T.alloc_local((DIM,), "float32")
            weight = T.alloc_local((1,), "float32")
            for d in T.serial(DIM):
                query[d] = q[tx, d]
                total[d] = 0.0
            weight[0] = 0.0
            attend(query, mine, 0, total, weight)
            for s in T.serial(n - 1):
                m = call * (n - 1) + s
                slot = N.take_slot_block(credit[0], m, SLOTS)
                if s == 0:
                    N.put_signal_block(
                        ring[slot, 0:2, 0:ROWS, 0:DIM], mine[0, 0:2, 0:ROWS, 0:DIM], right, arrived[0], m + 1
                    )
                else:
                    before = (m - 1) % SLOTS
                    N.put_signal_block(
                        ring[slot, 0:2, 0:ROWS, 0:DIM], ring[before, 0:2, 0:ROWS, 0:DIM], right, arrived[0], m + 1
                    )
                    N.quiet_block(right)
                    N.return_credit_block(credit[0], m - 1, left)
                here = N.wait_slot_block(arrived[0], m, SLOTS)
                attend(query, ring, here, total, weight)
            N.return_credit_block(credit[0], (call + 1) * (n - 1) - 1, left)
            for d in T.serial(DIM):
                out[tx, d] = total[d] / weight[0]
            N.quiet_block(right)

    return main


def small_run(seed):
    n, me = tsn.size(), tsn.rank()
    random, kernel = same_on_all(seed), ring_attention()
    mine, ring = tsn.empty((1, 2, ROWS, DIM)), tsn.empty((SLOTS, 2, ROWS, DIM))
    arrived, credit = tsn.zeros((1,), torch.uint64), tsn.zeros((1,), torch.uint64)
    for call in range(2):
        q, kv = torch.rand((n, ROWS, DIM), generator=random), torch.rand((n, 2, ROWS, DIM), generator=random)
        mine[0] = kv[me]
        out = torch.zeros((ROWS, DIM))
        kernel(q[me], mine, ring, arrived, credit, out, call)
        keys, values = kv[:, 0].reshape(-1, DIM), kv[:, 1].reshape(-1, DIM)
        assert torch.allclose(out, torch.softmax(q[me] @ keys.T, -1) @ values, atol=1e-4)
    tsn.barrier()
