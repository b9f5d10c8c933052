"""Kernels of tiles, as tilelang's documentation writes them: matrix products and attention."""

import tilelang.language as T


def matmul(m, n, k, tile, dtype, out="float32", total="float32", kind="ss", transposed=(False, False), stages=2):
    """`c = a @ b`, one tile a block; `kind` states which operands lie in shared memory and which in registers."""
    (bm, bn, bk), (ta, tb) = tile, transposed

    @T.prim_func
    def kernel(
        a: T.Tensor((k, m) if ta else (m, k), dtype), b: T.Tensor((n, k) if tb else (k, n), dtype),
        c: T.Tensor((m, n), out),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=128) as (x, y):
            left = T.alloc_shared((bk, bm) if ta else (bm, bk), dtype)
            right = T.alloc_shared((bn, bk) if tb else (bk, bn), dtype)
            acc = T.alloc_fragment((bm, bn), total)
            left_local = T.alloc_fragment((bm, bk), dtype)
            right_local = T.alloc_fragment((bk, bn), dtype)
            T.use_swizzle(4)
            T.clear(acc)
            for i in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                if ta:
                    T.copy(a[i * bk, y * bm], left)
                else:
                    T.copy(a[y * bm, i * bk], left)
                if tb:
                    T.copy(b[x * bn, i * bk], right)
                else:
                    T.copy(b[i * bk, x * bn], right)
                if kind == "ss":
                    T.gemm(left, right, acc, transpose_A=ta, transpose_B=tb)
                elif kind == "rs":
                    T.copy(left, left_local)
                    T.gemm(left_local, right, acc, transpose_B=tb)
                else:
                    T.copy(right, right_local)
                    T.gemm(left, right_local, acc, transpose_A=ta)
            T.copy(acc, c[y * bm, x * bn])

    return kernel


def persistent(m, n, k, tile, blocks, dtype):
    """The same by a few blocks that take one tile after the other, through shared memory on the way out."""
    bm, bn, bk = tile

    @T.prim_func
    def kernel(a: T.Tensor((m, k), dtype), b: T.Tensor((k, n), dtype), c: T.Tensor((m, n), dtype)):
        with T.Kernel(blocks, threads=128) as block:
            left = T.alloc_shared((bm, bk), dtype)
            right = T.alloc_shared((bk, bn), dtype)
            result = T.alloc_shared((bm, bn), dtype)
            acc = T.alloc_fragment((bm, bn), "float32")
            for y, x in T.Persistent([T.ceildiv(m, bm), T.ceildiv(n, bn)], blocks, block):
                T.clear(acc)
                for i in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                    T.copy(a[y * bm, i * bk], left)
                    T.copy(b[i * bk, x * bn], right)
                    T.gemm(left, right, acc)
                T.copy(acc, result)
                T.copy(result, c[y * bm, x * bn])

    return kernel


def attention(length, dim, bm, bn, dtype):
    """`softmax(q @ k.T * ln 2) @ v`, one pass over the keys."""

    @T.prim_func
    def kernel(
        q: T.Tensor((length, dim), dtype), k: T.Tensor((length, dim), dtype), v: T.Tensor((length, dim), dtype),
        o: T.Tensor((length, dim), dtype),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(length, bm), threads=128) as x:
            queries = T.alloc_shared((bm, dim), dtype)
            keys = T.alloc_shared((bn, dim), dtype)
            values = T.alloc_shared((bn, dim), dtype)
            scores = T.alloc_fragment((bm, bn), "float32")
            weights = T.alloc_fragment((bm, bn), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            top = T.alloc_fragment((bm,), "float32")
            before = T.alloc_fragment((bm,), "float32")
            scale = T.alloc_fragment((bm,), "float32")
            row_sum = T.alloc_fragment((bm,), "float32")
            total = T.alloc_fragment((bm,), "float32")
            T.copy(q[x * bm, 0], queries)
            T.fill(acc, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity("float32"))
            for i in T.Pipelined(T.ceildiv(length, bn), num_stages=1):
                T.copy(k[i * bn, 0], keys)
                T.clear(scores)
                T.gemm(queries, keys, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(v[i * bn, 0], values)
                T.copy(top, before)
                T.reduce_max(scores, top, dim=1, clear=False)
                for r in T.Parallel(bm):
                    scale[r] = T.exp2(before[r] - top[r])
                for r, c in T.Parallel(bm, bn):
                    scores[r, c] = T.exp2(scores[r, c] - top[r])
                T.reduce_sum(scores, row_sum, dim=1)
                for r in T.Parallel(bm):
                    total[r] = total[r] * scale[r] + row_sum[r]
                T.copy(scores, weights)
                for r, c in T.Parallel(bm, dim):
                    acc[r, c] *= scale[r]
                T.gemm(weights, values, acc, policy=T.GemmWarpPolicy.FullRow)
            for r, c in T.Parallel(bm, dim):
                acc[r, c] /= total[r]
            T.copy(acc, o[x * bm, 0])

    return kernel
