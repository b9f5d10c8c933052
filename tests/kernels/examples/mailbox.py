"""A mailbox of one rank into which all blocks of all ranks put: a ticket by a remote atomic gives the slot. One node."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.examples.support import check

SLOTS, SENDERS, ROUNDS, WIDTH = 4, 2, 3, 32  # senders: blocks of a rank


@tsn.jit
def mailbox():
    """Kernel `(box, there, free, tickets, mail, out)`: the last block of rank 0 takes everything, in the order of tickets."""

    @T.prim_func
    def main(
        ctx: N.Context(), box: T.Tensor((SLOTS, WIDTH), "int32"), there: T.Tensor((SLOTS,), "uint64"),
        free: T.Tensor((1,), "uint64"), tickets: T.Tensor((1,), "uint64"),
        mail: T.Tensor((SENDERS, WIDTH), "int32"), out: T.Tensor((T.dynamic("messages"), WIDTH), "int32"),
    ):  # fmt: skip
        with T.Kernel(SENDERS + 1, threads=64) as block:
            tx, me, n = T.get_thread_binding(), N.my_pe(), N.n_pes()
            ticket = T.alloc_shared((1,), "int64")
            if block < SENDERS:
                for r in T.serial(ROUNDS):
                    if tx < WIDTH:
                        mail[block, tx] = (me * SENDERS + block) * ROUNDS + r
                    if tx == 0:
                        ticket[0] = T.cast(N.atomic_add(tickets[0], T.uint64(1), 0), "int64")
                    T.sync_threads()
                    mine = T.cast(ticket[0], "int32")
                    # The slot of this ticket has been emptied as often as there were tickets for it.
                    N.wait_block(free[0], "ge", mine - SLOTS + 1)
                    N.put_signal_block(
                        box[mine % SLOTS, 0:WIDTH], mail[block, 0:WIDTH], 0, there[mine % SLOTS], mine + 1
                    )
                    N.quiet_block(0)
            elif me == 0:
                for m in T.serial(n * SENDERS * ROUNDS):
                    N.wait_block(there[m % SLOTS], "ge", m + 1)
                    if tx < WIDTH:
                        out[m, tx] = box[m % SLOTS, tx]
                    T.sync_threads()
                    if tx < n:
                        N.signal(free[0], m + 1, tx)

    return main


def small_run(seed):
    n, me = tsn.size(), tsn.rank()
    kernel = mailbox()
    box, mail = tsn.empty((SLOTS, WIDTH), torch.int32), tsn.empty((SENDERS, WIDTH), torch.int32)
    there, free, tickets = (tsn.zeros((k,), torch.uint64) for k in (SLOTS, 1, 1))
    messages = n * SENDERS * ROUNDS
    out = torch.zeros((messages, WIDTH), dtype=torch.int32)
    kernel(box, there, free, tickets, mail, out)
    if me == 0:
        check(out.sort(0).values, torch.arange(messages, dtype=torch.int32)[:, None].expand(-1, WIDTH).contiguous())
    tsn.barrier()
