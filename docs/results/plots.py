"""The plots of the pages: the panels of each, and the reports that they are drawn from."""

from collections.abc import Callable, Iterable
from typing import Any

from reports import (
    COLLECTIVES,
    FUSED,
    HERE,
    gpus,
    heading,
    mixture_of_experts,
    more_collectives,
    rows,
    run,
    times,
)

from benchmark.common import plot
from benchmark.common.plot import OTHER, OURS, PEER, Panel

STYLES = {"tilescale_net": (OURS, "-"), "NCCL": (PEER, "-"), "torch symmetric memory": (OTHER, "-")}


def by(found: Iterable[dict[str, Any]], key: str, figure: str) -> dict[Any, float]:
    """The figure of each row that has it, by its key."""
    return {row[key]: row[figure] for row in found if row.get(figure) is not None}


def copies() -> list[Panel]:
    systems = {"tilescale_net": OURS, "NVSHMEM": PEER}
    styles = {f"{s}, {n} threads": (c, d) for s, c in systems.items() for n, d in ((128, "-"), (1024, "--"))}
    return [
        Panel(f"{way.capitalize()} over NVLink, one block, {gpus('unrolledcp_p2p')}", "Bandwidth (GB/s)", "Size", {
            f"{system}, {threads} threads": by(
                rows("unrolledcp_p2p", threads=threads), "bytes", f"{system.lower()}_{way}_gbps"
            )
            for system in systems
            for threads in (128, 1024)
        }, styles)
        for way in ("push", "pull")
    ]  # fmt: skip


def signals() -> list[Panel]:
    names = {"tilescale_net": "auto", "in one 16-byte line": "line", "NVSHMEM": "nvshmem"}
    styles = {"in one 16-byte line": ("#9ecae1", ""), "NVSHMEM": (PEER, ""), **STYLES}
    return [
        Panel(f"put_signal, one way, {threads} threads, {gpus('put_signal')}", "Time (us), less is better", "Size",
              {name: by(rows("put_signal", threads=threads), "bytes", key) for name, key in names.items()}, styles)
        for threads in (128, 1024)
    ]  # fmt: skip


def collectives() -> list[Panel]:
    names = {"tilescale_net": "us", "NCCL": "nccl_us", "torch symmetric memory": "symm_mem_us"}
    panels = []
    for report, what in COLLECTIVES.items():
        points = {name: by(rows(report), "bytes", key) for name, key in names.items()}
        for table in run(report)["tables"][1:]:  # of more peers
            titles = {column["title"]: column["key"] for column in table["columns"] if column["title"] not in names}
            points |= {name: by(table["rows"], "bytes", key) for name, key in titles.items()}
        points = {name: figures for name, figures in points.items() if figures}
        panels.append(Panel(f"{what.capitalize()}, {gpus(report)}", "Time (us)", "Size", points, STYLES))
    return panels


def collectives_more() -> list[Panel]:
    """Each report that is here, with every peer; one that has ways or algorithms in panels or lines of their own."""
    panels = []
    for name in more_collectives():
        keys, columns, found = times(name, 0 if name == "all_reduce_fp8" else -1)
        figures = {c: title.removesuffix(" (us)") for c, title in columns.items() if title.endswith(" (us)")}
        figures["us"] = "tilescale_net"
        splits = [k for k in ("way", "operator", "algorithm", "hidden") if k in keys]
        along = next(k for k in keys if k not in splits)
        values = list(dict.fromkeys(tuple(r[k] for k in splits) for r in found))
        if splits == ["algorithm"]:
            points = {
                f"tilescale_net, {v[0]}": by([r for r in found if r["algorithm"] == v[0]], along, "us") for v in values
            }
            points |= {title: by(found, along, c) for c, title in figures.items() if c != "us"}
            groups = {"": points}
        else:
            groups = {}
            for value in values:
                of_group = [r for r in found if tuple(r[k] for k in splits) == value]
                points = {title: by(of_group, along, c) for c, title in figures.items()}
                groups["".join(f", {k} {v}" if k == "hidden" else f": {v}" for k, v in zip(splits, value))] = points
        for group, points in groups.items():
            title = heading(name).replace(f", {gpus(name)}", f"{group}, {gpus(name)}")
            shown = {peer: figures_of for peer, figures_of in points.items() if figures_of}
            axis = "Size" if along == "bytes" else keys[along]
            panels.append(Panel(title, "Time (us), less is better", axis, shown, STYLES, lines=True))
    return panels


def products(suffix: str = "") -> list[Panel]:
    """What a user gets: the operator where that was measured, else the fused call."""
    styles = {**STYLES, "cuBLAS, then NCCL": (PEER, "-")}
    panels = []
    for report, what in FUSED.items():
        found = rows(report + suffix)
        ours = "operator" if "operator" in found[0] else "ours"
        names = {"tilescale_net": ours, "cuBLAS, then NCCL": "sequence", "torch symmetric memory": "torch"}
        points = {name: {r["m"]: r[key] / r["matmul"] for r in found} for name, key in names.items()}
        title = f"{what}, {'FP8' if suffix else 'BF16'}, {gpus(report + suffix)}"
        panels.append(Panel(title, "Time, x cuBLAS alone", "M, rows of all ranks", points, styles, lines=True,
                            reference=("cuBLAS alone", 1.0)))  # fmt: skip
    return panels


def products_fp8() -> list[Panel]:
    return products("_fp8")


def moe() -> list[Panel]:
    panels = []
    for report, mode in (("moe_throughput", "4096 tokens"), ("moe_latency", "128 tokens")):
        found = [r for r in mixture_of_experts() if r.report == report]
        at = [r.what.removeprefix("MoE ").replace(f", {mode}", "") for r in found]
        points = {
            "tilescale_net": dict(zip(at, (r.ours for r in found))),
            "NCCL, the same rows only": dict(zip(at, (r.peer for r in found))),
        }
        title = f"MoE, {mode}, hidden 7168, top-8 of 256, {gpus(report)}"
        styles = {**STYLES, "NCCL, the same rows only": (PEER, "")}
        panels.append(Panel(title, "Kernel time (us), less is better", "", points, styles))
    return panels


def fabric() -> list[Panel]:
    ours, bare = rows("proxy_write"), rows("proxy_write", 1)
    where = f"tcp over loopback, {gpus('proxy_write')}"
    styles = {**STYLES, "tilescale_net, NBI": (OURS, ""), "blocking": ("#9ecae1", ""), "bare writer": (PEER, "")}
    panels = []
    for kind, channels in (("Single", "one channel"), ("Multi", "several channels")):
        names = {
            "tilescale_net, NBI": (ours, f"Proxy{kind}NBI"), "blocking": (ours, f"Proxy{kind}"),
            "bare writer": (bare, f"Bare{kind}"),
        }  # fmt: skip
        points = {name: by(found, "bytes", key) for name, (found, key) in names.items()}
        panels.append(Panel(f"Puts, {channels}, {where}", "Gbit/s, more is better", "Size", points, styles))
    found = rows("proxy_write", 2)
    points = {"tilescale_net": by(found, "bytes", "signal"), "bare writer": by(found, "bytes", "bare")}
    return [*panels, Panel(f"put_signal, one way, {where}", "Time (us), less is better", "Size", points, styles)]


# name -> (reports that it is drawn from, its panels).
PLOTS: dict[str, tuple[tuple[str, ...], Callable[[], list[Panel]]]] = {
    "copies": (("unrolledcp_p2p",), copies),
    "signals": (("put_signal",), signals),
    "collectives": (tuple(COLLECTIVES), collectives),
    "products": (tuple(FUSED), products),
    "products_fp8": (tuple(f"{name}_fp8" for name in FUSED), products_fp8),
    "moe": (("moe_throughput", "moe_latency"), moe),
    "fabric": (("proxy_write",), fabric),
    **({"collectives_more": (tuple(more_collectives()), collectives_more)} if more_collectives() else {}),
}


def write(name: str, description: str) -> None:
    """Draw a plot to its file; the description stands in its metadata."""
    plot.draw(PLOTS[name][1](), str(HERE / f"{name}.svg"), description=description)
