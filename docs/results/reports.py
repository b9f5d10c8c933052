"""The reports beside this program, which `--json` of the benchmarks wrote: rows, figures, and how each was made."""

import functools
import json
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Benchmarks that have another name now than when they wrote their report.
RENAMED = {"queue.py": "device_queue.py"}


@functools.cache
def run(name: str) -> dict:
    """One benchmark's report: environment, command, tables of rows."""
    return json.loads((HERE / f"{name}.json").read_text())


def names() -> list[str]:
    """Of all reports."""
    return sorted(p.stem for p in HERE.glob("*.json"))


def rows(name: str, table: int = 0, **wanted) -> list[dict]:
    """Rows of a table whose fields have the values wanted; KeyError when there are none."""
    found = [r for r in run(name)["tables"][table]["rows"] if all(r[k] == v for k, v in wanted.items())]
    if not found:
        raise KeyError(f"{name}.json, table {table}: no row with {wanted}")
    return found


def row(name: str, table: int = 0, **wanted) -> dict:
    """The one row whose fields have the values wanted; KeyError when there is none, or another one."""
    found = rows(name, table, **wanted)
    if len(found) > 1:
        raise KeyError(f"{name}.json, table {table}: {len(found)} rows with {wanted}; make the report with one choice")
    return found[0]


def gpus(name: str) -> str:
    """The hardware of a report, in few words."""
    return run(name)["environment"]["GPUs"].replace("NVIDIA ", "").replace(" 80GB HBM3", "")


def significant(number: float) -> str:
    """Three significant digits, never in powers of ten."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def size(number: int) -> str:
    """Bytes in the largest unit that divides them."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number % unit == 0:
            return f"{number // unit} {name}"
    return f"{number} B"


def markdown(head: list[str], lines: Iterable[Iterable], words: int = 1) -> str:
    """A table; its first `words` columns are aligned as words are, the others as numbers."""
    rule = ["---"] * words + ["--:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [head, rule, *lines])


def words(name: str) -> str:
    """Benchmark and flags of a report, without the file that it was written to."""
    found = list(run(name)["command"])
    if "--json" in found:
        at = found.index("--json")
        del found[at : at + 2]
    return " ".join([RENAMED.get(found[0], found[0]), *found[1:]])


def command(name: str) -> str:
    """The command of a report, as one types it."""
    environment = run(name)["environment"]
    # Reports of proxy_write name the provider, since its two ranks are always on two nodes.
    nodes = environment.get("nodes", "2" if "provider" in environment else "1")
    virtual = f"VIRTUAL_NODES={nodes} " if nodes != "1" else ""
    return f"`GPUS={environment['ranks']} {virtual}bash launch.sh benchmark/{words(name)}`"


def commit(name: str) -> str:
    """Of the package that a report was made with."""
    return run(name)["environment"]["tilescale_net"]


def source(*found: str) -> str:
    """Where reports were made and the commands that repeat them, machine by machine."""
    machines: dict[tuple, list[str]] = {}
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
