"""The kernel between NCCL's calls in decode_context.py: each rank's attention outputs times their weight in the merge."""

from typing import Any

import tilelang.language as T

import tilescale_net as tsn
from tilescale_net.kernels.sums import vector_of


@tsn.jit(name="weighted_outputs")
def weighted_outputs(n_pes: int, dtype: str, heads: int, dim: int, by_heads: bool, threads: int = 256) -> Any:
    """Kernel `(out, x, lse, lses)`: x [batch, heads, vectors, vector], times the weight of this rank by the lse of all
    (float32 [n_pes, batch, heads]). `by_heads`: `out` is [heads, batch, …], for a reduce-scatter by heads."""
    batch, vector = T.dynamic("batch", "int64"), vector_of(dtype)
    width = dim // vector
    shape = (heads, batch, width, vector) if by_heads else (batch, heads, width, vector)

    @T.prim_func
    def main(
        out: T.Tensor(shape, dtype),
        x: T.Tensor((batch, heads, width, vector), dtype),
        lse: T.Tensor((batch, heads), "float32"),
        lses: T.Tensor((n_pes, batch, heads), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(batch * heads * width, T.int64(threads)), threads=threads) as block:
            index = block * T.int64(threads) + T.get_thread_binding()
            row, i = index // width, index % width
            if row < batch * heads:
                b, h = row // heads, row % heads
                total, top = T.alloc_var("float32"), T.alloc_var("float32")
                top = lses[0, b, h]
                for p in T.unroll(1, n_pes):
                    top = T.max(top, lses[p, b, h])
                total = T.float32(0)
                for p in T.unroll(n_pes):
                    total += T.exp(lses[p, b, h] - top)
                given, found = T.alloc_local((vector,), dtype), T.alloc_local((vector,), dtype)
                for v in T.vectorized(vector):
                    given[v] = x[b, h, i, v]
                for v in T.unroll(vector):
                    found[v] = T.cast(T.cast(given[v], "float32") * (T.exp(lse[b, h] - top) / total), dtype)
                if by_heads:
                    for v in T.vectorized(vector):
                        out[h, b, i, v] = found[v]
                else:
                    for v in T.vectorized(vector):
                        out[b, h, i, v] = found[v]

    return main
