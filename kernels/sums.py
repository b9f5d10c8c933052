"""Sums over all PEs of values at the same offset of their mapped memory, in the order of the PEs.

Values are loaded from the peers' memory into registers. A pull is bound by the bytes in flight, so a thread loads several
vectors from all PEs before it adds the first.
"""

import tilelang.language as T
from tilelang import tvm

import tilescale_net as tsn

VECTOR_BYTES = 16
COPIES = 4  # vectors of a local copy in flight per thread


def accumulator(dtype: str) -> str:
    """The dtype in which values of `dtype` are summed."""
    return "float32" if dtype.startswith(("float16", "bfloat16", "float8")) else dtype


def vector_of(dtype: str) -> int:
    """Elements of a vector: 16 bytes."""
    return VECTOR_BYTES * 8 // tvm.DataType(dtype).bits


def batch_of(n_pes: int) -> int:
    """Vectors per PE in flight per thread: as many as fit into 64 registers."""
    return max(1, 16 // n_pes)


@tsn.macro
def add_up(result, views, dtype, first, end, threads, batch, stride=0):
    """result[u] = the sum of view[first + u * threads] over the views, in their order, rounded once; for vectors below
    `end`. `result`: local [batch, vector] of `dtype`. `views`: list of tensors [vectors, vector] of `dtype`. `stride`: rows
    from a view's first to the next view's."""
    vector, total_dtype = vector_of(dtype), accumulator(dtype)
    part = T.alloc_local((len(views), batch, vector), dtype)
    totals = T.alloc_local((batch, vector), total_dtype)
    for p, view in enumerate(views):
        for u in T.unroll(batch):
            if first + u * threads < end:
                for v in T.vectorized(vector):
                    part[p, u, v] = view[p * stride + first + u * threads, v]
    T.clear(totals)
    for p in T.unroll(len(views)):
        for u in T.unroll(batch):
            for v in T.unroll(vector):
                totals[u, v] += T.cast(part[p, u, v], total_dtype)
    for u in T.unroll(batch):
        for v in T.vectorized(vector):
            result[u, v] = T.cast(totals[u, v], dtype)


@tsn.macro
def add_part(totals, of_nodes, part, p, nodes):
    """totals += part, the values of PE p in the dtype that is sent; both local [batch, vector].

    With `nodes` (`collective.Nodes`), at the last PE of a node its total is rounded to that dtype and added to `of_nodes`.
    """
    dtype, total_dtype, (batch, vector) = part.dtype, totals.dtype, part.shape
    for u in T.unroll(batch):
        for v in T.unroll(vector):
            totals[u, v] += T.cast(part[u, v], total_dtype)
    if nodes is not None:
        if nodes.is_last(p):
            for u in T.unroll(batch):
                for v in T.unroll(vector):
                    part[u, v] = T.cast(totals[u, v], dtype)
                    of_nodes[u, v] += T.cast(part[u, v], total_dtype)
            T.clear(totals)


@tsn.macro
def pack(vectors, at, elements, first, end, thread, threads, count, dtype, aligned):
    """vectors[at + i] = the i-th 16 bytes of `elements`, zero beyond `count`, for i in [first, end). Called by a block.
    `vectors`: [vectors, vector] of `dtype`; `elements`: [count]. `aligned`: `elements` begins at a multiple of 16 bytes and
    has whole vectors."""
    vector = vector_of(dtype)
    rows = T.alloc_local((COPIES, vector), dtype)
    for turn in T.serial(T.ceildiv(end - first, T.int64(threads * COPIES))):
        i = first + turn * threads * COPIES + thread
        for u in T.unroll(COPIES):
            if i + u * threads < end:
                if aligned:
                    for v in T.vectorized(vector):
                        rows[u, v] = elements[(i + u * threads) * vector + v]
                else:
                    for v in T.unroll(vector):
                        if (i + u * threads) * vector + v < count:
                            rows[u, v] = elements[(i + u * threads) * vector + v]
                        else:
                            rows[u, v] = T.cast(0, dtype)
        for u in T.unroll(COPIES):
            if i + u * threads < end:
                for v in T.vectorized(vector):
                    vectors[at + i + u * threads, v] = rows[u, v]


@tsn.macro
def store_elements(elements, i, rows, u, count, dtype, aligned):
    """The i-th 16 bytes of `elements`, up to its end, = rows[u]."""
    vector = vector_of(dtype)
    if aligned:
        for v in T.vectorized(vector):
            elements[i * vector + v] = rows[u, v]
    else:
        for v in T.unroll(vector):
            if i * vector + v < count:
                elements[i * vector + v] = rows[u, v]


@tsn.macro
def unpack(elements, vectors, first, end, thread, threads, count, dtype, aligned):
    """Inverse of `pack`, from vectors[i]."""
    vector = vector_of(dtype)
    rows = T.alloc_local((COPIES, vector), dtype)
    for turn in T.serial(T.ceildiv(end - first, T.int64(threads * COPIES))):
        i = first + turn * threads * COPIES + thread
        for u in T.unroll(COPIES):
            if i + u * threads < end:
                for v in T.vectorized(vector):
                    rows[u, v] = vectors[i + u * threads, v]
        for u in T.unroll(COPIES):
            if i + u * threads < end:
                store_elements(elements, i + u * threads, rows, u, count, dtype, aligned)
