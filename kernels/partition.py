"""How the blocks of a kernel share a run of elements."""

import tilelang.language as T
from tilelang import tvm

# Bytes below which a slice of its own does not pay for the signals that it needs; where PEs are on other nodes, for the
# messages and copies of a proxy; and where a node has several PEs, too, whose blocks also pass data on within it, which
# many do faster.
MIN_BYTES = 16 * 1024
MIN_BYTES_OVER_NODES = 128 * 1024
MIN_BYTES_WITH_GATEWAYS = 32 * 1024
# Slices begin at multiples of this, so that they are as well aligned as the tensors themselves.
ALIGN_BYTES = 128


def slice_elements(count, blocks: int, dtype: str, least_bytes: int = MIN_BYTES):
    """Elements of a slice, int64, when `blocks` blocks share `count` elements of `dtype`; called in a traced kernel.

    `least_bytes`: of a slice, but for the last. Block b has [b * slice, min((b + 1) * slice, count)); blocks whose slice begins at or beyond `count` have none.
    """
    element = max(1, tvm.DataType(dtype).bits * tvm.DataType(dtype).lanes // 8)
    align, least = max(1, ALIGN_BYTES // element), max(1, least_bytes // element)
    share = T.max(T.ceildiv(count, T.int64(blocks)), T.int64(least))
    return T.ceildiv(share, T.int64(align)) * align


# Bits of the number of a piece within a call; the upper ones have the call's.
PIECE_BITS = 20


def piece_number(call, piece):
    """Value of a signal when the first `piece` pieces of call `call` (uint64) are there; above all of earlier calls."""
    return (call << T.uint64(PIECE_BITS)) + T.cast(piece, "uint64")
