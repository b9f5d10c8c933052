"""04: the same kernel on two nodes. The dispatch of tutorial 03, unchanged, with half of the ranks on another node.

VIRTUAL_NODES=2 splits the ranks of this machine into two "nodes" that communicate only through the fabric: a put pushes
a descriptor into a queue, a CPU proxy passes it to libfabric, and the target's proxy sets the signal after all data
before it have arrived. A kernel needs no changes if it follows docs/memory-model.md and uses put, get and signal instead
of views of remote memory. On a cluster the same script runs with NODES=n NODE_RANK=i.

TSN_CHAOS reorders, splits and delays messages by a seed: a kernel that relies on luck fails, a kernel that follows the
memory model does not.
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
