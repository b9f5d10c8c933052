"""Mutants made by machine: each synchronisation of a kernel's file left out or weakened, one at a time.

What a call becomes:
- a wait, fence, quiet, flush_wait or barrier that stands alone: nothing;
- a wait whose result is used: the value that it waits for; a slot that is waited for: its number;
- `fence=True`, and the fence of `signal_block` and its like: no fence;
- put_signal: a put, and a signal that nothing orders after it;
- an order (`sem=`, `memory_order=`): relaxed.

Not operations that the simulator lacks: asynchronous copies and products (`T.tma_store_wait`, `T.wait_wgmma`,
`T.fence_proxy_async`), which it carries out at once. Nor `wait_block` by each thread for itself, which orders the same
accesses and leaves out the barrier behind it alone: that is the mutant "no sync_threads" where the author wrote one.
"""

import ast
import functools
import hashlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.kernels import registry
from tilescale_net import errors
from tilescale_net.runtime import simulator

KERNELS = "tilescale_net.kernels"
ALONE = re.compile(
    r"(wait|fence|quiet)(_block|_warp)?|flush_wait|barrier_\w+|(take|wait)_slot(_block|_warp)?|take_vectors|sync_(threads|warp|grid)"
)


# Options that say an order or its scope, values that are weakened, and their replacements.
_WEAKER = (
    ("sem", ("acquire", "release"), "relaxed"),
    ("memory_order", ("acquire", "release", "acq_rel", "seq_cst"), "relaxed"),
)


@dataclass(frozen=True)
class Swept:
    """A mutant: the text of the whole file, and where it differs from the original."""

    line: int
    change: str
    text: str


def _segment(source: bytes, node: ast.AST) -> tuple[int, int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def _instead(call: ast.Call, alone: bool) -> tuple[str, str] | None:
    """The replacement of a call, and a word for it; None for a call that synchronises nothing."""
    name = call.func.attr
    text = [ast.unparse(a) for a in call.args]
    keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}
    if ALONE.fullmatch(name):
        if alone:
            return "pass", f"no {name}"
        if name.startswith("wait") and len(text) == 3:
            return f'T.cast({text[2]}, "uint64")', f"no {name}"
        if "_slot" in name and len(text) == 3:
            return f"(({text[1]}) % ({text[2]}))", f"no {name}"
        return None
    for option, strong, weak in _WEAKER:
        if keywords.get(option, "").strip("'\"") in strong and keywords[option].strip("'\"") != weak:
            weaker = _written(keywords | {option: repr(weak)})
            return f"{ast.unparse(call.func)}({', '.join([*text, *weaker])})", f"{option} of {name}"
    rest = {k: v for k, v in keywords.items() if k != "fence"}
    arguments = ", ".join([*text, *_written(rest)])
    if keywords.get("fence") == "True" or re.fullmatch(r"signal_(block|warp)", name) and "fence" not in keywords:
        return f"N.{name}({arguments}, fence=False)", f"no fence of {name}"
    if put := re.fullmatch(r"put_signal(_block|_warp|_thread)", name):
        scope = put[1].replace("_thread", "")
        copy = ", ".join([*text[:3], *_written({k: v for k, v in keywords.items() if k != "op"})])
        op = [keywords["op"]] if "op" in keywords else text[5:]
        word = [*text[3:5], text[2], *(f"op={how}" for how in op)]
        fence = [] if scope == "" else ["fence=False"]
        return f"N.put{put[1]}({copy}); N.signal{scope}({', '.join([*word, *fence])})", f"{name} in two, no fence"
    return None


def _written(keywords: dict[str | None, str]) -> list[str]:
    return [f"{k}={v}" if k else f"**{v}" for k, v in keywords.items()]


def mutants(source: str) -> list[Swept]:
    """All mutants of a file that one change makes, in the order of its lines."""
    tree, encoded = ast.parse(source), source.encode()
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("N", "T")):
            continue
        change = _instead(node, id(node) in alone)
        if change:
            begin, end = _segment(encoded, node)
            text = encoded[:begin] + change[0].encode() + encoded[end:]
            found.append(Swept(node.lineno, change[1], text.decode()))
    return sorted(found, key=lambda m: (m.line, m.change))


class Replace:
    """Finds the module `name` in another file; to be put in front of `sys.meta_path`."""

    def __init__(self, name: str, path: str):
        self.name, self.path = name, path

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path) if name == self.name else None


class Shown(AssertionError):
    """How a mutant has shown: the race detector's report, and the error that ended the run, under which seed."""


def _reports() -> list[str]:
    """Reports of the race detector from now on. A job would end there; the kernel has ended, and others follow."""
    from tilescale_net.compiler.simulator.kernel import SimulatedFunction

    reports: list[str] = []
    give_up = SimulatedFunction._give_up

    def note(self, context, error):
        if isinstance(error, errors.DataRace):
            reports.append(str(error))
        else:
            give_up(self, context, error)

    SimulatedFunction._give_up = note
    simulator.report_race = lambda base, wrong: reports.append(wrong)
    return reports


def _programs() -> set[str]:
    """Programs compiled for the simulator from now on: lines of each without its barriers, and their number.

    tilelang puts barriers between accesses to shared memory that it cannot prove to be apart; where the author's own is
    left out, it puts one at that place or close by.
    """
    from tilescale_net.compiler.simulator import host_compiler

    programs: set[str] = set()
    load = host_compiler.load

    def note(name, text):
        lines = sorted(line for line in text.splitlines() if "tsn::" in line or ".arrive(" in line or ".wait(" in line)
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        programs.add(f"{name} {digest} {text.count('__syncthreads()')} {text.count('__syncwarp')}")
        return load(name, text)

    host_compiler.load = note
    return programs


def _anywhere(found: bool) -> bool:
    told = torch.tensor([found], dtype=torch.int32)
    torch.distributed.all_reduce(told)
    return bool(told)


@functools.cache
def _uses(module: str) -> frozenset[str]:
    """Modules of the kernels that a module imports when it is imported, through others too, and itself."""
    spec = importlib.util.find_spec(module)
    found = {module}
    for node in ast.parse(Path(spec.origin).read_text()).body if spec and spec.origin else ():
        if isinstance(node, ast.ImportFrom):
            of = importlib.util.resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
            found |= {f"{of}.{alias.name}" if f"{of}.{alias.name}" in _modules() else of for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    found &= _modules()
    return frozenset(found).union(*(_uses(name) for name in found - {module}))


@functools.cache
def _modules() -> frozenset[str]:
    folder = Path(next(iter(importlib.util.find_spec(KERNELS).submodule_search_locations)))
    paths = [path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")]
    return frozenset(".".join([KERNELS, *parts]).removesuffix(".__init__") for parts in paths)


def _cache_kernels(module: str, path: str) -> None:
    """Let this rank cache kernels from now on, under names that no other program looks for.

    Those of files that do not use the mutated one are the same for all mutants, and a rank need not build kernels that another
    has built: tracing kernels is most of what a mutant costs.
    """
    from tilescale_net.compiler.simulator import cache

    digest, original = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12], cache.kernel_key
    cache._unchanged = lambda function: True

    def key(function, args, kwargs, options):
        found = original(function, args, kwargs, options)
        return found and f"{found}-{digest if module in _uses(function.__module__) else 'swept'}"

    cache.kernel_key = key


def _replace(file: str, path: str) -> str:
    """Let this rank import kernels anew, the file at `path` in the place of `file` of the registry; the module's name.

    Those that do not use the file stay, with their macros, which the server has translated.
    """
    module = registry.module_of(file)
    registry.forget_kernels(lambda name: module in _uses(name))
    sys.meta_path.insert(0, Replace(module, path))
    _cache_kernels(module, path)
    return module


def explore(file: str, path: str, calls: tuple[str, ...]) -> str:
    """What goes wrong in some schedule of small calls, with the file at `path` in the place of kernels/`file`.py; or ""."""
    from tests.simulator import small_calls
    from tilescale_net.explore import search
    from tilescale_net.explore.case import Case

    _replace(file, path)
    for name in calls:
        try:
            with Case(getattr(small_calls, name), 2, races=False) as case:
                report = search.every(case, seconds=30)
        except Exception as error:  # a mutant that is no kernel
            return type(error).__name__
        if report.failure:
            return "deadlock" if report.failure.startswith("deadlock") else "wrong data"
    return ""


def run(file: str, path: str, names: list[str], seeds: list[int], checked: bool = True) -> tuple[str, list[str]]:
    """The small runs `names` on this rank, with the file at `path` in the place of `file` of the registry: once with the race detector (`checked`), then under `seeds` without it.

    Returns: the detector's report, and digests of the programs that ran.

    Raises:
        Shown: a run failed; the detector's first report, a line, and the error.
    """
    module = _replace(file, path)
    reports, programs = _reports(), _programs()
    for races, seed in [*([(1, 0)] if checked else []), *((0, seed) for seed in seeds)]:
        os.environ |= {"TSN_SIM_RACES": str(races), "TSN_SIM_SEED": str(seed)}
        if not checked:
            os.environ["TSN_SIM_VISIBILITY"] = ("late", "random")[seed % 2]
        for name in names:
            try:
                registry.RUNS[name].run(seed)
            except (Exception, pytest.fail.Exception) as error:
                said = next(iter(reports), "")
                raise Shown(f"{said}\n{type(error).__name__}\n{seed if not races else 'check'}\n{error}") from error
            if races and _anywhere(bool(reports)):
                break
        assert sys.modules[module].__file__ == path, f"no run of {', '.join(names)} imports {module}"
    return next(iter(reports), ""), sorted(programs)
