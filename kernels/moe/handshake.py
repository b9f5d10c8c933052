"""How a call begins: every rank tells every rank that its buffers may be written, and what it found wrong."""

import tilelang.language as T

import tilescale_net.language as N
from tilescale_net.kernels.moe.sizes import CODE_BITS, NO_FAULT, OTHER_OUTPUT, TAG_BITS


@T.macro
def report(status, code, rank):
    """Write what was found wrong where the host sees it, the code last."""
    status[1] = T.cast(rank, "int64")
    status[2] = T.int64(0)
    N.st(status[0], T.cast(code, "int64"), sem="release")


@T.macro
def tell(ready, me, epoch, tag, pe):
    """This rank has begun call `epoch`."""
    N.signal(ready[me], (epoch << T.uint64(TAG_BITS)) | T.cast(tag, "uint64"), pe)


@T.macro
def judge(said, tag, rank, status):
    """Compare the word of a rank with this rank's tag; what a rank reports of itself is its fault and nobody's else."""
    code = T.cast(said & T.uint64((1 << CODE_BITS) - 1), "int32")
    theirs = T.cast(said & T.uint64((1 << TAG_BITS) - 1), "int32")
    if tag & ((1 << CODE_BITS) - 1) == 0:
        if code != NO_FAULT:
            report(status, code, rank)
        elif theirs != tag:
            report(status, OTHER_OUTPUT, rank)


@T.macro
def open_call(ready, active, status, me, epoch, tag, block, senders, rank):
    """Made by thread `rank` of every block: begin a call with rank `rank`; blocks that send wait until it has begun too.

    Args:
        ready: [ranks] symmetric words. active: [ranks]. status: see STATUS_WORDS.
        epoch: number of the call. tag: of this rank's call. senders: blocks below this one send.
    """
    said = T.alloc_var("uint64")
    if active[rank] != 0:
        if block == 0:
            tell(ready, me, epoch, tag, rank)
        if block < senders:
            said = N.wait(ready[rank], "ge", epoch << T.uint64(TAG_BITS))
            if block == 0:
                judge(said, tag, rank, status)
