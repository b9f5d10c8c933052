"""Mutants that one run with the race detector does not show, and why; see test_sweep.py.

By file: the change, its index among changes of its kind in the file, and the reason.
"""

# Harmless.
BEGINS = "the primitive of the block or warp that follows synchronises it where it begins"
TILELANG = "tilelang itself puts a barrier there"
LAST = "the block has met since it read the counter of calls, and nothing else follows"
CHUNKS = "every chunk has a signal of its own, for which its receiver waits; `done` says the same once more"
ANNOUNCED = "the word says whether ranks make the same call; the data have signals of their own"
COUNTED = "all ranks have added in the call before, and so are done with this half, when its count has been seen"
NEXT_CALL = "the source is written again after the target has begun the next call, and so has the data of this one"
WAITED = "wait_block synchronises the block where it ends, after the put"
STARTS = "orders no data: it leaves SMs to other blocks, or tensor cores to other warps"
CALL_BEFORE = "the product of the call before has waited for rows of every PE, sent when it had read the rows of the call before it"
RECEIVED = "the receive phase of the call before, without which none is sent, has waited for the same word"
MET = "the block has met since, and what follows touches nothing that was touched since then"
NUMBERED = "numbering the choices begins with counts of its own, and the block meets before it reads a choice"
BINS = "rows of keys have bins of their own, and the warp meets in the next row before it uses this row's bins again"
TIMED = "the wait behind it is the one that orders; this one tells how long it takes"
OWN = "it tells of what this PE has stored to its own memory, not put: a signal without a fence orders that, too"

ALIGNED = "the wait for wgmma is one instruction of the whole warp, and the scales' slots come again four rings later"

HOSTS = "nothing writes the source again before the hosts meet in tsn.barrier, which waits for all puts"
UNREAD = "in the tutorial's program nothing reads these data afterwards, or writes to their source again"

# Needed, and yet not shown.
HIDDEN = "the simulator makes T.copy of T.tma_copy, and tilelang puts a barrier before it, which a GPU does not have"
# Reported by the program itself.
VALUE = "the program computes with the number that the wait returns, or shows its time: without it no order is missing"

# Not run.
ON_GPUS = "the kernel runs beside the product on GPUs alone; the simulator's blocks in `matmul_reducing` do the same"
FAULTS = "a word that the host reads, of a call that goes wrong: the small runs make none"
NOTHING_LEFT = "in the simulator the kernel before it has sent all pieces, and this one finds none left"

NOT_RUN = {ON_GPUS, NOTHING_LEFT, FAULTS}
HARMLESS = {
    BEGINS, TILELANG, LAST, CHUNKS, ANNOUNCED, NEXT_CALL, WAITED, STARTS, CALL_BEFORE, MET, OWN, UNREAD, TIMED, NUMBERED, BINS, HOSTS,
    COUNTED, RECEIVED, ALIGNED,
}  # fmt: skip
KNOWN: dict[str, dict[tuple[str, int], str]] = {
    "02": {("no sync_threads", 0): BEGINS, ("no sync_threads", 2): LAST},
    "03": {("no quiet_block", 0): UNREAD, ("no wait", 0): VALUE},
    "06": {("put_signal_block in two, no fence", 0): UNREAD, ("no wait_block", 0): VALUE},
    "all_to_all": {("no sync_threads", 0): TILELANG},
    "all_reduce_fp8": {("no sync_threads", 1): LAST},
    "all_to_all_transposed": {
        ("no sync_threads", 1): LAST,
        ("no sync_threads", 4): LAST,
        ("no wait", 1): VALUE,
    },
    "broadcast": {("no sync_threads", 0): BEGINS, ("no sync_threads", 1): BEGINS},
    "buffered": {("no sync_threads", 0): BEGINS, ("no sync_threads", 1): TILELANG},
    "collective": {("sem of st", 0): FAULTS, ("no wait", 1): STARTS},
    "examples/halo": {("no quiet_block", 0): HOSTS, ("no sync_threads", 0): BEGINS},
    "examples/histogram": {("no sync_threads", 0): TILELANG, ("no sync_threads", 1): TILELANG, ("no wait", 0): VALUE},
    "examples/mailbox": {("no sync_threads", 0): TILELANG},
    "examples/matmul_atomics": {("no wait_block", 0): COUNTED, ("no sync_threads", 1): COUNTED},
    "examples/stealing": {("no sync_threads", 1): TILELANG, ("no sync_threads", 3): TILELANG},
    "examples/tree": {("no quiet_block", 0): HOSTS, ("no sync_threads", 1): MET},
    "fused/all_gather_matmul": {("no sync_threads", 0): BEGINS, ("no wait", 0): CALL_BEFORE},
    "fused/expert_matmul": {("no sync_threads", 0): TILELANG, ("no sync_threads", 1): TILELANG},
    "fused/gemm": {
        ("no fence of signal", 0): OWN,
        ("no sync_threads", 0): MET,
        ("no sync_threads", 1): MET,
        ("no sync_threads", 2): TILELANG,
        ("no sync_warp", 1): HIDDEN,
        ("no wait", 1): CALL_BEFORE,
    },
    "fused/matmul_all_reduce": {("no quiet", 0): NOTHING_LEFT},
    "fused/matmul_reduce_scatter": {("no quiet", 0): ON_GPUS},
    "fused/scaled_gemm": {
        ("no barrier_wait", 2): STARTS,
        ("no sync_threads", 0): TILELANG,
        ("no sync_threads", 1): TILELANG,
        ("no sync_warp", 0): ALIGNED,
        ("no sync_warp", 1): STARTS,
    },
    "moe/combine": {
        ("no fence of signal_warp", 0): NOTHING_LEFT,
        ("no sync_threads", 1): CHUNKS,
        ("no sync_threads", 2): LAST,
        ("no sync_warp", 0): BEGINS,
        ("no sync_warp", 3): BEGINS,
    },
    "moe/dispatch": {("no sync_threads", 2): LAST},
    "moe/handshake": {("no quiet", 0): NEXT_CALL, ("no wait", 2): TIMED, ("no wait", 3): RECEIVED},
    "moe/latency_combine": {
        ("no quiet", 0): NEXT_CALL,
        ("no sync_threads", 1): LAST,
        ("no sync_threads", 5): WAITED,
        ("no sync_warp", 2): BEGINS,
        ("no sync_warp", 3): BEGINS,
    },
    "moe/latency_dispatch": {("no sync_threads", 10): LAST, ("sem of st", 0): FAULTS},
    "moe/routing": {
        ("no sync_threads", 8): NUMBERED,
        ("no sync_threads", 12): BEGINS,
        ("no sync_threads", 14): LAST,
        ("no sync_threads", 19): MET,
        ("no sync_threads", 20): BEGINS,
        ("no sync_threads", 22): MET,
        ("no sync_warp", 1): BINS,
    },
    "moe/tiles": {("no fence of signal", 0): OWN, ("no fence of signal", 1): OWN},
    "packets": {("no wait", 0): ANNOUNCED},
    "p2p": {("no sync_threads", 0): TILELANG, ("no sync_threads", 1): BEGINS},
    "reduce_scatter": {
        ("no sync_threads", 4): MET,
        ("no sync_threads", 6): BEGINS,
        ("no sync_threads", 9): LAST,
        ("no wait", 3): ANNOUNCED,
    },
}
