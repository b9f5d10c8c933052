"""The steps of combine where rows cross the network once per node; node_combine.py puts them together."""

import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tilescale_net.kernels.moe import combine_throughput_steps as steps
from tilescale_net.kernels.moe.row_ops import add_scaled, clear, load_batch, store_quantised, store_rounded


@tsn.macro
def send_rows(
    s, y, row_weight, row_values, dst, dst_scales, dst_values, records, base, first: T.Ref, peer: T.Ref, target: T.Ref, c: T.Ref,
    n: T.Ref, lane,
):  # fmt: skip
    """Sum the `n` rows of chunk `c` for `peer` straight into rows `first` … of `dst` at `target`, a rank of this node."""
    if s.unchanged:
        N.put_warp(dst[first, 0], y[base[peer] + c * s.chunk, 0], target, count=n * s.hidden)
    else:
        # A tuple, because tilelang renames a parameter that is given another name.
        there = (
            N.remote(dst, target),
            N.remote(dst_scales, target) if s.quantised else dst_scales,
            N.remote(dst_values, target) if s.valued != "" else dst_values,
        )
        for q in T.serial(n):
            steps.send_row(
                s, there[0], there[1], there[2], first + q, y, row_weight, row_values, records, peer, c * s.chunk + q,
                base[peer], lane,
            )  # fmt: skip


@tsn.macro
def sum_in_node(
    s,
    at,
    plan,
    staged,
    staged_scales,
    row: T.Ref,
    relayed,
    node_plan,
    from_row,
    piece,
    acc,
    node: T.Ref,
    k: T.Ref,
    i: T.Ref,
    lane,
):
    """Sum row `i` of slot `k` over the ranks of this node, in their order, from where each of them keeps its own."""
    width, batch, group = s.width, s.send_batch, s.send_group
    for b in T.serial(-(-s.units // (32 * batch))):
        clear(acc, batch * width)
        for p in T.serial(-(-at.size // group)):
            for g in T.unroll(group):
                from_row[g] = -1
                if p * group + g < at.size:
                    from_row[g] = node_plan[plan.gather(k, i, p * group + g)]
                    if from_row[g] >= 0:
                        there = (N.remote(relayed, node * at.size + p * group + g),)
                        load_batch(
                            piece, there[0], from_row[g], b * 32 * batch, lane, s.units, width, batch, g * batch * width
                        )
            for g in T.unroll(group):
                if from_row[g] >= 0:
                    add_scaled(acc, piece, T.float32(1), batch * width, g * batch * width)
        if s.quantised:
            store_quantised(staged, staged_scales, row, acc, b * 32 * batch, lane, s.units, width, batch)
        else:
            store_rounded(staged, row, acc, b * 32 * batch, lane, s.units, width, batch, s.dtype)


@tsn.macro
def sum_values_in_node(
    s,
    at,
    plan,
    staged_values,
    row: T.Ref,
    relayed_values,
    node_plan,
    node: T.Ref,
    k: T.Ref,
    i: T.Ref,
    place: T.Ref,
    total: T.Ref,
    lane,
):
    """Add up the numbers of a token's choices over the ranks of this node."""
    for g in T.serial((s.top_k + 31) // 32):
        if g * 32 + lane < s.top_k:
            total = T.float32(0)
            for r in T.serial(at.size):
                place = node_plan[plan.gather(k, i, r)]
                if place >= 0:
                    there = (N.remote(relayed_values, node * at.size + r),)
                    total = total + there[0][place, g * 32 + lane]
            staged_values[row, g * 32 + lane] = total


@tsn.macro
def sum_values(s, at, plan, out_values, slot_values, node_plan, token: T.Ref, place: T.Ref, total: T.Ref, lane):
    """Add up the numbers of a token's choices over its origins."""
    for g in T.serial((s.top_k + 31) // 32):
        if g * 32 + lane < s.top_k:
            total = T.float32(0)
            for o in T.serial(at.origins):
                place = node_plan[plan.place(token, o)]
                if place >= 0:
                    total = total + slot_values[node_plan[plan.base(o)] + place, g * 32 + lane]
            out_values[token, g * 32 + lane] = total
