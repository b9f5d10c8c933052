"""Sum of rows that lie in this PE's memory, in their order."""

import tilelang.language as T

import tilescale_net as tsn

from .sum_of_peers import accumulator


@tsn.jit(name="sum_of_rows")
def sum_of_rows(rows, dtype, threads=512, blocks=16):
    """Kernel `(out, x)`: `out` [count] is the sum of the rows of `x` [rows, count], both of `dtype`.

    Args:
        rows: how many there are.
        dtype: of both; sums are made as `accumulator` says and rounded once.
        threads, blocks: launch geometry.
    """
    count, total_dtype = T.dynamic("count", "int64"), accumulator(dtype)

    @T.prim_func
    def main(out: T.Tensor((count,), dtype), x: T.Tensor((rows, count), dtype)):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            for turn in T.serial(T.ceildiv(count, T.int64(blocks * threads))):
                i = (turn * blocks + block) * threads + thread
                if i < count:
                    total = T.alloc_var(total_dtype)
                    total = T.cast(0, total_dtype)
                    for row in T.unroll(rows):
                        total += T.cast(x[row, i], total_dtype)
                    out[i] = T.cast(total, dtype)

    return main
