"""Tables and plots of the measured results, made from the JSON files beside this program.

    python docs/results/render.py            writes the plots here, and the tables into README.md and docs/results/*.md
    python docs/results/render.py --check    changes nothing; exit code 1 and a list when something is out of date

The JSON files are what `--json` of the benchmarks wrote on the machine that they name. A table stands in a page between
the lines `<!-- table NAME -->` and `<!-- end -->`. A plot carries the digest of its data and of this program, which is
what `--check` compares: another version of matplotlib may draw the same plot with other bytes.
"""

import functools
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import details

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = [ROOT / "README.md", *sorted(HERE.glob("*.md"))]
OURS, PEER = "#1f77b4", "#d9822b"


@functools.cache
def run(name: str) -> dict:
    """One benchmark's report: environment, command, tables of rows."""
    return json.loads((HERE / f"{name}.json").read_text())


def rows(name: str, table: int = 0, **wanted) -> list[dict]:
    """Rows of a table whose fields have the values wanted."""
    found = [r for r in run(name)["tables"][table]["rows"] if all(r[k] == v for k, v in wanted.items())]
    if not found:
        raise KeyError(f"{name}.json, table {table}: no row with {wanted}")
    return found


def value(name: str, key: str, table: int = 0, **wanted) -> float:
    """One figure of a report; KeyError when the row or the figure is not there."""
    (row,) = rows(name, table, **wanted)
    return row[key]


@dataclass(frozen=True)
class Row:
    """One line of the summary: a figure of ours beside the best that was measured of others in the same run."""

    what: str
    ours: float
    peer: float
    peer_name: str
    unit: str
    more_is_better: bool

    def markdown(self) -> str:
        ratio = self.ours / self.peer if self.more_is_better else self.peer / self.ours
        return (
            f"| {self.what} | {significant(self.ours)} {self.unit} | {significant(self.peer)} {self.unit}, "
            f"{self.peer_name} | {ratio:.2f} x |"
        )


def significant(number: float) -> str:
    """Three significant digits, never in powers of ten."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def copies() -> list[Row]:
    """One block that pushes and pulls; NVSHMEM at its better number of threads."""
    result = []
    for direction in ("push", "pull"):
        for size, label in ((65536, "64 KiB"), (4 << 20, "4 MiB")):
            ours = value("unrolledcp_p2p", f"tilescale_net_{direction}_gbps", bytes=size, threads=128)
            theirs = max(r[f"nvshmem_{direction}_gbps"] for r in rows("unrolledcp_p2p", bytes=size))
            what = f"{direction} of {label} over NVLink by one block of 128 threads"
            result.append(Row(what, ours, theirs, "NVSHMEM with 128 or 1024 threads", "GB/s", True))
    return result


def signals() -> list[Row]:
    """put_signal, one way."""
    result = []
    for size, label in ((8, "8 B"), (65536, "64 KiB")):
        ours = value("put_signal", "auto", bytes=size, threads=128)
        theirs = min(r["nvshmem"] for r in rows("put_signal", bytes=size))
        result.append(Row(f"put_signal of {label}, one way", ours, theirs, "NVSHMEM", "us", False))
    line = value("put_signal", "line", bytes=8, threads=128)
    result.append(
        Row("put_signal of 8 B, data and signal in one 16-byte line", line, result[0].peer, "NVSHMEM", "us", False)
    )
    return result


def collectives() -> list[Row]:
    """Collectives in a CUDA graph."""
    result = []
    for size, label in ((8 << 10, "8 KiB"), (256 << 10, "256 KiB"), (64 << 20, "64 MiB")):
        ours = value("all_reduce", "us", bytes=size)
        peers = {
            "NCCL": value("all_reduce", "nccl_us", bytes=size),
            "torch symmetric memory": value("all_reduce", "symm_mem_us", bytes=size),
        }
        best = min(peers, key=lambda peer: peers[peer])
        result.append(Row(f"all-reduce, {label}", ours, peers[best], best, "us", False))
    for name, what in (
        ("all_gather", "all-gather"),
        ("all_to_all", "all-to-all"),
        ("reduce_scatter", "reduce-scatter"),
    ):
        for size, label in ((1 << 20, "1 MiB"), (64 << 20, "64 MiB")):
            ours, theirs = value(name, "us", bytes=size), value(name, "nccl_us", bytes=size)
            result.append(Row(f"{what}, {label}", ours, theirs, "NCCL", "us", False))
    return result


def mixture_of_experts() -> list[Row]:
    """Dispatch and combine; NCCL moves the same rows and neither sorts nor sums them."""
    result = []
    where = dict(mode="throughput", tokens=4096, layout="rank")
    for dtype, label in (("bf16", "BF16"), ("fp8", "FP8")):
        theirs = value("moe_throughput", "kernel", system="NCCL", operation="dispatch", dtype=dtype, **where)
        for operation, name in (("dispatch", "dispatch"), ("dispatch, cached layout", "dispatch, cached layout")):
            ours = value("moe_throughput", "kernel", system="tilescale_net", operation=operation, dtype=dtype, **where)
            result.append(Row(f"MoE {name}, 4096 tokens, {label}", ours, theirs, "NCCL, rows only", "us", False))
    ours, theirs = (
        value("moe_throughput", "kernel", system=s, operation="combine", dtype="bf16", **where)
        for s in ("tilescale_net", "NCCL")
    )
    result.append(Row("MoE combine, 4096 tokens, BF16", ours, theirs, "NCCL, rows only", "us", False))
    where = dict(mode="latency", tokens=128, dtype="bf16")
    for operation in ("dispatch", "combine"):
        ours, theirs = (
            value("moe_latency", "kernel", system=s, operation=operation, **where) for s in ("tilescale_net", "NCCL")
        )
        result.append(Row(f"MoE {operation}, 128 tokens, BF16", ours, theirs, "NCCL, rows only", "us", False))
    return result


def fabric() -> list[Row]:
    """Puts of a kernel through queue, proxy and libfabric beside a CPU thread that writes the same bytes."""
    size = 8 << 20
    ours = value("proxy_write", "ProxySingleNBI", bytes=size)
    theirs = value("proxy_write", "BareSingle", 1, bytes=size)
    what = "put of 8 MiB to another node (tcp over loopback, staged)"
    return [Row(what, ours, theirs, "a CPU thread with libfabric alone", "Gbit/s", True)]


def table(rows_: list[Row]) -> str:
    head = "| what | tilescale_net | best alternative of the same run | ratio |\n| --- | --: | --: | --: |"
    return "\n".join([head, *(r.markdown() for r in rows_)])


def source(*names: str) -> str:
    """Where the runs were made and the commands that repeat them, machine by machine."""
    machines: dict[tuple, list[str]] = {}
    for name in names:
        env = run(name)["environment"]
        machines.setdefault((env["GPUs"], env["driver"], env["CUDA"], env["torch"], env["tilelang"]), []).append(name)
    parts = []
    for (gpus, driver, cuda, torch, tilelang), found in machines.items():
        dates = " and ".join(sorted({run(name)["environment"]["date"] for name in found}))
        parts += [
            f"{gpus}, driver {driver}, CUDA {cuda}, torch {torch}, tilelang {tilelang}, "
            f"{dates}. Medians; every byte compared; "
            "ratios within one run, above 1 where tilescale_net is better."
            if not parts
            else f"{gpus}, {dates}, otherwise the same:",
            "",
            *(f"- `{name}.json`, of {run(name)['environment']['tilescale_net']}: {command(name)}" for name in found),
            "",
        ]
    return "\n".join(parts[:-1])


def command(name: str) -> str:
    """The command of a report, as one types it."""
    report = run(name)
    words = [w for w in report["command"]]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    nodes = "VIRTUAL_NODES=2 " if name in ("proxy_write", "moe_two_nodes") else ""
    alone = ("queue", "matmul", "matmul_fp8", "moe_host", "moe_layer", "moe_layer_top2")
    gpus = 1 if name in alone else 2
    return f"`GPUS={gpus} {nodes}bash launch.sh benchmark/{' '.join(words)}`"


def summary() -> list[Row]:
    return [*copies(), *signals(), *collectives(), *mixture_of_experts(), *fabric()]


def highlights() -> list[Row]:
    """What the README shows: one line a subject, the losses too."""
    first, second, third = copies(), signals(), collectives()
    moe = mixture_of_experts()
    return [first[1], first[3], second[2], second[1], *third[:5], third[8], moe[1], moe[4], *fabric()]


TABLES = {
    "highlights": lambda: table(highlights()),
    "summary": lambda: table(summary()),
    "copies": lambda: table(copies()),
    "signals": lambda: table(signals()),
    "collectives": lambda: table(collectives()),
    "moe": lambda: table(mixture_of_experts()),
    "fabric": lambda: table(fabric()),
    **{name: functools.partial(make, run) for name, make in details.TABLES.items()},
    "source": lambda: source(*sorted(p.stem for p in HERE.glob("*.json"))),
}


# Plots: name -> (reports that it is drawn from, function that draws into a figure).
def draw_copies(figure) -> None:
    for i, direction in enumerate(("push", "pull")):
        axes = figure.add_subplot(1, 2, i + 1)
        for system, label, colour in (("tilescale_net", "tilescale_net", OURS), ("nvshmem", "NVSHMEM", PEER)):
            for threads, style in ((128, "-"), (1024, "--")):
                found = rows("unrolledcp_p2p", threads=threads)
                sizes = [r["bytes"] for r in found]
                rates = [r[f"{system}_{direction}_gbps"] for r in found]
                axes.plot(sizes, rates, style, color=colour, label=f"{label}, {threads} threads", linewidth=1.8)
        axes.set_xscale("log", base=2)
        ticks = [1 << n for n in range(11, 23, 2)]
        axes.set_xticks(ticks, ["2 KiB", "8 KiB", "32 KiB", "128 KiB", "512 KiB", "2 MiB"])
        axes.set_ylim(bottom=0)
        axes.set_ylabel("bandwidth (GB/s)")
        axes.set_xlabel("size of one copy")
        axes.set_title(f"{direction}, one block", fontsize=10)
        axes.grid(alpha=0.3)
        if i == 0:
            axes.legend(fontsize=8, frameon=False)
    figure.suptitle("Copies between two H200s over NVLink, launch included", fontsize=11)


def draw_collectives(figure) -> None:
    names = {
        "all_reduce": "all-reduce",
        "all_gather": "all-gather",
        "all_to_all": "all-to-all",
        "reduce_scatter": "reduce-scatter",
    }
    for i, (name, label) in enumerate(names.items()):
        axes = figure.add_subplot(1, 4, i + 1)
        found = rows(name)
        sizes = [r["bytes"] for r in found]
        axes.plot(sizes, [r["us"] for r in found], "-", color=OURS, label="tilescale_net", linewidth=1.8)
        axes.plot(sizes, [r["nccl_us"] for r in found], "-", color=PEER, label="NCCL", linewidth=1.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([1 << n for n in (14, 18, 22, 26)], ["16 KiB", "256 KiB", "4 MiB", "64 MiB"])
        axes.set_ylabel("time (us)" if i == 0 else "")
        axes.set_xlabel("bytes of all ranks")
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.3, which="both")
        if i == 0:
            axes.legend(fontsize=8, frameon=False)
    figure.suptitle("Collectives on two H200s, in a CUDA graph", fontsize=11)


def draw_moe(figure) -> None:
    axes = figure.add_subplot(1, 1, 1)
    found = mixture_of_experts()
    places = range(len(found))
    axes.barh([p - 0.2 for p in places], [r.ours for r in found], 0.38, color=OURS, label="tilescale_net")
    axes.barh([p + 0.2 for p in places], [r.peer for r in found], 0.38, color=PEER, label="NCCL, the same rows only")
    for p, r in zip(places, found):
        axes.text(r.ours + 2, p - 0.2, significant(r.ours), va="center", fontsize=8)
        axes.text(r.peer + 2, p + 0.2, significant(r.peer), va="center", fontsize=8)
    axes.set_yticks(list(places), [r.what.removeprefix("MoE ") for r in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("kernel time (us), less is better")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.set_title("Mixture of experts on two H200s: hidden 7168, top-8 of 256", fontsize=11)


PLOTS = {
    "copies": (("unrolledcp_p2p",), (8, 3.2), draw_copies),
    "collectives": (("all_reduce", "all_gather", "all_to_all", "reduce_scatter"), (13, 3.2), draw_collectives),
    "moe": (("moe_throughput", "moe_latency"), (8, 3.6), draw_moe),
}


def digest(names: tuple[str, ...]) -> str:
    """Of the data of a plot and of this program."""
    found = hashlib.sha256(Path(__file__).read_bytes())
    for name in names:
        found.update((HERE / f"{name}.json").read_bytes())
    return found.hexdigest()[:16]


def plot_is_current(name: str) -> bool:
    path = HERE / f"{name}.svg"
    return path.exists() and digest(PLOTS[name][0]) in path.read_text()


def write_plot(name: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    names, size, draw = PLOTS[name]
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(
            HERE / f"{name}.svg", metadata={"Date": None, "Description": f"data {digest(names)}"}, facecolor="white"
        )


def with_tables(text: str) -> str:
    """A page with all its tables as they should be now. Raises KeyError for a table that nobody knows."""

    def current(match: re.Match) -> str:
        return f"<!-- table {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", current, text, flags=re.DOTALL)


def stale() -> list[str]:
    """What does not agree with the data."""
    pages = [str(p.relative_to(ROOT)) for p in PAGES if with_tables(p.read_text()) != p.read_text()]
    return pages + [f"docs/results/{name}.svg" for name in PLOTS if not plot_is_current(name)]


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        out = stale()
        print("\n".join([*(f"out of date: {o}" for o in out), *(["run docs/results/render.py"] if out else [])]))
        return 1 if out else 0
    if sys.argv[1:]:
        print(__doc__)
        return 2
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    for name in PLOTS:
        if not plot_is_current(name):
            write_plot(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
