"""A kernel that exercises the device queue alone, and what it is compared with; queue_probes.h holds the loops."""

import os
from enum import IntEnum

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N

THREADS = 128  # of a block; those that have nothing to do leave at once

with open(os.path.join(os.path.dirname(__file__), "queue_probes.h")) as _file:
    SOURCE = _file.read()


class Probe(IntEnum):
    """What a launch does, `turns` times; the same as tsn::probe::Kind."""

    PUSH = 0  # puts behind one fence
    PUSH_PUBLISHED = 1  # puts that publish a payload each
    FENCE = 2  # a payload written, and a system-scope fence
    QUEUE_TRIP = 3  # a flush, until its completion is seen
    QUEUE_TRIP_PUBLISHED = 4  # a published put and a flush
    FLAG_TRIP = 5  # a relaxed flag at `out`, until the CPU's answer is seen at `into`
    FLAG_TRIP_PUBLISHED = 6  # the same behind a payload and a fence
    ONE_WAY = 7  # put_signal to the word at `out`, until it is seen at `into`, the target's own word
    RELEASE_TRIP = 8  # FLAG_TRIP with a flag that has release order
    RELEASE_TRIP_PUBLISHED = 9  # the same behind a payload


@tsn.jit
def probe():
    """Kernel `(kind, payload, bytes, out, into, pes, first, turns, lanes, warps, blocks, only)`; one serves all of Probe.

    Args:
        kind: a Probe.
        payload: address of the data, of which each thread takes `bytes` bytes, a multiple of 8.
        out, into: addresses of words, see Probe; 0 where they are not used.
        pes: blocks push to PEs 1 ... pes in turn.
        first: flags and signals take the values first + 1 ... first + turns.
        lanes, warps, blocks: the first `lanes` lanes of the first `warps` warps of each block take part.
        only: the one block that takes part, the others leave at once; negative: all do.
    """

    @T.prim_func
    def main(
        ctx: N.Context(),
        kind: T.int32,
        payload: T.int64,
        bytes: T.int64,
        out: T.int64,
        into: T.int64,
        pes: T.int32,
        first: T.int64,
        turns: T.int32,
        lanes: T.int32,
        warps: T.int32,
        blocks: T.int32,
        only: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            pe = 1 + block % pes
            if thread % 32 < lanes and thread < 32 * warps and (only < 0 or block == only):
                T.call_extern(
                    "void", "tsn::probe::run",
                    T.address_of(ctx[0]), kind, payload, bytes, out, into, pe, first, turns,
                )  # fmt: skip

    return main
