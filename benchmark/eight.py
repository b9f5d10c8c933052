"""The tables that the field publishes, on all GPUs of this machine (2, 4 or 8), within two calls of ten minutes.

    "$(bash launch.sh --setup-only)" benchmark/eight.py --part 1 --output docs/results/eight.md
    "$(bash launch.sh --setup-only)" benchmark/eight.py --part 2 --output docs/results/eight.md

It starts the other benchmarks one after the other, each with its own limit. Their results (a JSON file each, with all
samples, and the outcome) are in a folder of the page's name, from which each call makes the page anew: the second
call's page has the steps of both. The page names steps that failed, took too long or did not begin. DeepEP's own tests
need `--deep-ep`, the folder of a checkout of DeepEP.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark.common import suite
from benchmark.common.suite import Entry, Result, execute, outcome_of
from tilescale_net.cli.arguments import Parser, positive_int
from tilescale_net.launch import run
from tilescale_net.runtime import settings

ROOT = suite.FOLDER.parent
LEAST = 15  # seconds without which no step begins


@dataclasses.dataclass(frozen=True)
class Step:
    """A table. `name`: on the page. script: of this folder; "" for a step without one, see `_command`. `arguments`: on
    GPUs; elsewhere the script's own quick ones. `limit`: seconds. part: of the run. nodes: VIRTUAL_NODES."""

    name: str
    script: str
    arguments: str
    limit: int
    part: int
    nodes: int = 1


STEPS = (
    Step("all_reduce", "all_reduce", "--sizes 8K..256M --warmup 2 --repeat 7", 60, 1),
    Step("all_gather", "all_gather", "--sizes 8K..256M --warmup 2 --repeat 7", 45, 1),
    Step("reduce_scatter", "reduce_scatter", "--sizes 8K..256M --warmup 2 --repeat 7", 45, 1),
    Step("all_to_all", "all_to_all", "--sizes 8K..256M --warmup 2 --repeat 7", 45, 1),
    Step("all_reduce_norm", "all_reduce_norm", "", 45, 1),
    Step("gemm_ways", "gemm_ways", "--warmup 2 --repeat 5 --limit 250", 320, 1),
    Step("moe_throughput", "moe_calls", "--mode throughput", 150, 2),
    Step("moe_latency", "moe_calls", "--mode latency", 90, 2),
    Step("moe_peers", "moe_all_to_all", "", 120, 2),
    Step("moe_two_nodes", "moe_all_to_all", "--no-peers --mode throughput --dtype bf16", 90, 2, 2),
    Step("all_reduce_two_nodes", "all_reduce", "--sizes 64K,1M --repeat 5 --no-nccl", 45, 2, 2),
    Step("deep_ep_intranode", "", "tests/test_intranode.py", 120, 2),
    Step("deep_ep_low_latency", "", "tests/test_low_latency.py", 120, 2),
    Step("tests", "", "", 240, 2),
)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--part", type=int, choices=(0, 1, 2), default=0, help="of the run; 0: both, one after the other"
    )
    parser.add_argument("--output", default="eight.md", help="the page (eight.md)")
    parser.add_argument("--ranks", type=positive_int, help="(all GPUs; 2 without any)")
    parser.add_argument("--seconds", type=positive_int, default=570, help="of a part, after which nothing begins (570)")
    parser.add_argument("--only", help="steps of it, separated by commas")
    parser.add_argument("--deep-ep", help="folder of a checkout of DeepEP, whose tests are run")
    parser.add_argument(
        "--quick", action="store_true", help="each script with its quick arguments, as in the simulator"
    )
    args = parser.parse_args()
    known = [step.name for step in STEPS]
    if unknown := set(args.only.split(",") if args.only else ()) - set(known):
        parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    return args


def _command(
    step: Step, args: argparse.Namespace, ranks: int, quick: bool, scripts: dict[str, Entry], raw: Path
) -> list[str] | str:
    """The command of a step, or the reason why it is not started."""
    if step.nodes > 1 and ranks % step.nodes:
        return f"not started; {ranks} ranks are not {step.nodes} nodes"
    if step.script:
        entry = scripts.get(step.script)
        if entry is None:
            return f"not started; there is no benchmark/{step.script}.py"
        words = entry.quick if quick else step.arguments
        ours = [sys.executable, "-m", "tilescale_net", "run", "-n", str(ranks), str(suite.FOLDER / f"{step.script}.py")]
        return [*ours, *words.split(), "--json", str(raw / f"{step.name}.json")]
    if step.name == "tests":
        tests = ["tests/launch/test_arguments.py"] if quick else ["-m", "gpu", "tests"]
        return [sys.executable, "-m", "pytest", "-q", "-n", "0", "--rootdir", str(ROOT), *tests]
    if not args.deep_ep:
        return "not started; give --deep-ep"
    program = Path(args.deep_ep) / step.arguments
    ours = [sys.executable, str(ROOT / "tests/deep_ep/run_peer_tests.py"), str(program)]
    return [*ours, "--num-processes", str(ranks)]


def _run(step: Step, command: list[str], limit: float, raw: Path) -> Result:
    entry, start = Entry(step.name, nodes=step.nodes), time.monotonic()
    (raw / f"{step.name}.json").unlink(missing_ok=True)
    code = execute(command, step.nodes, limit)
    result = outcome_of(entry, raw, code, time.monotonic() - start)
    return result if step.script or result.outcome else dataclasses.replace(result, outcome="passed")


def _keep(result: Result, raw: Path) -> None:
    about = {name: getattr(result, name) for name in ("name", "outcome", "failed", "seconds", "nodes")}
    (raw / f"{result.name}.outcome").write_text(json.dumps(about))


def _kept(raw: Path) -> list[Result]:
    """Results of the steps so far."""
    found = []
    for step in STEPS:
        outcome, content = raw / f"{step.name}.outcome", raw / f"{step.name}.json"
        if outcome.exists():
            about = json.loads(outcome.read_text())
            found.append(Result(**about, content=json.loads(content.read_text()) if content.exists() else None))
    return found


def main() -> int:
    """Run the steps of a part; 1 if one failed."""
    args = parse()
    gpus = 0 if settings.DEVICE.get() == "simulator" else run.visible_gpus()
    ranks, output = args.ranks or gpus or 2, Path(args.output)
    raw = output.with_suffix("")
    raw.mkdir(parents=True, exist_ok=True)
    scripts = {entry.name: entry for entry in suite.entries()}
    chosen = [s for s in STEPS if args.part in (0, s.part) and (not args.only or s.name in args.only.split(","))]
    failed, begin, part = [], time.monotonic(), 0
    for step in chosen:
        if step.part != part:
            begin, part = time.monotonic(), step.part
        left = args.seconds - (time.monotonic() - begin)
        command = _command(step, args, ranks, args.quick or not gpus, scripts, raw)
        if left < LEAST:
            command = f"not started; {args.seconds} s were over"
        print(f"\n=== {step.name}", flush=True)
        if isinstance(command, str):
            result = Result(step.name, outcome=command, nodes=step.nodes)
        else:
            result = _run(step, command, min(step.limit, left), raw)
        if result.failed:
            failed.append(step.name)
        _keep(result, raw)
        print(f"{step.name}: {result.outcome or 'measured'}, {result.seconds:.0f} s", flush=True)
        what = f"{ranks} GPUs" if gpus else f"{ranks} simulated GPUs"
        output.write_text(suite.page(_kept(raw), raw.name, f"{what}: the tables that the field publishes"))
    print(f"\n{output}: {len(chosen)} steps; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
