"""All benchmarks that fit this machine, one after the other, and one Markdown page of their results.

python -m tilescale_net bench --quick
python -m tilescale_net bench --output report.md --only put_signal,all_gather

The page is written after each benchmark, with its plots in a folder of the page's name: an early end of the suite
(Ctrl-C, SIGTERM) leaves both complete up to then.
"""

import argparse
import ast
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
from pathlib import Path
from typing import Any

from benchmark.common.report import NOTHING, Column, markdown
from tilescale_net.launch import run
from tilescale_net.runtime import settings


@dataclass
class Result:
    """Result of one benchmark. `content`: of its JSON file, None if it left none. `plot`: an SVG image. `outcome`: the
    reason for no results, or not all. `seconds`: its time. `nodes`: VIRTUAL_NODES of the run."""

    name: str
    content: dict[str, Any] | None = None
    plot: bytes | None = None
    outcome: str = ""
    failed: bool = False
    seconds: float = 0.0
    nodes: int = 1

    @property
    def measured(self) -> bool:
        return bool(self.content and any(t["rows"] for t in self.content["tables"]))


def page(results: Sequence[Result], plots: str, title: str = "tilescale_net benchmarks") -> str:
    """The page: the common environment first, then one section per benchmark. `plots`: the folder of their images."""
    environments = [r.content["environment"] for r in results if r.content and r.measured]
    common = (
        {k: v for k, v in environments[0].items() if all(e.get(k) == v for e in environments)} if environments else {}
    )
    lines = [f"# {title}", ""]
    lines += [markdown(["all of them", ""], common.items(), 2), ""] if common else []
    index = ([f"[{r.name}](#{r.name})", r.outcome or "measured", f"{r.seconds:.0f}"] for r in results)
    lines.append(markdown(["benchmark", "outcome", "seconds"], index, 2))
    for result in results:
        lines += _section(result, common, plots)
    return "\n".join(lines) + "\n"


def _section(result: Result, common: dict[str, str], plots: str) -> list[str]:
    out = ["", f"## {result.name}", ""]
    if result.outcome:
        out += [f"**{result.outcome}**" if result.failed else result.outcome, ""]
    if not result.content:
        return out
    script, *arguments = result.content["command"]
    environment = result.content["environment"]
    ranks = f"GPUS={environment['ranks']} " if "ranks" in environment else ""
    nodes = f"VIRTUAL_NODES={result.nodes} " if result.nodes > 1 else ""
    command = f"{ranks}{nodes}bash launch.sh benchmark/{script} {' '.join(_public(arguments))}".rstrip()
    own = "; ".join(f"{k}: {v}" for k, v in environment.items() if k not in common and k != "ranks")
    out += ["```bash", command, "```", "", *([own, ""] if own else [])]
    if result.plot:
        out += [f"![{result.name}]({plots}/{result.name}.svg)", ""]
    for table in result.content["tables"]:
        if table["rows"]:
            out += [f"### {table['name']}", "", _table(table), ""]
            out += [line for note in table["notes"] for line in (note, "")]
    return out + [line for note in result.content["notes"] for line in (note, "")]


def _public(arguments: list[str]) -> list[str]:
    """Arguments without the files that the suite itself requests."""
    files = {"--json", "--plot"}
    return [word for before, word in zip(["", *arguments], arguments) if not {before, word} & files]


def _table(table: dict[str, Any]) -> str:
    columns = [
        Column(c["key"], c["title"], unit=c.get("unit", ""))
        for c in [*table["keys"], *table["columns"]]
        if any(r.get(c["key"]) is not None for r in table["rows"])
    ]
    words = sum(isinstance(table["rows"][0].get(c.key), str) for c in columns[:2])
    return markdown(
        [c.heading for c in columns], ([c.show(r.get(c.key)) for c in columns] for r in table["rows"]), words
    )


FOLDER = Path(__file__).resolve().parents[1]
INTERRUPTED = (130, 143)  # by Ctrl-C and SIGTERM
TOO_LONG = 124  # as timeout(1) has it
TERM_TIMEOUT_S = 20  # for a benchmark to end after Ctrl-C


@dataclass(frozen=True)
class Entry:
    """A benchmark of the suite: a script with a line `BENCH = dict(…)` of literals, which are read without running it.
    `name`: of the script. `ranks`: number of its ranks; 0 for all of the machine. `nodes`: VIRTUAL_NODES. `quick`:
    arguments that make a run of seconds. `gpu`: needs a GPU."""

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


def _terminate(number: int, frame: Any) -> None:
    raise Terminated


def main(args: argparse.Namespace) -> int:
    """Run the suite. Exit code: 0, 1 when a benchmark failed or the page cannot be written, 2 for wrong arguments, 3
    when nothing was measured, 130 after Ctrl-C, 143 after SIGTERM."""
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
    """Run each and put it on the page; 0, or the exit code of an early end. OSError if the page cannot be written."""
    ended = 0
    with tempfile.TemporaryDirectory() as work:
        for entry in chosen:
            print(f"\n=== {entry.name}", flush=True)
            start = time.monotonic()
            try:
                results.append(_run(entry, args, gpus, Path(work)))
            except KeyboardInterrupt as stop:
                ended = 143 if isinstance(stop, Terminated) else 130
                results.append(outcome_of(entry, Path(work), ended, time.monotonic() - start))
            if results[-1].outcome:
                print(f"{entry.name}: {results[-1].outcome}", flush=True)
            _write(results, Path(args.output))
            if ended:
                break
    return ended


def _write(results: Sequence[Result], path: Path) -> None:
    """The page, whole or not at all, and the plot of the latest result beside it. OSError when they cannot be written."""
    folder, latest = path.with_suffix(".plots"), results[-1]
    if latest.plot:
        folder.mkdir(exist_ok=True)
        (folder / f"{latest.name}.svg").write_bytes(latest.plot)
    partial = Path(f"{path}.{os.getpid()}.partial")
    try:
        partial.write_text(page(results, folder.name))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _run(entry: Entry, args: argparse.Namespace, gpus: int, work: Path) -> Result:
    ranks = entry.ranks or args.ranks or gpus or 2
    if entry.gpu and not gpus:
        return Result(entry.name, outcome="not measured; it needs a GPU")
    if gpus and ranks > gpus:
        return Result(entry.name, outcome=f"not measured; it takes {ranks} GPUs, this machine shows {gpus}")
    script = FOLDER / f"{entry.name}.py"
    command = [sys.executable, "-m", "tilescale_net", "run", "-n", str(ranks), str(script)]
    command += [*(entry.quick.split() if args.quick else ()), "--json", str(work / f"{entry.name}.json")]
    if importlib.util.find_spec("matplotlib"):
        command += ["--plot", str(work / f"{entry.name}.svg")]
    start = time.monotonic()
    code = execute(command, entry.nodes)
    return outcome_of(entry, work, code, time.monotonic() - start)


def execute(command: list[str], nodes: int = 1, limit: float | None = None) -> int:
    """Run a command with this checkout on Python's path; its exit code, TOO_LONG when it was ended after `limit`
    seconds. Raises KeyboardInterrupt: after Ctrl-C or SIGTERM; the command has ended then."""
    root = str(FOLDER.parent)
    env = {**os.environ, "VIRTUAL_NODES": str(nodes)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    process = subprocess.Popen(command, env=env)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        _wait(process)
        return TOO_LONG
    except KeyboardInterrupt as stop:
        if isinstance(stop, Terminated):
            process.terminate()
        _wait(process)  # Ctrl-C is the launcher's too, which ends its ranks
        raise


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command that was interrupted or asked to end."""
    try:
        process.wait(TERM_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # this process alone was interrupted, or the command does not listen
        process.terminate()
        try:
            process.wait(TERM_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def outcome_of(entry: Entry, work: Path, code: int, seconds: float) -> Result:
    """The result files of a run."""
    content, plot = None, None
    if (work / f"{entry.name}.json").exists():
        content = json.loads((work / f"{entry.name}.json").read_text())
    if (work / f"{entry.name}.svg").exists():
        plot = (work / f"{entry.name}.svg").read_bytes()
    outcome = ""
    if code == NOTHING:
        outcome = next(iter(content["notes"]), "not measured") if content else "not measured"
    elif code in INTERRUPTED:
        outcome = "interrupted"
    elif code == TOO_LONG:
        outcome = f"ended after {seconds:.0f} s; rows up to then"
    elif code:
        outcome = f"failed with exit code {code}"
    failed = code not in (0, NOTHING, *INTERRUPTED)
    return Result(entry.name, content, plot, outcome, failed, seconds, entry.nodes)
