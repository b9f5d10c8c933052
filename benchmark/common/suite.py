"""All benchmarks that fit this machine, one after the other, and one HTML page of what they found.

python -m tilescale_net bench --quick
python -m tilescale_net bench --output report.html --only put_signal,all_gather

The page is written after each benchmark: what ends the suite early (Ctrl-C, SIGTERM) leaves the page as it is.
"""

import argparse
import ast
import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmark.common.report import significant
from tilescale_net.launch import run
from tilescale_net.runtime import settings

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
th, td { border: 1px solid #ccc; padding: 3px 8px; text-align: right; }
th { background: #f2f2f2; } td.text { text-align: left; }
code { background: #f2f2f2; padding: 1px 4px; } img { max-width: 100%; }
.failed { color: #b00020; }
"""


@dataclass
class Result:
    """What became of one benchmark.

    Attributes:
        content: of its JSON file, None when it left none.
        plot: an SVG image.
        said: why there are no results, or not all.
        seconds: that it took.
    """

    name: str
    content: dict | None = None
    plot: bytes | None = None
    said: str = ""
    failed: bool = False
    seconds: float = 0.0

    @property
    def measured(self) -> bool:
        return bool(self.content and any(t["rows"] for t in self.content["tables"]))


def page(results: Sequence[Result]) -> str:
    """The page: what all runs have in common first, then one section a benchmark."""
    environments = [r.content["environment"] for r in results if r.measured]
    common = (
        {k: v for k, v in environments[0].items() if all(e.get(k) == v for e in environments)} if environments else {}
    )
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>tilescale_net benchmarks</title>",
        f"<style>{STYLE}</style></head><body><h1>tilescale_net benchmarks</h1>",
        _facts(common),
        "<ul>",
        *(f"<li><a href='#{r.name}'>{r.name}</a>{_state(r)}</li>" for r in results),
        "</ul>",
        *(_section(r, common) for r in results),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _facts(facts: dict[str, str]) -> str:
    if not facts:
        return ""
    rows = "".join(f"<tr><th>{escape(k)}</th><td class='text'>{escape(str(v))}</td></tr>" for k, v in facts.items())
    return f"<table>{rows}</table>"


def _state(result: Result) -> str:
    if not result.said:
        return f": {result.seconds:.0f} s"
    mark = " class='failed'" if result.failed else ""
    return f": <span{mark}>{escape(result.said)}</span>"


def _section(result: Result, common: dict[str, str]) -> str:
    out = [f"<h2 id='{result.name}'>{result.name}</h2>"]
    if result.said:
        out.append(f"<p{' class=failed' if result.failed else ''}>{escape(result.said)}</p>")
    if not result.content:
        return "\n".join(out)
    out.append(
        f"<p><code>{escape(' '.join(result.content['command'][:1] + _public(result.content['command'][1:])))}</code></p>"
    )
    out.append(_facts({k: v for k, v in result.content["environment"].items() if k not in common}))
    if result.plot:
        image = base64.b64encode(result.plot).decode()
        out.append(f"<p><img alt='{result.name}' src='data:image/svg+xml;base64,{image}'></p>")
    for table in result.content["tables"]:
        if table["rows"]:
            out.append(f"<h3>{escape(table['name'])}</h3>")
            out.append(_table(table))
            out += [f"<p>{escape(note)}</p>" for note in table["notes"]]
    out += [f"<p>{escape(note)}</p>" for note in result.content["notes"]]
    return "\n".join(out)


def _public(arguments: list[str]) -> list[str]:
    """Arguments without the files that the suite itself requests."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument in ("--json", "--plot"):
            skip = not skip
            continue
        kept.append(argument)
    return kept


def _table(table: dict) -> str:
    columns = [
        c for c in [*table["keys"], *table["columns"]] if any(r.get(c["key"]) is not None for r in table["rows"])
    ]
    units = [f" ({c['unit']})" if c.get("unit") else "" for c in columns]
    head = "".join(f"<th>{escape(c['title'] + unit)}</th>" for c, unit in zip(columns, units))
    lines = []
    for row in table["rows"]:
        cells = []
        for c in columns:
            value = row.get(c["key"])
            kind = " class='text'" if isinstance(value, str) else ""
            cells.append(f"<td{kind}>{escape(_show(value))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _show(value) -> str:
    if value is None:
        return "-"
    return significant(value) if isinstance(value, float) else f"{value:,d}" if isinstance(value, int) else str(value)


FOLDER = Path(__file__).resolve().parents[1]
NOTHING = 3  # a benchmark's exit code where it can measure nothing
INTERRUPTED = (130, 143)  # by Ctrl-C and SIGTERM
PATIENCE_S = 20  # for a benchmark to end by itself, after Ctrl-C


@dataclass(frozen=True)
class Entry:
    """A benchmark of the suite: a script with a line `BENCH = dict(…)` of literals, which are read without running it.

    Attributes:
        name: of the script.
        ranks: that it takes; 0 for all of the machine.
        nodes: VIRTUAL_NODES.
        quick: arguments that make a run of seconds.
        gpu: needs a GPU.
    """

    name: str
    ranks: int = 2
    nodes: int = 1
    quick: str = ""
    gpu: bool = False


def entries() -> list[Entry]:
    """The suite, by name."""
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "BENCH":
                assert isinstance(node.value, ast.Call)
                found.append(Entry(path.stem, **{str(k.arg): ast.literal_eval(k.value) for k in node.value.keywords}))
    return found


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends the suite as Ctrl-C does."""


def _terminate(number: int, frame) -> None:
    raise Terminated


def main(args: argparse.Namespace) -> int:
    """Run the suite.

    Exit code: 0, 1 when a benchmark failed or the page cannot be written, 2 for wrong arguments, 3 when nothing was measured,
    130 after Ctrl-C, 143 after SIGTERM.
    """
    known = {e.name: e for e in entries()}
    wanted = args.only.split(",") if args.only else list(known)
    for name in wanted:
        if name not in known:
            print(f"tilescale_net bench: {name!r} is not one of {', '.join(known)}", file=sys.stderr)
            return 2
    gpus = 0 if settings.DEVICE.get() == "simulator" else run.visible_gpus()
    results: list[Result] = []
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        ended = _run_all([known[name] for name in wanted], args, gpus, results)
    except OSError as err:
        print(f"tilescale_net bench: {args.output} cannot be written: {err.strerror}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    measured = [r for r in results if r.measured]
    failed = [r.name for r in results if r.failed]
    print(
        f"\n{args.output}: {len(measured)} of {len(wanted)} benchmarks"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    if ended:
        return ended
    return 1 if failed else 0 if measured else NOTHING


def _run_all(chosen: Sequence[Entry], args: argparse.Namespace, gpus: int, results: list[Result]) -> int:
    """Run each and put it on the page; 0, or the exit code of what ended this early. OSError when the page cannot be written."""
    ended = 0
    with tempfile.TemporaryDirectory() as work:
        for entry in chosen:
            print(f"\n=== {entry.name}", flush=True)
            start = time.monotonic()
            try:
                results.append(_run(entry, args, gpus, Path(work)))
            except KeyboardInterrupt as stop:
                ended = 143 if isinstance(stop, Terminated) else 130
                results.append(_outcome(entry, Path(work), ended, time.monotonic() - start))
            if results[-1].said:
                print(f"{entry.name}: {results[-1].said}", flush=True)
            partial = Path(f"{args.output}.{os.getpid()}.partial")
            try:
                partial.write_text(page(results))
                os.replace(partial, args.output)
            finally:
                partial.unlink(missing_ok=True)
            if ended:
                break
    return ended


def _run(entry: Entry, args: argparse.Namespace, gpus: int, work: Path) -> Result:
    ranks = entry.ranks or args.ranks or gpus or 2
    if entry.gpu and not gpus:
        return Result(entry.name, said="not measured; it needs a GPU")
    if gpus and ranks > gpus:
        return Result(entry.name, said=f"not measured; it takes {ranks} GPUs, this machine shows {gpus}")
    script = FOLDER / f"{entry.name}.py"
    command = [sys.executable, "-m", "tilescale_net", "run", "-n", str(ranks), str(script)]
    command += [*(entry.quick.split() if args.quick else ()), "--json", str(work / f"{entry.name}.json")]
    if importlib.util.find_spec("matplotlib"):
        command += ["--plot", str(work / f"{entry.name}.svg")]
    root = str(FOLDER.parent)
    env = {**os.environ, "VIRTUAL_NODES": str(entry.nodes)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    start = time.monotonic()
    process = subprocess.Popen(command, env=env)
    try:
        code = process.wait()
    except KeyboardInterrupt as stop:
        if isinstance(stop, Terminated):
            process.terminate()
        try:
            process.wait(PATIENCE_S)  # Ctrl-C is the launcher's too, which ends its ranks
        except subprocess.TimeoutExpired:  # this process alone was interrupted
            process.terminate()
            process.wait()
        raise
    return _outcome(entry, work, code, time.monotonic() - start)


def _outcome(entry: Entry, work: Path, code: int, seconds: float) -> Result:
    """What a run left behind."""
    content, plot = None, None
    if (work / f"{entry.name}.json").exists():
        content = json.loads((work / f"{entry.name}.json").read_text())
    if (work / f"{entry.name}.svg").exists():
        plot = (work / f"{entry.name}.svg").read_bytes()
    said = ""
    if code == NOTHING:
        said = next(iter(content["notes"]), "not measured") if content else "not measured"
    elif code in INTERRUPTED:
        said = "interrupted"
    elif code:
        said = f"failed with exit code {code}"
    return Result(entry.name, content, plot, said, failed=code not in (0, NOTHING, *INTERRUPTED), seconds=seconds)
