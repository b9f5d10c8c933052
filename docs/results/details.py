"""Tables with all rows of a report, for the pages of one subject."""

import summary
from reports import gpus, markdown, rows, run, size


def copies() -> str:
    (table,) = run("unrolledcp_p2p")["tables"]
    by_threads = {n: {r["bytes"]: r for r in table["rows"] if r["threads"] == n} for n in (128, 1024)}

    def both(row: dict, system: str, unit: str) -> str:
        return " / ".join(f"{row[f'{system}_{way}_{unit}']:.2f}" for way in ("push", "pull"))

    lines = []
    for nbytes, few in by_threads[128].items():
        many = by_threads[1024][nbytes]
        lines.append([
            size(nbytes), both(few, "nvshmem", "us"), both(few, "tilescale_net", "us"), both(few, "tilescale_net", "gbps"),
            both(many, "nvshmem", "us"), both(many, "tilescale_net", "us"),
        ])  # fmt: skip
    head = ["push / pull", "NVSHMEM, 128 threads (us)", "tilescale_net, 128 threads (us)", "the same (GB/s)"]
    return markdown([*head, "NVSHMEM, 1024 threads (us)", "tilescale_net, 1024 threads (us)"], lines)


def signals() -> str:
    (table,) = run("put_signal")["tables"]
    by_threads = {n: {r["bytes"]: r for r in table["rows"] if r["threads"] == n} for n in (128, 1024)}
    lines = []
    for nbytes, few in by_threads[128].items():
        many = by_threads[1024][nbytes]
        if "line" in few:
            lines.append(
                [f"{size(nbytes)}, beside the signal word", f"{few['line']:.2f}", "", f"{many['line']:.2f}", ""]
            )
        lines.append([size(nbytes), *(f"{row[key]:.2f}" for row in (few, many) for key in ("auto", "nvshmem"))])
    return markdown(["one way (us)", "128 threads", "NVSHMEM, 128", "1024 threads", "NVSHMEM, 1024"], lines)


def pushes() -> str:
    rows = run("queue")["tables"][0]["rows"]
    head = ["M pushes/s: blocks", "warps of a block", "lanes of a warp", "queues", "each published", "behind one fence"]
    lines = [
        [*(r[key] for key in ("blocks", "warps", "lanes", "queues")), f"{r['published']:.3g}", f"{r['batch']:.3g}"]
        for r in rows
    ]
    return markdown([*head, "sustained"], [[*line, f"{r['sustained']:.3g}"] for line, r in zip(lines, rows)], 0)


def round_trips() -> str:
    head = ["round trip (us)", "flag with release order", "relaxed flag", "queue", "x release", "x relaxed"]
    keys = ("released", "flag", "queue", "released_ratio", "ratio")
    rows = run("queue")["tables"][2]["rows"]
    return markdown(head, [[r["what"], *(f"{r[key]:.2f}" for key in keys)] for r in rows])


def writes() -> str:
    ours, bare = (t["rows"] for t in run("proxy_write")["tables"][:2])
    lines = []
    for mine, other in zip(ours, bare):
        for channels, kind in (("one", "Single"), ("several", "Multi")):
            shares = [
                cell
                for name in (f"Proxy{kind}", f"Proxy{kind}NBI")
                for cell in (f"{mine[name]:.1f}", f"{100 * other[f'{name}_bare']:.0f} %")
            ]
            lines.append([size(mine["bytes"]), channels, f"{other[f'Bare{kind}']:.1f}", *shares])
    return markdown(["Gbit/s", "channels", "bare writer", "blocking", "of bare", "NBI", "of bare"], lines, 2)


def remote_signals() -> str:
    rows = run("proxy_write")["tables"][2]["rows"]
    lines = [[size(r["bytes"]), f"{r['signal']:.1f}", f"{r['bare']:.1f}"] for r in rows]
    return markdown(["put_signal to another node, one way (us)", "tilescale_net", "bare writer"], lines)


def launches() -> str:
    (table,) = run("launch_cost")["tables"]
    lines = [[r["kernel"], f"{r['host_us']:.2f}", f"{r['graph_us']:.2f}"] for r in table["rows"]]
    return markdown(["kernel", "host time of a launch (us)", "in a CUDA graph (us)"], lines)


def products() -> str:
    rows = run("matmul")["tables"][0]["rows"]
    head = ["dtype", "K", "N", "M", "tile", "tilescale_net (us)", "cuBLAS (us)", "x cuBLAS", "TFLOP/s"]
    return markdown(
        head,
        [
            [
                r["dtype"], r["k"], r["n"], r["m"], r["tile"], f"{r['ours']:,.0f}", f"{r['matmul']:,.0f}", f"{r['over']:.3f}",
                f"{r['tflops']:.0f}",
            ]
            for r in rows
        ],
        1,
    )  # fmt: skip


def fused_calls() -> str:
    rows = run("matmul")["tables"][1]["rows"]
    head = ["a rank's share, 4 ranks", "M", "tilescale_net (us)", "cuBLAS alone (us)", "x cuBLAS"]
    lines = [[r["kind"], r["m"], f"{r['ours']:,.0f}", f"{r['matmul']:,.0f}", f"{r['over']:.3f}"] for r in rows]
    return markdown(head, lines)


def fused_pairs() -> str:
    """Fused calls, and what the operators take where a report has it; the last two columns are of what a user gets."""
    head = ["between two GPUs", "M", "operator (us)", "fused (us)", "by copy engines (us)", "cuBLAS alone (us)"]
    head += ["cuBLAS, then NCCL (us)", "torch symmetric memory (us)", "x cuBLAS alone", "x best of torch", "on"]
    lines = []
    for name in summary.fused_reports():
        kind, dtype = summary.FUSED[name.removesuffix("_fp8")], run(name)["settings"].get("dtype", "bf16").upper()
        for r in rows(name):
            keys = "operator", "ours", "pipelined", "matmul", "sequence", "torch"
            times = [f"{r[key]:,.0f}" if r.get(key) else "" for key in keys]
            taken, best = r.get("operator", r["ours"]), min(r["sequence"], r["torch"])
            ratios = f"{taken / r['matmul']:.3f}", f"{taken / best:.3f}"
            lines.append([f"{kind}, {dtype}", r["m"], *times, *ratios, gpus(name)])
    return markdown(head, lines)


def across_nodes() -> str:
    head = ["operation", "kernel (us)", "bare writers (us)", "rate, % of bare writers", "bytes a token on the network"]
    lines = []
    for r in run("moe_two_nodes")["tables"][0]["rows"]:
        times = f"{r['kernel']:,.0f}", f"{r['bare']:,.0f}", f"{r['of_bare']:.0f}", f"{r['fabric']:,.0f}"
        lines.append([r["operation"], *times])
    return markdown(head, lines)


def fused_calls_of_eight_bits() -> str:
    rows = [r for r in run("matmul_fp8")["tables"][0]["rows"] if r["dtype"] == "fp8"]
    head = ["a rank's share, 4 ranks, fp8", "M", "tilescale_net (us)", "cuBLAS alone (us)", "x cuBLAS"]
    lines = [[r["kind"], r["m"], f"{r['ours']:,.0f}", f"{r['matmul']:,.0f}", f"{r['over']:.3f}"] for r in rows]
    return markdown(head, lines)


def host_costs() -> str:
    rows = run("moe_host")["tables"][0]["rows"]
    head = ["AllToAll", "dispatch + combine, without launches (us)", "with launches (us)"]
    return markdown(head, [[r["what"], f"{r['both_us']:.1f}", f"{r['both_all_us']:.1f}"] for r in rows], 1)


def _moe_calls() -> list[dict]:
    return [r for name in ("moe_calls", "moe_calls_latency") for r in run(name)["tables"][0]["rows"]]


def moe_calls() -> str:
    times = ("dispatch", "cached", "agreeing", "combine", "graph", "host", "wall")
    lines = []
    for r in _moe_calls():
        places = [r["mode"], r["layout"], r["blocks"] or "all", r["dtype"], r["back"]]
        lines.append([*places, *(f"{r[name]:.1f}" if r.get(name) is not None else "" for name in times)])
    head = ["mode", "rows by", "blocks", "dispatch of", "combine of", "dispatch (us)", "cached (us)", "difference (us)"]
    return markdown([*head, "combine (us)", "both, graph (us)", "both, host (us)", "both, wall (us)"], lines, 5)


def moe_layers() -> str:
    head = ["on", "part", "tokens", "choices of a token", "blocks", "at once (us)", "one after the other (us)", "ratio"]
    head += ["products alone (us)", "torch grouped_mm alone (us)", "communication alone (us)"]
    lines = []
    for name in ("moe_layer", "moe_layer_top2", "moe_layer_two_gpus"):
        report = run(name)
        for r in report["tables"][0]["rows"]:
            times = (f"{r[key]:,.0f}" for key in ("matmul", "torch", "communication"))
            lines.append([
                gpus(name), r["part"], r["tokens"], report["settings"]["topk"], r["blocks"], f"{r['ours']:,.0f}",
                f"{r['sequence']:,.0f}", f"{r['over']:.3f}", *times,
            ])  # fmt: skip
    return markdown(head, lines, 2)


# What, the figures of two GPUs (blocks, rows by, dispatch of, combine of, figure), the peer and the goal, both of four.
_LATENCY, _RANK, _EXPERT = (("latency", "expert"), ("throughput", "rank"), ("throughput", "expert"))
_GOALS = [
    ("latency mode, FP8: dispatch + combine, host / wall",
     [(0, *_LATENCY, "fp8", "bf16", "host"), (0, *_LATENCY, "fp8", "bf16", "wall")], "DeepEP 57 / 93", "45 / 80"),
    ("throughput mode: dispatch + combine, host", [(24, *_RANK, "bf16", "bf16", "host")], "", "50"),
    ("layout expert, 24 blocks: dispatch + combine in a CUDA graph, BF16 / FP8",
     [(24, *_EXPERT, "bf16", "bf16", "graph"), (24, *_EXPERT, "fp8", "bf16", "graph")], "DeepEP V2, FP8 1,147", "1,180 / 950"),
    ("8 blocks: FP8 dispatch, cached / BF16 combine",
     [(8, *_RANK, "fp8", "bf16", "cached"), (8, *_RANK, "fp8", "bf16", "combine")], "V2 389 / 844", "300 / 700"),
    ("12 blocks: BF16 dispatch, cached / combine",
     [(12, *_RANK, "bf16", "bf16", "cached"), (12, *_RANK, "bf16", "bf16", "combine")], "", "490 / 530"),
    ("24 blocks: agreeing on the layout", [(24, *_RANK, "bf16", "bf16", "agreeing")], "", "25"),
    ("24 blocks: BF16 dispatch, not cached", [(24, *_RANK, "bf16", "bf16", "dispatch")],
     "NCCL, rows only, 2 GPUs: 222", "215 on 2 GPUs"),
    ("24 blocks: BF16 dispatch, cached / FP8 / BF16 combine",
     [(24, *_RANK, "bf16", "bf16", "cached"), (24, *_RANK, "fp8", "bf16", "cached"), (24, *_RANK, "bf16", "bf16", "combine")],
     "V2 527 / 322 / 593", "473 / 252 / 504"),
    ("24 blocks: combine, rows back as FP8", [(24, *_RANK, "fp8", "fp8", "combine")], "", "300"),
]  # fmt: skip


def moe_goals() -> str:
    """Goals for four GPUs and the peer there, as both were when goals were set, beside what two have reached."""
    keys = "blocks", "mode", "layout", "dtype", "back"
    found = {tuple(r[k] for k in keys): r for r in _moe_calls()}
    lines = []
    for what, figures, peer, goal in _GOALS:
        now = " / ".join(f"{found[tuple(place)][name]:,.0f}" for *place, name in figures)
        lines.append((what, now, "not measured", peer, goal))
    return markdown(["us", "now, 2 GPUs", "now, 4 GPUs", "peer, 4 GPUs", "goal, 4 GPUs (at most)"], lines)


TABLES = {
    "moe-goals": moe_goals,
    "fused-pairs": fused_pairs,
    "moe-two-nodes": across_nodes,
    "moe-calls": moe_calls,
    "moe-layers": moe_layers,
    "fused-calls-fp8": fused_calls_of_eight_bits,
    "moe-host": host_costs,
    "products-alone": products,
    "fused-calls": fused_calls,
    "copies-by-size": copies,
    "signals-by-size": signals,
    "pushes": pushes,
    "round-trips": round_trips,
    "writes": writes,
    "remote-signals": remote_signals,
    "launches": launches,
}
