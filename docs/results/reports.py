"""The reports beside this program, which `--json` of the benchmarks wrote: their rows, how each was made, and what they
compare: a figure of ours, the best of others in the same run, and what is possible at all."""

import functools
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))  # of a program that is started here

from benchmark.common.plot import significant  # noqa: E402
from benchmark.common.report import markdown, read_json  # noqa: E402

# Benchmarks that have another name now than when they wrote their report.
RENAMED = {"queue.py": "device_queue.py"}


@functools.cache
def run(name: str) -> dict[str, Any]:
    """One benchmark's report: environment, command, tables of rows. Where algorithms of a collective were compared, the rows
    of "auto" alone, which is what a call takes by itself."""
    found = read_json(str(HERE / f"{name}.json"))
    if name != "all_reduce_fp8":
        for table in found["tables"]:
            table["keys"] = [key for key in table["keys"] if key["key"] != "algorithm"]
            table["rows"] = [row for row in table["rows"] if row.get("algorithm", "auto") == "auto"]
    return found


def names() -> list[str]:
    """Of all reports."""
    return sorted(p.stem for p in HERE.glob("*.json"))


def rows(name: str, table: int = 0, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of a table whose fields have the values wanted; KeyError when there are none."""
    found = [r for r in run(name)["tables"][table]["rows"] if all(r[k] == v for k, v in wanted.items())]
    if not found:
        raise KeyError(f"{name}.json, table {table}: no row with {wanted}")
    return found


def row(name: str, table: int = 0, **wanted: Any) -> dict[str, Any]:
    """The one row whose fields have the values wanted; KeyError when there is none, or another one."""
    found = rows(name, table, **wanted)
    if len(found) > 1:
        raise KeyError(f"{name}.json, table {table}: {len(found)} rows with {wanted}; make the report with one choice")
    return found[0]


def gpus(name: str) -> str:
    """The hardware of a report, in few words."""
    return run(name)["environment"]["GPUs"].replace("NVIDIA ", "").replace(" 80GB HBM3", "")


def more_collectives() -> list[str]:
    """Those of `MORE_COLLECTIVES` that are here."""
    return [name for name in MORE_COLLECTIVES if (HERE / f"{name}.json").exists()]


def heading(name: str) -> str:
    return f"{MORE_COLLECTIVES[name]}, {gpus(name)}"


def times(name: str, table: int = -1) -> tuple[dict[str, str], dict[str, str], list[dict[str, Any]]]:
    """Titles of a table's keys and of its times and ratios that some row has, by key; and its rows, of a norm those of its
    BF16 form."""
    found = run(name)["tables"][table]
    rows = [r for r in found["rows"] if r.get("form", NORM) == NORM]
    there = [
        c for c in found["columns"] if c["key"] not in (*NOT_TIMES, "more_us") and any(r.get(c["key"]) for r in rows)
    ]
    titles = lambda columns: {c["key"]: c["title"] + (f" ({c['unit']})" if c["unit"] else "") for c in columns}  # noqa: E731
    return titles(k for k in found["keys"] if k["key"] != "form"), titles(there), rows


def times_table(name: str, table: int = -1) -> str:
    keys, columns, rows = times(name, table)
    own = [
        [size(r[k]) if k == "bytes" else _key(r.get(k)) for k in keys]
        + [shown(r[c]) if r.get(c) else "" for c in columns]
        for r in rows
    ]
    head = ["Size" if k == "bytes" else title for k, title in keys.items()]
    return markdown([*head, *("tilescale_net (us)" if c == "us" else t for c, t in columns.items())], own, len(keys))


def _key(value: Any) -> str:
    return f"{value:,d}" if isinstance(value, int) else str(value)


def norm_forms(name: str) -> str:
    """What each other form of a norm takes more than the BF16 form of the same run."""
    rows = run(name)["tables"][0]["rows"]
    forms = [form for form in dict.fromkeys(r["form"] for r in rows) if form != NORM]
    cases = list(dict.fromkeys((r.get("hidden"), r["rows"]) for r in rows))
    more = {(r.get("hidden"), r["rows"], r["form"]): r["more_us"] for r in rows}
    lines = [[f"{n:,d}" + (f" of {h:,d}" if h else ""), *(f"{more[h, n, f]:+.2f}" for f in forms)] for h, n in cases]
    return markdown([f"rows: us more than {NORM}", *forms], lines)


def more_sections() -> str:
    """A section for each of `MORE_COLLECTIVES` that is here, with a plot of all."""
    parts = ["![Time of each, and of every peer](collectives_more.svg)"] if more_collectives() else []
    for name in more_collectives():
        tables = run(name)["tables"]
        parts += [f"### {heading(name)}", *(f"{key}: {value}." for key, value in _said(name))]
        if name == "all_reduce_fp8":
            parts += [times_table(name, table) for table in range(len(tables))]
        else:
            parts += [times_table(name)]
        if "all_reduce_norm" in name and any(r["form"] != NORM for r in tables[0]["rows"]):
            parts += [norm_forms(name)]
        parts += [source(name)]
    return "\n\n".join(parts)


def _said(name: str) -> list[tuple[str, str]]:
    """Peers that are not in every row, and what rows are of."""
    environment = run(name)["environment"]
    about = [(key.capitalize(), environment[key]) for key in ("shape", "rows") if key in environment]
    about += [("NCCL, instead of torch's by LD_PRELOAD", environment["NCCL"])] if name == "all_reduce_nccl" else []
    return about + [(key, value) for key, value in environment.items() if str(value).startswith("not everywhere")]


def shown(figure: float) -> str:
    """A figure in three significant digits."""
    return significant(figure, 3)


def size(number: int) -> str:
    """Bytes in the largest unit that divides them."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number % unit == 0:
            return f"{number // unit} {name}"
    return f"{number} B"


def command(name: str) -> str:
    """The command of a report, as one types it, without the files that it wrote."""
    environment, (script, *flags) = run(name)["environment"], run(name)["command"]
    for option in {"--json", "--table"} & {*flags}:
        at = flags.index(option)
        del flags[at : at + 2]
    # Reports of proxy_write name the provider, since its two ranks are always on two nodes.
    nodes = environment.get("nodes", "2" if "provider" in environment else "1")
    virtual = f"VIRTUAL_NODES={nodes} " if nodes != "1" else ""
    words = " ".join([RENAMED.get(script, script), *flags])
    return f"`GPUS={environment['ranks']} {virtual}bash launch.sh benchmark/{words}`"


def commit(name: str) -> str:
    """Of the package that a report was made with."""
    found: str = run(name)["environment"]["tilescale_net"]
    return found.removesuffix("-dirty") + (" with changes that were not committed" if found.endswith("-dirty") else "")


def rejected() -> list[str]:
    """Reports that cannot be repeated, as their checkout had changes that no commit holds."""
    dirty = (name for name in names() if run(name)["environment"]["tilescale_net"].endswith("-dirty"))
    return [
        f"{name}.json was made from a checkout with uncommitted changes: commit, and measure again" for name in dirty
    ]


def source(*found: str) -> str:
    """Where reports were made and the commands that repeat them, machine by machine."""
    machines: dict[tuple[Any, ...], list[str]] = {}
    for name in found:
        env = run(name)["environment"]
        machines.setdefault((env["GPUs"], env["driver"], env["CUDA"], env["torch"], env["tilelang"]), []).append(name)
    parts = []
    for (gpus, driver, cuda, torch, tilelang), here in machines.items():
        dates = " and ".join(sorted({run(name)["environment"]["date"] for name in here}))
        parts += [
            f"{gpus}, driver {driver}, CUDA {cuda}, torch {torch}, tilelang {tilelang}, {dates}:",
            "",
            *(f"- {command(name)}, commit {commit(name)}, [{name}.json]({name}.json)" for name in here),
            "",
        ]
    return "\n".join(parts[:-1])


# What two H200s can do, by programs of CUDA that do nothing else (docs/results/signals.md, collectives.md, copies.md).
# Bounds, which nothing beats:
LINK_GBPS = 390.8  # NVLink one way, 256 MiB by the copy engine
ONE_STORE_US = 1.06  # from a store to what the peer sees: no call of two GPUs is faster
# References, the best of what else was tried:
ONE_BLOCK_GBPS = {"push": 44.65, "pull": 48.6}  # 4 MiB by bulk copies of one block, launch included
PUT_SIGNAL_US = {8: 1.97, 8192: 2.10, 65536: 3.32}  # by size

COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
}
# Shown by their pages as soon as their files are here; what a file holds stands in its heading.
MORE_COLLECTIVES = {
    "all_reduce_four": "All-reduce of symmetric tensors",
    "all_reduce_nccl": "All-reduce of symmetric tensors beside a newer NCCL",
    "all_reduce_ordinary": "All-reduce of ordinary tensors",
    "all_reduce_fp8": "All-reduce that rounds to FP8, beside bfloat16",
    "all_gather_four": "All-gather",
    "all_to_all_four": "All-to-all",
    "all_reduce_norm": "All-reduce, residual and RMSNorm",
    "all_reduce_norm_two": "All-reduce, residual and RMSNorm",
    "decode_context": "Merge of partial attention outputs",
    "decode_context_two": "Merge of partial attention outputs",
    "ulysses": "Heads for sequence and back",
    "operators": "Operators on ordinary tensors, eager",
    "operators_four": "Operators on ordinary tensors, eager",
}
# Their names in tables that compare all.
SHORT = {
    "all_reduce_four": "all-reduce, symmetric",
    "all_reduce_nccl": "all-reduce, newer NCCL",
    "all_reduce_ordinary": "all-reduce, ordinary tensors",
    "operators": "eager operator",
    "operators_four": "eager operator",
}
# Of a norm: the form that is compared with others; and columns that a comparison of times leaves out.
NORM, NOT_TIMES = "bf16", ("p99", "algbw", "busbw", "nccl_busbw")
FUSED = {"all_gather_matmul": "AG+GEMM", "matmul_reduce_scatter": "GEMM+RS", "matmul_all_reduce": "GEMM+AR"}
# Of collectives: names of others where a column's title is not one, and columns that end as theirs do.
PEERS = {"symm_mem_us": "torch symmetric memory"}
NOT_PEERS = ("more_us", "operator_us", "nccl_calls_us", "flashinfer_fp8_us")
# What rounds to 1.00 is neither ahead nor behind.
BEHIND = 0.995


def without_number(what: str) -> str:
    """A row's name in a table whose last column has the GPUs and how many there are."""
    return re.sub(", (two|four) GPUs", "", what)


@dataclass(frozen=True)
class Row:
    """A figure of ours beside the best that was measured of others in the same run.

    Attributes:
        bound: what is possible at all, where that is known; nothing beats it.
        reference: something else of the same kind, which may be beaten.
    """

    report: str
    subject: str
    at: str
    ours: float
    peer: float
    peer_name: str
    unit: str
    bound: float | None = None
    reference: float | None = None

    @property
    def what(self) -> str:
        return f"{self.subject}, {self.at}" if self.at else self.subject

    @property
    def ratio(self) -> float:
        """Above 1 where ours is better; times are better when they are small, rates when they are large."""
        return self.peer / self.ours if self.unit == "us" else self.ours / self.peer

    def cells(self) -> list[str]:
        bound = f"{shown(self.bound)} {self.unit}" if self.bound else ""
        return [
            without_number(self.what),
            f"{shown(self.ours)} {self.unit}",
            f"{shown(self.peer)} {self.unit}, {self.peer_name}",
            f"{self.ratio:.2f} x",
            f"*{shown(self.reference)} {self.unit}*" if self.reference else bound,
            gpus(self.report),
        ]


def least(peers: dict[str, float | None]) -> tuple[float, str]:
    """The least of those that were measured, and whose it is."""
    return min((figure, peer) for peer, figure in peers.items() if figure is not None)


def over_links(nbytes: float) -> float:
    """us that these bytes of a rank take on their way to the other GPU at least."""
    return max(nbytes / LINK_GBPS / 1e3, ONE_STORE_US)


def copies() -> list[Row]:
    """One block that pushes and pulls; NVSHMEM at its better number of threads."""
    result = []
    for way in ("push", "pull"):
        for ours in rows("unrolledcp_p2p", threads=128):
            theirs = max(r[f"nvshmem_{way}_gbps"] for r in rows("unrolledcp_p2p", bytes=ours["bytes"]))
            what = f"{way} over NVLink by one block of 128 threads"
            best = ONE_BLOCK_GBPS[way] if ours["bytes"] == 4 << 20 else None
            figures = ours[f"tilescale_net_{way}_gbps"], theirs, "NVSHMEM with 128 or 1024 threads", "GB/s"
            result.append(Row("unrolledcp_p2p", what, size(ours["bytes"]), *figures, reference=best))
    return result


def signals() -> list[Row]:
    """put_signal, one way, by 128 threads; NVSHMEM at its better number of threads."""
    result = []
    for ours in rows("put_signal", threads=128):
        nbytes = ours["bytes"]
        best = min(r["nvshmem"] for r in rows("put_signal", bytes=nbytes)), "NVSHMEM", "us"
        tried = PUT_SIGNAL_US.get(nbytes)
        result.append(Row("put_signal", "put_signal, one way", size(nbytes), ours["auto"], *best, reference=tried))
        if "line" in ours:
            what = "put_signal, data and signal in one 16-byte line"
            result.append(Row("put_signal", what, size(nbytes), ours["line"], *best, ONE_STORE_US))
    return result


def collectives() -> list[Row]:
    """Collectives in a CUDA graph: of two ranks each sends half of the bytes, of an all-reduce twice as many."""
    result = []
    for name, what in COLLECTIVES.items():
        for found in rows(name):
            nbytes = found["bytes"]
            bound = over_links(nbytes / 2 * (2 if name == "all_reduce" else 1))
            result.append(Row(name, what, size(nbytes), found["us"], *least(peers(name, found)), "us", bound))
    for name in more_collectives():
        if name == "all_reduce_fp8":  # which rounds: others of its table do not
            continue
        text, ranks = MORE_COLLECTIVES[name], int(run(name)["environment"]["ranks"])
        what = f"{SHORT.get(name, text[0].lower() + text[1:])}, {'two' if ranks == 2 else 'four'} GPUs"
        for found in times(name, 0)[2]:
            keys = [key for key in run(name)["tables"][0]["keys"] if key["key"] != "form"]
            of = f"{what}, {found['operator']}" if "operator" in found else what
            at = ", ".join(f"{key['title'].lower()} {found[key['key']]}" for key in keys)
            at = size(found["bytes"]) if "bytes" in found else at
            result.append(Row(name, of, at, found["us"], *least(peers(name, found)), "us"))
    return result


def peers(name: str, found: dict[str, Any]) -> dict[str, float | None]:
    """us of all others in a row of a collective's first table, by name; those of its table of peers too. Rounding to FP8 is
    another operation."""
    result: dict[str, float | None] = {}
    for table in run(name)["tables"]:
        keys = [key["key"] for key in table["keys"]]
        same: dict[str, Any] = next((r for r in table["rows"] if all(r[key] == found[key] for key in keys)), {})
        result |= {
            PEERS.get(c["key"], c["title"]): same.get(c["key"])
            for c in table["columns"] if c["key"].endswith("_us") and c["key"] not in NOT_PEERS
        }  # fmt: skip
    return result


def mixture_of_experts() -> list[Row]:
    """Dispatch and combine; NCCL moves the same rows and neither sorts nor sums them."""
    result = []
    for name in ("moe_throughput", "moe_latency"):
        theirs = {(r["dtype"], r["operation"]): r["kernel"] for r in rows(name, system="NCCL")}
        for ours in rows(name, system="tilescale_net"):
            peer = theirs.get((ours["dtype"], ours["operation"].split(",")[0]))
            if peer is None:
                continue
            dtype, tokens = ours["dtype"].upper(), f"{ours['tokens']} tokens"
            bound = over_links(ours["remote"] * ours["kernel"] * 1e3)
            what = f"MoE {ours['operation']}, {tokens}"
            result.append(Row(name, what, dtype, ours["kernel"], peer, "NCCL, rows only", "us", bound))
    return result


def fused_reports() -> list[str]:
    """Reports of fused products between GPUs, of bfloat16 and, where there are some, of 8 bits."""
    return [name for kind in FUSED for name in (kind, f"{kind}_fp8") if name in names()]


def fused_title(name: str, found: dict[str, Any]) -> str:
    """Operator and dtype of a row of gemm_ways.json, which has both, or of a report of one operator."""
    dtype = found.get("dtype") or run(name)["settings"].get("dtype", "bf16")
    return f"{FUSED[found.get('kind', name.removesuffix('_fp8'))]}, {'FP8' if dtype in ('fp8', 'float8_e4m3fn') else 'BF16'}"


def fused_products() -> list[Row]:
    """GEMMs with their communication; between two GPUs the reference is cuBLAS alone in the same run."""
    result = []
    for name in fused_reports():
        for found in rows(name):
            peer = least({"cuBLAS, then NCCL": found["sequence"], "torch symmetric memory": found["torch"]})
            taken = found.get("operator", found["ours"])  # what a user gets, where that was measured
            what, at = fused_title(name, found), f"M {found['m']}"
            result.append(Row(name, what, at, taken, *peer, "us", reference=found["matmul"]))
    for found in rows("gemm_ways"):
        peer = least({"cuBLAS, then NCCL": found["nccl"], "torch symmetric memory": found["torch"]})
        what = f"{fused_title('gemm_ways', found)}, four GPUs"
        result.append(Row("gemm_ways", what, f"M {found['m']}", taken_way(found)[1], *peer, "us"))
    return result


def taken_way(found: dict[str, Any]) -> tuple[str, float]:
    """The way that the operator takes by this row of gemm_ways.json, which `kernels/fused/measured.json` was made from."""
    ways = {"fused": "fused", "copy_engines": "copy engines", "unfused": "unfused"}
    return min(((name, found[key]) for key, name in ways.items() if found.get(key)), key=lambda way: way[1])


def products() -> list[Row]:
    """Products of one GPU without communication beside cuBLAS."""
    return [
        Row("matmul", f"{r['dtype'].upper()} GEMM alone, K {r['k']}, N {r['n']}", f"M {r['m']}", r["ours"], r["matmul"],
            "cuBLAS", "us")
        for r in rows("matmul")
    ]  # fmt: skip


def fabric() -> list[Row]:
    """Puts of a kernel through queue, proxy and libfabric beside a CPU thread that writes the same bytes."""
    result = []
    who = "a CPU thread with libfabric alone"
    for key, how in (("ProxySingleNBI", "NBI"), ("ProxySingle", "blocking")):
        for ours in rows("proxy_write"):
            theirs = row("proxy_write", 1, bytes=ours["bytes"])["BareSingle"]
            what = f"put to another node (tcp over loopback, staged), {how}"
            result.append(Row("proxy_write", what, size(ours["bytes"]), ours[key], theirs, who, "Gbit/s"))
    for r in rows("proxy_write", 2):
        what = "put_signal to another node (tcp over loopback, staged), one way"
        result.append(Row("proxy_write", what, size(r["bytes"]), r["signal"], r["bare"], who, "us"))
    return result


SUBJECTS = {
    "copies": copies,
    "signals": signals,
    "collectives": collectives,
    "products": lambda: [*fused_products(), *products()],
    "moe": mixture_of_experts,
    "fabric": fabric,
}
# What the summary shows of a subject, by the ends of rows' names.
SHOWN = {
    "copies": ("64 KiB", "4 MiB"),
    "signals": (" 8 B", "64 KiB"),
    "collectives": (" 8 KiB", "256 KiB", " 1 MiB", "64 MiB"),
    "products": ("BF16, M 512", "BF16, M 4096", "BF16, four GPUs, M 4096", "K 8192, N 14336, M 4096"),
    "moe": ("",),
    "fabric": ("NBI, 8 MiB", "blocking, 64 KiB", "one way, 8 B"),
}
# What the README shows: one line a subject.
HIGHLIGHTS = (
    "push over NVLink by one block of 128 threads, 4 MiB",
    "put_signal, data and signal in one 16-byte line, 8 B",
    "all-reduce, 256 KiB",
    "all-gather, 64 MiB",
    "AG+GEMM, BF16, four GPUs, M 4096",
    "MoE dispatch, cached layout, 4096 tokens, BF16",
)
HEAD = ["what", "tilescale_net", "best alternative", "ratio", "bound, or *reference*", "on"]


def summary(subject: str) -> list[Row]:
    """Rows of a subject that the summary shows; KeyError for one of its sizes that no row has."""
    found = SUBJECTS[subject]()
    for end in SHOWN[subject]:
        if not any(r.what.endswith(end) for r in found):
            raise KeyError(f"{subject}: no row for the summary ends with {end!r}")
    return [r for r in found if r.what.endswith(SHOWN[subject])]


def comparison(found: Iterable[Row]) -> str:
    return markdown(HEAD, [r.cells() for r in found])


def highlights() -> str:
    """What the README shows."""
    by_name = {r.what: r for make in SUBJECTS.values() for r in make()}
    return comparison(by_name[what] for what in HIGHLIGHTS)


def others_ahead() -> str:
    """All rows of all reports where somebody else was better, subject by subject."""
    by_subject: dict[str, list[Row]] = {}
    for found in (r for make in SUBJECTS.values() for r in make()):
        by_subject.setdefault(found.subject, []).append(found)
    lines = []
    for subject, compared in by_subject.items():
        behind = [r for r in compared if r.ratio < BEHIND]
        if not behind:
            continue
        low, high = (f"{pick(r.ratio for r in behind):.2f}" for pick in (min, max))
        places = [r.at for r in behind]
        some = f"{len(places)} of {len(compared)}, {places[0]} to {places[-1]}"
        peers = ", ".join(dict.fromkeys(r.peer_name for r in behind))
        ratios = f"{low} x" if low == high else f"{low} to {high} x"
        at = ", ".join(places) if len(places) <= 3 else some
        lines.append([without_number(subject), at, ratios, peers, gpus(compared[0].report)])
    return markdown(["what", "where", "ratio", "who is ahead", "on"], lines, 2)
