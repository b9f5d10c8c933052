"""All-reduce in two steps of one kernel: every PE sums its part of the tensor and puts the sums to all PEs.

Blocks b of all PEs process the same slices of all parts. Block b begins when every PE's block b has published its slices,
and ends when their sums have arrived, so no grid barrier is needed.

If only the input is symmetric and may be overwritten, sums stay with the PE that made them and all others read them
there; block b ends when every PE's block b has read its sums. Very large tensors with a symmetric `out`, and any tensor by
"two_shot_pull", are summed this way too. With two PEs each sums the whole tensor: the same bytes on the link, one exchange
fewer.
"""

import functools
import sys
from collections.abc import Callable

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

from .algorithms import Again, Algorithm, Call
from .collective import EXPLICIT_SYNC, STATUS_WORDS, agree_by_blocks, all_agree, dtype_name, is_aligned
from .launches import FLAT, Launch
from .sums import VECTOR_BYTES, add_up, batch_of, pack, store_elements, unpack, vector_of


def _batch(n_pes: int) -> int:
    """Vectors of each PE that a thread has in flight; beyond two PEs fewer than `batch_of`, and fewer blocks, are faster."""
    return batch_of(n_pes) if n_pes == 2 else max(1, 8 // n_pes)


@tsn.jit(name="all_reduce_two_shot", pass_configs=EXPLICIT_SYNC)
def all_reduce_two_shot(n_pes, dtype, staged, pulled=False, aligned=True, threads=512, blocks=64, gathered=False):
    """Kernel `(out, x, target, source, tag, status, ready, arrived, done, calls)`: `out` is the sum of all PEs' `x`; `out`
    may be `x`.

    Args:
        n_pes: number of PEs, at most `threads`; all of them mapped.
        dtype: dtype of `out` and `x` [count]. Sums are as in `reduce_scatter`.
        staged: `source` and `target` are symmetric buffers, and the kernel copies `x` and `out`; otherwise they are the
            memory of `x` and `out`, at the same offset on all PEs.
        pulled: `x` is symmetric, at the same offset on all PEs, and may be overwritten; `out` is in ordinary memory, and
            `target` and `source` are `x`. Excludes `staged`.
        aligned: `out` and `x` begin and end at multiples of 16 bytes; required unless `staged` or `pulled`, and always for
            `x` with `pulled`.
        threads, blocks: launch geometry; all blocks must be able to run at once.
        gathered: sums stay in `target` of the PE that made them, where all others read them. Excludes `staged` and
            `pulled`.

    `source` and `target` [>= ceil(bytes / 16), 16 bytes of dtype] are symmetric. `tag`, `status`, `calls` [blocks] and the
    signals `ready`, `arrived` and `done` [n_pes, blocks]: see `collective.call_word`.
    """
    count, target_rows, source_rows = (T.dynamic(n, "int64") for n in ("count", "target_rows", "source_rows"))
    vector, batch = vector_of(dtype), _batch(n_pes)
    whole = pulled and n_pes == 2  # every PE sums all
    parts = 1 if whole else n_pes

    @T.prim_func
    def main(
        ctx: N.Context(),
        out: T.Tensor((count,), dtype),
        x: T.Tensor((count,), dtype),
        target: T.Tensor((target_rows, vector), dtype),
        source: T.Tensor((source_rows, vector), dtype),
        tag: T.int32,
        status: T.Tensor((STATUS_WORDS,), "int64"),
        ready: T.Tensor((n_pes, blocks), "uint64"),
        arrived: T.Tensor((n_pes, blocks), "uint64"),
        done: T.Tensor((n_pes, blocks), "uint64"),
        calls: T.Tensor((blocks,), "uint64"),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            me = N.my_pe()
            call = T.alloc_var("uint64", calls[block] + T.uint64(1))
            agrees = T.alloc_shared((n_pes,), "int32")
            vectors = T.ceildiv(count, T.int64(vector))
            part = T.alloc_var("int64", T.ceildiv(vectors, T.int64(parts)))
            share = T.max(T.ceildiv(part, T.int64(blocks)), T.int64(threads))
            first = T.alloc_var("int64", T.min(share * block, part))
            end = T.alloc_var("int64", T.min(first + share, part))
            if first < end:
                sources = [N.remote(source, p) for p in range(n_pes)]
                targets = (
                    [] if whole else [target] if pulled or gathered else [N.remote(target, p) for p in range(n_pes)]
                )
                if staged:
                    for p in T.serial(n_pes):
                        pack(
                            source, 0, x, p * part + first, T.min(p * part + end, vectors),
                            thread, threads, count, dtype, aligned,
                        )  # fmt: skip
                    T.sync_threads()
                agree_by_blocks(agrees, ready, block, call, tag, status, thread, me, n_pes)
                agreed = T.alloc_var("int32")
                all_agree(agreed, agrees, n_pes)
                last = T.alloc_var("int64", T.if_then_else(agreed != 0, end, first))
                result = T.alloc_local((batch, vector), dtype)
                limit = T.alloc_var("int64")
                own = 0 if whole else me * part
                limit = T.min(own + last, vectors)
                for turn in T.serial(T.ceildiv(last - first, T.int64(threads * batch))):
                    i = own + first + turn * threads * batch + thread
                    add_up(result, sources, dtype, i, limit, threads, batch)
                    for target_of_pe in targets:
                        for u in T.unroll(batch):
                            if i + u * threads < limit:
                                for v in T.vectorized(vector):
                                    target_of_pe[i + u * threads, v] = result[u, v]
                    if pulled:
                        for u in T.unroll(batch):
                            if i + u * threads < limit:
                                store_elements(out, i + u * threads, result, u, count, dtype, aligned)
                if not whole:
                    T.sync_threads()
                    if thread < n_pes and thread != me:
                        N.signal(arrived[me, block], call, thread, fence=True)
                        N.wait(arrived[thread, block], "ge", T.cast(call, "int64"))
                if (pulled and not whole) or gathered:
                    T.sync_threads()
                    for hop in T.serial(1, n_pes):
                        pe = (me + hop) % n_pes
                        unpack(
                            out, N.remote(target if gathered else source, pe), pe * part + first, T.min(pe * part + last, vectors),
                            thread, threads, count, dtype, aligned,
                        )  # fmt: skip
                if pulled or gathered:
                    # All PEs have read this memory before later work may overwrite it.
                    T.sync_threads()
                    if thread < n_pes and thread != me:
                        N.signal(done[me, block], call, thread)
                        N.wait(done[thread, block], "ge", T.cast(call, "int64"))
                if staged:
                    T.sync_threads()
                    for p in T.serial(n_pes):
                        unpack(
                            out, target, p * part + first, T.min(p * part + end, vectors),
                            thread, threads, count, dtype, aligned,
                        )  # fmt: skip
            T.sync_threads()
            if thread == 0:
                calls[block] = call

    return main


# Most PEs > 2 read sums in place from this many bytes on. Four H100s: 64 MiB 320.2 us, 324.6 when they are put.
PULL_FROM = 64 << 20


def _blocks(op) -> int:
    return op.blocks if op.n_pes == 2 else max(1, op.blocks // 2)


def _launch(gathers: bool, op, memory: dict[str, torch.Tensor], call: Call) -> Again:
    dtype, pulled = call.out.dtype, call.zero_copy and call.overwrite_x
    gathers = gathers or (op.n_pes > 2 and call.out.nbytes >= PULL_FROM)
    gathered = gathers and call.zero_copy and not pulled
    shape, aligned = (-1, VECTOR_BYTES // dtype.itemsize), is_aligned(VECTOR_BYTES, call.out, call.x)
    vectors = {"target": (shape, None), "source": (shape, None)}

    def make() -> Launch:
        kernel = all_reduce_two_shot(
            op.n_pes, dtype_name(dtype), not call.zero_copy, pulled, aligned, op.threads, _blocks(op), gathered
        )
        constants = {name: memory[name] for name in ("ready", "arrived", "done", "calls")} | {
            "status": op.status_record
        }
        if call.zero_copy:
            parameters: tuple[str, ...] = "tag", "out", "x", "target", "source"
        else:
            parameters = "tag", "out", "x"
            constants |= {name: memory[name].view(dtype).view(shape) for name in vectors}
        forms = {"out": FLAT, "x": FLAT} | {name: form for name, form in vectors.items() if call.zero_copy}
        return Launch(kernel, constants, parameters, op.world, forms=forms)

    launch, tag = op.prepared(("two_shot", dtype, aligned, call.zero_copy, pulled, gathered), make), call.tag
    again: Callable[[torch.Tensor, torch.Tensor], None]
    if not call.zero_copy:
        again = functools.partial(launch, tag)
    elif pulled:
        again = lambda out, x: launch(tag, out, x, x, x)  # noqa: E731
    else:
        again = lambda out, x: launch(tag, out, x, out, x)  # noqa: E731
    again(call.out, call.x)
    return again


def _row(name: str, gathers: bool) -> Algorithm:
    return Algorithm(
        name,
        functools.partial(_launch, gathers),
        capacity=lambda op: op.staging_bytes,
        buffers=lambda op: {
            **{name: ((op.staging_bytes,), torch.uint8) for name in ("source", "target")},
            **{name: ((op.n_pes, _blocks(op)), torch.uint64) for name in ("ready", "arrived", "done")},
        },
        counters=lambda op: {"calls": _blocks(op)},
        auto_up_to=lambda op: 0 if gathers else sys.maxsize,
        zero_copy=True,
    )


TWO_SHOT, TWO_SHOT_PULL = _row("two_shot", False), _row("two_shot_pull", True)
