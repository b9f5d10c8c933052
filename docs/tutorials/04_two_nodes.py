"""04: the same kernel on two nodes. The dispatch of tutorial 03, unchanged, where half of the ranks are far away.

VIRTUAL_NODES=2 splits the ranks of this machine into two "nodes" that may only talk through the fabric: a put pushes a
descriptor into a queue, a CPU proxy hands it to libfabric, and the proxy of the target raises the signal when everything
before it has arrived. A kernel does not see the difference, as long as it keeps to docs/memory-model.md and uses put,
get and signal instead of views of remote memory. On a cluster the same script runs with NODES=n NODE_RANK=i.

TSN_CHAOS makes the network misbehave from a seed (reordered, split and delayed messages): a kernel that relies on luck
fails under it, one that keeps to the memory model does not.
"""

import importlib

import tilescale_net as tsn

tutorial_03 = importlib.import_module("03_moe_dispatch")  # the file beside this one


def main():
    tsn.init()
    near = list(tsn.team("node"))
    far = [pe for pe in tsn.team() if pe not in near]
    print(f"rank {tsn.rank()} of {tsn.size()}: ranks {near} are mapped, {far} are reached through the fabric")
    tsn.finalize()
    tutorial_03.main()


if __name__ == "__main__":
    main()
