"""The plots of the pages: what each is drawn from, and the functions that draw into a figure of matplotlib."""

from collections.abc import Iterable
from typing import Any

from reports import COLLECTIVES, FUSED, HERE, gpus, mixture_of_experts, rows, significant, size

OURS, PEER, OTHER = "#1f77b4", "#d9822b", "#7f7f7f"


def copies(figure: Any) -> None:
    for i, direction in enumerate(("push", "pull")):
        axes = figure.add_subplot(1, 2, i + 1)
        for system, label, colour in (("tilescale_net", "tilescale_net", OURS), ("nvshmem", "NVSHMEM", PEER)):
            for threads, style in ((128, "-"), (1024, "--")):
                found = rows("unrolledcp_p2p", threads=threads)
                sizes = [r["bytes"] for r in found]
                rates = [r[f"{system}_{direction}_gbps"] for r in found]
                axes.plot(sizes, rates, style, color=colour, label=f"{label}, {threads} threads", linewidth=1.8)
        by_bytes(axes, range(11, 23, 2))
        axes.set_ylim(bottom=0)
        axes.set_ylabel("bandwidth (GB/s)")
        axes.set_xlabel("size of one copy")
        finish(axes, f"{direction}, one block", legend=i == 0)
    figure.suptitle(f"Copies between {gpus('unrolledcp_p2p')} over NVLink, launch included", fontsize=11)


def signals(figure: Any) -> None:
    axes = figure.add_subplot(1, 1, 1)
    for threads, style in ((128, "-"), (1024, "--")):
        found = rows("put_signal", threads=threads)
        sizes = [r["bytes"] for r in found]
        for key, label, colour in (("auto", "tilescale_net", OURS), ("nvshmem", "NVSHMEM", PEER)):
            axes.plot(
                sizes, [r[key] for r in found], style, color=colour, label=f"{label}, {threads} threads", linewidth=1.8
            )
        line = [r for r in found if "line" in r]
        once = "in one 16-byte line" if threads == 128 else None
        axes.plot([r["bytes"] for r in line], [r["line"] for r in line], "o", color=OURS, label=once)
    by_bytes(axes, range(3, 17, 3))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("time (us)")
    axes.set_xlabel("size of the message")
    finish(axes, f"put_signal, one way, {gpus('put_signal')}", legend=True)


def collectives(figure: Any) -> None:
    for i, (name, label) in enumerate(COLLECTIVES.items()):
        axes = figure.add_subplot(1, 4, i + 1)
        found = rows(name)
        sizes = [r["bytes"] for r in found]
        axes.plot(sizes, [r["us"] for r in found], "-", color=OURS, label="tilescale_net", linewidth=1.8)
        axes.plot(sizes, [r["nccl_us"] for r in found], "-", color=PEER, label="NCCL", linewidth=1.8)
        by_bytes(axes, range(14, 27, 4))
        axes.set_yscale("log")
        axes.set_ylabel("time (us)" if i == 0 else "")
        axes.set_xlabel("bytes of all ranks")
        finish(axes, f"{label}, {gpus(name)}", legend=i == 0)
    figure.suptitle("Collectives in a CUDA graph", fontsize=11)


def products(figure: Any) -> None:
    for i, (name, label) in enumerate(FUSED.items()):
        axes = figure.add_subplot(1, 3, i + 1)
        found = rows(name)
        for key, side, colour in (
            ("ours", "tilescale_net", OURS),
            ("sequence", "cuBLAS, then NCCL", PEER),
            ("torch", "torch symmetric memory", OTHER),
        ):
            ratios = [r[key] / r["matmul"] for r in found]
            axes.plot([r["m"] for r in found], ratios, "-", color=colour, label=side, linewidth=1.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks([r["m"] for r in found], [str(r["m"]) for r in found])
        axes.set_ylim(0.9, 2.2)  # torch's operators with few rows are far above
        axes.set_ylabel("time, x cuBLAS alone" if i == 0 else "")
        axes.set_xlabel("M, rows of all ranks")
        finish(axes, label, legend=i == 2)
    figure.suptitle(f"Products with their communication, bfloat16, {gpus('all_gather_matmul')}", fontsize=11)


def moe(figure: Any) -> None:
    axes = figure.add_subplot(1, 1, 1)
    found = mixture_of_experts()
    bars(axes, [r.what.removeprefix("MoE ") for r in found], {
        "tilescale_net": ([r.ours for r in found], OURS),
        "NCCL, the same rows only": ([r.peer for r in found], PEER),
    })  # fmt: skip
    axes.set_xlabel("kernel time (us), less is better")
    axes.set_title(f"Mixture of experts, {gpus('moe_throughput')}: hidden 7168, top-8 of 256", fontsize=11)


def fabric(figure: Any) -> None:
    ours, bare = rows("proxy_write"), rows("proxy_write", 1)
    axes = figure.add_subplot(1, 2, 1)
    bars(axes, [size(r["bytes"]) for r in ours], {
        "NBI": ([r["ProxySingleNBI"] for r in ours], OURS),
        "blocking": ([r["ProxySingle"] for r in ours], "#9ecae1"),
        "bare writer": ([r["BareSingle"] for r in bare], PEER),
    })  # fmt: skip
    axes.set_xlabel("Gbit/s, more is better")
    axes.set_title("puts, one channel", fontsize=10)
    found = rows("proxy_write", 2)
    axes = figure.add_subplot(1, 2, 2)
    bars(axes, [size(r["bytes"]) for r in found], {
        "tilescale_net": ([r["signal"] for r in found], OURS),
        "bare writer": ([r["bare"] for r in found], PEER),
    })  # fmt: skip
    axes.set_xlabel("us, less is better")
    axes.set_title("put_signal, one way", fontsize=10)
    figure.suptitle("Two virtual nodes, tcp over loopback, memory staged", fontsize=11)


def by_bytes(axes: Any, powers: Iterable[int]) -> None:
    """The horizontal axis, with a mark at each of these powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xticks([1 << n for n in powers], [size(1 << n) for n in powers])


def finish(axes: Any, title: str, legend: bool) -> None:
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    if legend:
        axes.legend(fontsize=8, frameon=False)


def bars(axes: Any, labels: list[str], sides: dict[str, tuple[list[float], str]]) -> None:
    """A group of horizontal bars for each label, with their figures."""
    height = 0.8 / len(sides)
    for i, (side, (figures, colour)) in enumerate(sides.items()):
        places = [n + (i - (len(sides) - 1) / 2) * height for n in range(len(labels))]
        axes.barh(places, figures, 0.95 * height, color=colour, label=side)
        for place, figure in zip(places, figures):
            axes.text(figure * 1.01, place, significant(figure), va="center", fontsize=8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_xlim(right=1.12 * max(max(figures) for figures, _ in sides.values()))
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


# name -> (reports that it is drawn from, inches, function that draws).
PLOTS = {
    "copies": (("unrolledcp_p2p",), (8, 3.2), copies),
    "signals": (("put_signal",), (7, 3.2), signals),
    "collectives": (tuple(COLLECTIVES), (13, 3.2), collectives),
    "products": (tuple(FUSED), (11, 3.2), products),
    "moe": (("moe_throughput", "moe_latency"), (8, 3.6), moe),
    "fabric": (("proxy_write",), (9, 3.6), fabric),
}


def write(name: str, description: str) -> None:
    """Draw a plot to its file; the description stands in its metadata."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    _, inches, draw = PLOTS[name]
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None, "Description": description}, facecolor="white")
