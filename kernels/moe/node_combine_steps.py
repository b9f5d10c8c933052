"""The steps of combine where rows cross the network once per node; node_combine.py puts them together."""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe import combine_throughput_steps as steps
from tilescale_net.kernels.moe.row_ops import add_scaled, clear, load_batch, store_quantised, store_rounded


@tsn.macro
def send_rows(s, own, dst, places, chunk, first: T.Ref, target: T.Ref, lane):
    """Sum the rows of a chunk straight into rows `first` … of `dst` at `target`, a rank of this node."""
    if s.unchanged:
        N.put_warp(
            dst.rows[first, 0], own.y[places.base[chunk.peer] + chunk.c * s.chunk, 0], target, count=chunk.n * s.hidden
        )
    else:
        there = dst.at(s, target)
        for q in T.serial(chunk.n):
            steps.send_row(s, there, first + q, own, chunk.peer, chunk.c * s.chunk + q, places.base[chunk.peer], lane)


@tsn.macro
def sum_in_node(s, mem, tables, work, row: T.Ref, node: T.Ref, k: T.Ref, i: T.Ref, lane):
    """Sum row `i` of slot `k` over the ranks of this node, in their order, from where each of them keeps its own."""
    at, plan, width, batch, group = tables.at, tables.plan, s.width, s.send_batch, s.send_group
    for b in T.serial(-(-s.units // (32 * batch))):
        clear(work.acc, batch * width)
        for p in T.serial(-(-at.size // group)):
            for g in T.unroll(group):
                work.from_row[g] = -1
                if p * group + g < at.size:
                    work.from_row[g] = tables.words[plan.gather(k, i, p * group + g)]
                    if work.from_row[g] >= 0:
                        # A tuple, because tilelang renames a tensor that is given another name.
                        there = (N.remote(mem.relayed.rows, node * at.size + p * group + g),)
                        load_batch(
                            work.piece, there[0], work.from_row[g], b * 32 * batch, lane, s.units, width, batch,
                            g * batch * width,
                        )  # fmt: skip
            for g in T.unroll(group):
                if work.from_row[g] >= 0:
                    add_scaled(work.acc, work.piece, T.float32(1), batch * width, g * batch * width)
        if s.quantised:
            store_quantised(
                mem.staged.rows, mem.staged.scales, row, work.acc, b * 32 * batch, lane, s.units, width, batch
            )
        else:
            store_rounded(mem.staged.rows, row, work.acc, b * 32 * batch, lane, s.units, width, batch, s.dtype)


@tsn.macro
def sum_values_in_node(s, mem, tables, row: T.Ref, node: T.Ref, k: T.Ref, i: T.Ref, place: T.Ref, total: T.Ref, lane):
    """Add up the numbers of a token's choices over the ranks of this node."""
    at, plan = tables.at, tables.plan
    for g in T.serial((s.top_k + 31) // 32):
        if g * 32 + lane < s.top_k:
            total = T.float32(0)
            for r in T.serial(at.size):
                place = tables.words[plan.gather(k, i, r)]
                if place >= 0:
                    there = (N.remote(mem.relayed.values, node * at.size + r),)
                    total = total + there[0][place, g * 32 + lane]
            mem.staged.values[row, g * 32 + lane] = total


@tsn.macro
def sum_values(s, mem, tables, token: T.Ref, place: T.Ref, total: T.Ref, lane):
    """Add up the numbers of a token's choices over its origins."""
    at, plan = tables.at, tables.plan
    for g in T.serial((s.top_k + 31) // 32):
        if g * 32 + lane < s.top_k:
            total = T.float32(0)
            for o in T.serial(at.origins):
                place = tables.words[plan.place(token, o)]
                if place >= 0:
                    total = total + mem.slots.values[tables.words[plan.base(o)] + place, g * 32 + lane]
            mem.result.values[token, g * 32 + lane] = total
