"""Tables and plots of the measured results, made from the JSON files beside this program.

    python docs/results/render.py            writes the plots here, and the tables into README.md and docs/results/*.md
    python docs/results/render.py --check    changes nothing; exit code 1 and a list when something is out of date

Reports of a checkout with uncommitted changes are rejected: nobody can repeat them.

The JSON files are what `--json` of the benchmarks wrote on the machine that they name. A table stands in a page between
the lines `<!-- table NAME -->` and `<!-- end -->`: `reports.py` makes those that compare and the lines that say where
figures come from, this program those with all rows of a report. A plot (`plots.py`) carries the digest of its data and
of these programs, which is what `--check` compares: another version of matplotlib may draw the same plot with other bytes.
"""

import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import plots
import reports
from reports import HERE, gpus, rows, run, size

from benchmark.common.report import markdown

ROOT = HERE.parents[1]
PAGES = [ROOT / "README.md", *sorted(HERE.glob("*.md"))]
# Page -> reports whose figures it shows.
SOURCES = {
    "copies": ("unrolledcp_p2p", "launch_cost"),
    "signals": ("put_signal",),
    "collectives": tuple(reports.COLLECTIVES),
    "collectives-more": tuple(reports.more_collectives()),
    "products": (*reports.fused_reports(), "gemm_ways", "matmul"),
    "moe": (
        "moe_throughput",
        "moe_latency",
        "moe_calls",
        "moe_calls_latency",
        "moe_calls_latency_four",
        "moe_two_nodes",
        "moe_host",
        "moe_layer",
        "moe_layer_top2",
        "moe_layer_two_gpus",
        "moe_layer_four",
    ),
    "fabric": ("proxy_write", "queue"),
}


def report_table(name: str, table: int, cells: dict[str, str], words: int = 1, **wanted: Any) -> Callable[[], str]:
    """What makes a table of a report's rows whose fields have the values wanted. `cells`: by heading: a format of a
    row's fields."""

    def made() -> str:
        found = rows(name, table, **wanted)
        return markdown([*cells], ([form.format(**row) for form in cells.values()] for row in found), words)

    return made


def by_threads(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The rows of a size with 128 and with 1024 threads."""
    return zip(rows(name, threads=128), rows(name, threads=1024), strict=True)


def copies() -> str:
    def both(row: dict[str, Any], system: str, unit: str) -> str:
        return " / ".join(f"{row[f'{system}_{way}_{unit}']:.2f}" for way in ("push", "pull"))

    lines = []
    for few, many in by_threads("unrolledcp_p2p"):
        lines.append([
            size(few["bytes"]), both(few, "nvshmem", "us"), both(few, "tilescale_net", "us"),
            both(few, "tilescale_net", "gbps"), both(many, "nvshmem", "us"), both(many, "tilescale_net", "us"),
        ])  # fmt: skip
    head = ["push / pull", "NVSHMEM, 128 threads (us)", "tilescale_net, 128 threads (us)", "the same (GB/s)"]
    return markdown([*head, "NVSHMEM, 1024 threads (us)", "tilescale_net, 1024 threads (us)"], lines)


def signals() -> str:
    lines = []
    for few, many in by_threads("put_signal"):
        what = size(few["bytes"])
        if "line" in few:
            lines.append([f"{what}, beside the signal word", f"{few['line']:.2f}", "", f"{many['line']:.2f}", ""])
        lines.append([what, *(f"{row[key]:.2f}" for row in (few, many) for key in ("auto", "nvshmem"))])
    return markdown(["one way (us)", "128 threads", "NVSHMEM, 128", "1024 threads", "NVSHMEM, 1024"], lines)


def writes() -> str:
    lines = []
    for mine, other in zip(rows("proxy_write"), rows("proxy_write", 1)):
        for channels, kind in (("one", "Single"), ("several", "Multi")):
            names = f"Proxy{kind}", f"Proxy{kind}NBI"
            shares = [f"{mine[n]:.1f} | {100 * other[f'{n}_bare']:.0f} %" for n in names]
            lines.append([size(mine["bytes"]), channels, f"{other[f'Bare{kind}']:.1f}", *shares])
    return markdown(["Gbit/s", "channels", "bare writer", "blocking", "of bare", "NBI", "of bare"], lines, 2)


# Tables that list a report's rows.
LISTINGS = {
    "pushes": report_table("queue", 0, {
        "M pushes/s: blocks": "{blocks}", "warps of a block": "{warps}", "lanes of a warp": "{lanes}", "queues": "{queues}",
        "each published": "{published:.3g}", "behind one fence": "{batch:.3g}", "sustained": "{sustained:.3g}",
    }, 0),
    "round-trips": report_table("queue", 2, {
        "round trip (us)": "{what}", "flag with release order": "{released:.2f}", "relaxed flag": "{flag:.2f}",
        "queue": "{queue:.2f}", "x release": "{released_ratio:.2f}", "x relaxed": "{ratio:.2f}",
    }),
    "launches": report_table("launch_cost", 0, {
        "kernel": "{kernel}", "host time of a launch (us)": "{host_us:.2f}", "in a CUDA graph (us)": "{graph_us:.2f}",
    }),
    "products-alone": report_table("matmul", 0, {
        "dtype": "{dtype}", "K": "{k}", "N": "{n}", "M": "{m}", "tile": "{tile}", "tilescale_net (us)": "{ours:,.0f}",
        "cuBLAS (us)": "{matmul:,.0f}", "x cuBLAS": "{over:.3f}", "TFLOP/s": "{tflops:.0f}",
    }),
    "moe-two-nodes": report_table("moe_two_nodes", 0, {
        "operation": "{operation}", "kernel (us)": "{kernel:,.0f}", "bare writers (us)": "{bare:,.0f}",
        "rate, % of bare writers": "{of_bare:.0f}", "bytes a token on the network": "{fabric:,.0f}",
    }),
    "moe-host": report_table("moe_host", 0, {
        "AllToAll": "{what}", "dispatch + combine, without launches (us)": "{both_us:.1f}",
        "with launches (us)": "{both_all_us:.1f}",
    }),
}  # fmt: skip


def remote_signals() -> str:
    head = ["put_signal to another node, one way (us)", "tilescale_net", "bare writer"]
    found = rows("proxy_write", 2)
    return markdown(head, ([size(r["bytes"]), f"{r['signal']:.1f}", f"{r['bare']:.1f}"] for r in found))


def fused_pairs() -> str:
    """Fused calls, and what the operators take where a report has it; the last two columns are of what a user gets."""
    head = ["between two GPUs", "M", "operator (us)", "fused (us)", "by copy engines (us)", "cuBLAS alone (us)"]
    head += ["cuBLAS, then NCCL (us)", "torch symmetric memory (us)", "x cuBLAS alone", "x best of torch", "on"]
    lines = []
    for name in reports.fused_reports():
        for r in rows(name):
            keys = "operator", "ours", "pipelined", "matmul", "sequence", "torch"
            times = [f"{r[key]:,.0f}" if r.get(key) else "" for key in keys]
            taken, best = r.get("operator", r["ours"]), min(r["sequence"], r["torch"])
            ratios = f"{taken / r['matmul']:.3f}", f"{taken / best:.3f}"
            lines.append([reports.fused_title(name, r), r["m"], *times, *ratios, gpus(name)])
    return markdown(head, lines)


def fused_fours() -> str:
    """All ways between four GPUs; the last column is of the way that the operator takes."""
    head = ["between four GPUs", "M", "fused (us)", "copy engines (us)", "unfused (us)", "cuBLAS, then NCCL (us)"]
    lines = []
    for r in rows("gemm_ways"):
        times = [
            f"{r[key]:,.0f}" if r.get(key) else "" for key in ("fused", "copy_engines", "unfused", "nccl", "torch")
        ]
        way, us = reports.taken_way(r)
        title, ratio = reports.fused_title("gemm_ways", r), f"{us / min(r['nccl'], r['torch']):.3f}"
        lines.append([title, r["m"], *times, way, ratio])
    order = [f"{kind}, {dtype}" for kind in reports.FUSED.values() for dtype in ("BF16", "FP8")]
    lines.sort(key=lambda line: (order.index(line[0]), line[1]))
    return markdown([*head, "torch symmetric memory (us)", "operator takes", "x best of torch"], lines)


def _moe_calls() -> list[dict[str, Any]]:
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
    head = [
        "on",
        "part",
        "tokens",
        "choices of a token",
        "blocks",
        "combine begins at (%)",
        "overlapped (us)",
        "sequential (us)",
        "ratio",
    ]
    head += ["GEMMs alone (us)", "torch grouped_mm alone (us)", "communication alone (us)"]
    lines = []
    for name in ("moe_layer", "moe_layer_top2", "moe_layer_two_gpus", "moe_layer_four"):
        report = run(name)
        for r in report["tables"][0]["rows"]:
            times = (f"{r[key]:,.0f}" for key in ("matmul", "torch", "communication"))
            lines.append([
                gpus(name), r["part"], r["tokens"], report["settings"]["topk"], r["blocks"], r.get("late") or 0, f"{r['ours']:,.0f}",
                f"{r['sequence']:,.0f}", f"{r['over']:.3f}", *times,
            ])  # fmt: skip
    return markdown(head, lines, 2)


# What, the figures of two GPUs (blocks, rows by, dispatch of, combine of, figure), the peer and the goal, both of four.
_LATENCY, _RANK, _EXPERT = (("latency", "expert"), ("throughput", "rank"), ("throughput", "expert"))
_GOALS = [
    ("latency mode, FP8: dispatch + combine, host / wall",
     [(0, *_LATENCY, "fp8", "bf16", "host"), (0, *_LATENCY, "fp8", "bf16", "wall")], "DeepEP 57 / 93", "45 / 75"),
    ("throughput mode: dispatch + combine, host", [(24, *_RANK, "bf16", "bf16", "host")], "", "45"),
    ("layout expert, 24 blocks: dispatch + combine in a CUDA graph, BF16 / FP8",
     [(24, *_EXPERT, "bf16", "bf16", "graph"), (24, *_EXPERT, "fp8", "bf16", "graph")], "DeepEP V2, FP8 1,147", "1,180 / 950"),
    ("8 blocks: FP8 dispatch, cached / BF16 combine",
     [(8, *_RANK, "fp8", "bf16", "cached"), (8, *_RANK, "fp8", "bf16", "combine")], "V2 389 / 844", "300 / 700"),
    ("12 blocks: BF16 dispatch, cached / combine",
     [(12, *_RANK, "bf16", "bf16", "cached"), (12, *_RANK, "bf16", "bf16", "combine")], "", "490 / 530"),
    ("24 blocks: agreeing on the layout", [(24, *_RANK, "bf16", "bf16", "agreeing")], "", "28"),
    ("24 blocks: BF16 dispatch, not cached", [(24, *_RANK, "bf16", "bf16", "dispatch")],
     "NCCL, rows only, 2 GPUs: 222", "215 on 2 GPUs"),
    ("24 blocks: BF16 dispatch, cached / FP8 / BF16 combine",
     [(24, *_RANK, "bf16", "bf16", "cached"), (24, *_RANK, "fp8", "bf16", "cached"), (24, *_RANK, "bf16", "bf16", "combine")],
     "V2 527 / 322 / 593", "473 / 252 / 504"),
    ("24 blocks: combine, rows back as FP8", [(24, *_RANK, "fp8", "fp8", "combine")], "", "300"),
]  # fmt: skip


def moe_goals() -> str:
    """Goals for four GPUs and the peer there, as both were when goals were set, beside what two and four have reached."""
    keys = "blocks", "mode", "layout", "dtype", "back"
    two, four = (
        {tuple(r[k] for k in keys): r for r in found}
        for found in (_moe_calls(), run("moe_calls_latency_four")["tables"][0]["rows"])
    )

    def now(found: dict[tuple[Any, ...], Any], figures: list[tuple[Any, ...]]) -> str:
        if not all(tuple(place) in found for *place, _ in figures):
            return "not measured"
        return " / ".join(f"{found[tuple(place)][name]:,.0f}" for *place, name in figures)

    lines = [(what, now(two, figures), now(four, figures), peer, goal) for what, figures, peer, goal in _GOALS]
    return markdown(["us", "now, 2 GPUs", "now, 4 GPUs", "peer, 4 GPUs", "goal, 4 GPUs (at most)"], lines)


def compared(subject: str) -> str:
    return reports.comparison(reports.summary(subject))


TABLES: dict[str, Callable[[], str]] = {
    "highlights": reports.highlights, "others-ahead": reports.others_ahead,
    "summary": lambda: reports.comparison(r for subject in reports.SUBJECTS for r in reports.summary(subject)),
    "source": lambda: reports.source(*reports.names()),
    **{name: functools.partial(compared, name) for name in reports.SUBJECTS},
    **{f"source-{page}": functools.partial(reports.source, *names) for page, names in SOURCES.items()}, **LISTINGS,
    "copies-by-size": copies, "signals-by-size": signals, "writes": writes, "remote-signals": remote_signals,
    "fused-pairs": fused_pairs, "collectives-more": reports.more_sections,
    "fused-fours": fused_fours, "moe-calls": moe_calls, "moe-layers": moe_layers, "moe-goals": moe_goals,
}  # fmt: skip
DRAWN_BY = (HERE / "reports.py", HERE / "plots.py", ROOT / "benchmark" / "common" / "plot.py")


def digest(names: tuple[str, ...]) -> str:
    """Of the data of a plot and of the programs that draw it."""
    found = hashlib.sha256()
    for path in (*DRAWN_BY, *(HERE / f"{name}.json" for name in names)):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def plot_is_current(name: str) -> bool:
    path = HERE / f"{name}.svg"
    return path.exists() and digest(plots.PLOTS[name][0]) in path.read_text()


def with_tables(text: str) -> str:
    """A page with all its tables as they should be now. Raises KeyError for a table that nobody knows."""

    def current(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", current, text, flags=re.DOTALL)


def stale() -> list[str]:
    """What does not agree with the data, and reports that no page names as its source."""
    pages = [str(p.relative_to(ROOT)) for p in PAGES if with_tables(p.read_text()) != p.read_text()]
    unnamed = sorted(set(reports.names()) - {name for names in SOURCES.values() for name in names})
    drawn = [f"docs/results/{name}.svg" for name in plots.PLOTS if not plot_is_current(name)]
    return pages + drawn + [f"{name}.json is in no page: name it in SOURCES" for name in unnamed]


def main() -> int:
    rejected = reports.rejected()
    print("".join(f"rejected: {reason}\n" for reason in rejected), end="")
    if sys.argv[1:] == ["--check"]:
        out = stale()
        print("\n".join([*(f"out of date: {o}" for o in out), *(["run docs/results/render.py"] if out else [])]))
        return 1 if out or rejected else 0
    if sys.argv[1:] or rejected:
        print("" if rejected else __doc__, end="")
        return 2
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    for name, (names, _) in plots.PLOTS.items():
        if not plot_is_current(name):
            plots.write(name, f"data {digest(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
