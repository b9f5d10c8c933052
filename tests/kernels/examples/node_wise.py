"""A sum over all ranks by nodes: views of memory in the node, leaders exchange their nodes' sums."""

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests.kernels.examples.support import check, same_on_all

WIDTH = 64


@tsn.jit
def node_wise():
    """Kernel `(x, of_node, of_others, arrived, out, call)`."""
    nodes = T.dynamic("nodes")

    @T.prim_func
    def main(
        ctx: N.Context(), x: T.Tensor((WIDTH,), "float32"), of_node: T.Tensor((WIDTH,), "float32"),
        of_nodes: T.Tensor((nodes, WIDTH), "float32"), arrived: T.Tensor((nodes,), "uint64"),
        out: T.Tensor((WIDTH,), "float32"), call: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=WIDTH):
            tx, me, n, in_node = T.get_thread_binding(), N.my_pe(), N.n_pes(), N.n_node_pes()
            node, leader = me // in_node, me // in_node * in_node
            total = T.alloc_local((1,), "float32")
            x[tx] = x[tx] + 1.0
            N.barrier_node()  # all have made their part
            if me == leader:
                total[0] = 0.0
                for i in T.serial(in_node):
                    total[0] += N.remote(x, leader + i)[tx]
                of_node[tx] = total[0]
                for k in T.serial(n // in_node):
                    N.put_signal_block(of_nodes[node, 0:WIDTH], of_node, k * in_node, arrived[node], call)
                total[0] = 0.0
                for k in T.serial(n // in_node):
                    N.wait_block(arrived[k], "ge", call)
                    total[0] += of_nodes[k, tx]
                for i in T.serial(in_node):
                    if leader + i == me:
                        out[tx] = total[0]
                    else:
                        N.remote(out, leader + i)[tx] = total[0]
                N.quiet_block()
            N.barrier_node()  # the leader has stored everywhere, and read everything
            x[tx] = out[tx]

    return main


def small_run(seed):
    n, me = tsn.size(), tsn.rank()
    random, kernel = same_on_all(seed), node_wise()
    nodes = tsn.world().topology.nodes
    x, of_node, out = (tsn.empty((WIDTH,)) for _ in range(3))
    of_nodes, arrived = tsn.empty((nodes, WIDTH)), tsn.zeros((nodes,), torch.uint64)
    for call in (1, 2):
        inputs = torch.randint(99, (n, WIDTH), generator=random).float()
        x.copy_(inputs[me])
        kernel(x, of_node, of_nodes, arrived, out, call)
        check(x, (inputs + 1).sum(0))
        tsn.barrier()
