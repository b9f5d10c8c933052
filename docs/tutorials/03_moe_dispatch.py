"""03: a custom MoE dispatch. Each token goes to the ranks of its experts; each expert gets its rows in order.

Each block sends to one expert. It searches the choices, puts the rows of the expert's tokens into this rank's slots at
the expert, and ends with a signal that carries the number of rows. The block of a local expert then waits for every
source. `turn` makes the signals of a later call larger than those of an earlier one.
"""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

TOKENS, HIDDEN, EXPERTS, TOP_K = 32, 512, 8, 2


@tsn.jit
def dispatch(n_pes, threads=128):
    local = EXPERTS // n_pes  # experts per rank

    @T.prim_func
    def main(
        ctx: N.Context(),
        x: T.Tensor((TOKENS, HIDDEN), "bfloat16"),
        choices: T.Tensor((TOKENS, TOP_K), "int32"),
        slots: T.Tensor((local, n_pes, TOKENS, HIDDEN), "bfloat16"),  # symmetric: rows by expert and source
        arrived: T.Tensor((local, n_pes), "uint64"),  # symmetric: signals
        counts: T.Tensor((local, n_pes), "int32"),  # rows that came, by expert and source
        turn: T.int32,
    ):
        with T.Kernel(EXPERTS, threads=threads) as expert:
            thread = T.get_thread_binding()
            me, pe, place = N.my_pe(), expert // local, expert % local
            sent = T.alloc_local((1,), "int32")
            sent[0] = 0
            for token in T.serial(TOKENS):
                for k in T.serial(TOP_K):
                    if choices[token, k] == expert:
                        N.put_block(slots[place, me, sent[0], 0], x[token, 0], pe, count=HIDDEN)
                        sent[0] += 1
            N.signal_block(arrived[place, me], turn * (TOKENS + 1) + sent[0], pe)
            N.quiet_block(pe)  # x may be overwritten after the kernel
            if pe == me and thread < n_pes:  # a local expert: thread p waits for rank p
                seen = N.wait(arrived[place, thread], "ge", turn * (TOKENS + 1))
                counts[place, thread] = T.cast(seen, "int32") - turn * (TOKENS + 1)

    return main


def main():
    tsn.init()
    rank, size, generator = tsn.rank(), tsn.size(), torch.Generator().manual_seed(7)
    local = EXPERTS // size
    tokens = torch.randn((size, TOKENS, HIDDEN), generator=generator).to(torch.bfloat16)
    x, slots = tsn.empty((TOKENS, HIDDEN), torch.bfloat16), tsn.empty((local, size, TOKENS, HIDDEN), torch.bfloat16)
    arrived = tsn.zeros((local, size), torch.uint64)
    counts = torch.zeros((local, size), dtype=torch.int32, device=tsn.device())
    kernel = dispatch(size)
    for turn in (1, 2):
        choices = torch.rand((size, TOKENS, EXPERTS), generator=generator).topk(TOP_K).indices.to(torch.int32)
        x.copy_(turn * tokens[rank])
        kernel(x, choices[rank].to(tsn.device()), slots, arrived, counts, turn)
        for place in range(local):
            for source in range(size):
                chosen = (choices[source] == rank * local + place).any(dim=1)
                rows = slots[place, source, : counts[place, source]].cpu()
                assert torch.equal(rows, turn * tokens[source][chosen])
        print(f"rank {rank}, turn {turn}: experts {rank * local} to {rank * local + local - 1} got {counts.tolist()}")
        tsn.barrier()  # the rows are read: the next turn may overwrite them
    tsn.finalize()


if __name__ == "__main__":
    main()
