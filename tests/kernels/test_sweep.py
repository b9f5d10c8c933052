"""Kernels that lack one synchronisation: the race detector finds them in one run, in any schedule, and some show in data."""

import functools
import os
import random
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import tilescale_net.runtime.settings as settings
from tests import jobs, ranks
from tests.kernels import registry, survivors, sweep
from tests.kernels.registry import MUTANTS, RUNS, Mutant
from tests.simulator import small_calls
from tests.tutorials.test_tutorials import PROGRAMS, expected_runs
from tests.variants import nightly, variants
from tilescale_net import kernels

pytestmark = pytest.mark.skipif(settings.device_kind() == "cuda", reason="checks are made in the simulator")
FOLDER = Path(next(iter(kernels.__path__)))
SEEDS = 20  # of runs without the check
ATTEMPTS = 36  # of mutants of the registry: a right schedule may hide a missing line, and most show at once
# The sample of the ordinary suite: file, change, index among changes of its kind, and the error that shows it.
SAMPLE = [("exchange", "no sync_threads", 1, "DataRace")]


def _runs_of(file: str) -> list[str]:
    return [name for name, run in RUNS.items() if file in run.files]


@dataclass(frozen=True)
class Outcome:
    """The errors that show a mutant, "" for none, and digests of the programs that ran."""

    checked: str  # in one run with the check
    random: str  # under which of the seeds without it
    programs: tuple[str, ...] = ()


def _worlds(file: str) -> list[tuple[int, int]]:
    """Ranks and nodes: two ranks; four on two nodes, so that ranks have several peers, and puts go both ways; four that are
    all mapped, where a file has kernels of its own for them. Runs for two ranks or for one node have no others."""
    first = RUNS[_runs_of(file)[0]]
    size = 2 if first.two_ranks else 4
    return list(dict.fromkeys([(2, 1), *([] if first.one_node else [(size, 2)]), (size, 1)]))


def outcome(file: str, text: str, folder: Path, seeds: list[int], world: tuple[int, int] = (2, 1)) -> Outcome:
    """Errors that show that the text of a kernel's file is wrong.

    A failure in the run with the check would have occurred without it, too: it has the first seed. SWEEP_TIMEOUT, in
    seconds, replaces TSN_TIMEOUT on machines that have more to do.

    Args:
        world: number of ranks, and of nodes.
    """
    path = folder / f"{file.replace('/', '_')}.py"
    path.write_text(text)
    size, nodes = world
    runs = [name for name in _runs_of(file) if nodes == 1 or not RUNS[name].one_node]
    env = {
        "TSN_TIMEOUT": os.environ.get("SWEEP_TIMEOUT", "30" if size > 2 else "20"),
        "TSN_SIM_STALL": "10",
        "VIRTUAL_NODES": str(nodes),
        "TSN_SIM_RACES": "1",
        "TSN_SIM_CXXFLAGS": "-O0",  # each program runs once or a few times
    }
    outcomes = ranks.launch(size, sweep.run, file, str(path), runs, seeds, env=env, timeout=600)
    shown = [o.error[1].split("\n") for o in outcomes if o.error and o.error[0] == "Shown"]
    assert shown or all(o.ok for o in outcomes), [o.error for o in outcomes]
    raced = any(s[0] for s in shown) or any(o.value and o.value[0] for o in outcomes)
    # The other rank may only have noticed that this one failed.
    failed = next((s for s in shown if s[1] not in ("PeerLost", "RankFailure")), None)
    if failed is None:
        programs = [p for o in outcomes if o.value for p in o.value[1]]
        return Outcome("DataRace" if raced else "", "", tuple(sorted(programs)))
    assert failed[1] not in ("NameError", "TypeError"), f"the mutant is no kernel: {failed}"
    found = "wrong data" if failed[1] == "AssertionError" else failed[1]
    checked = failed[2] == "check"
    return Outcome("DataRace" if raced else found if checked else "", f"{found}, seed {0 if checked else failed[2]}")


def kernel_outcome(file: str, mutant: sweep.Swept, folder: Path, seeds: list[int]) -> tuple[str, str]:
    """Checks that show a mutant with two ranks, or else with four; "the same program" for one equal to the original."""
    programs = []
    for world in _worlds(file):
        found = outcome(file, mutant.text, folder, seeds, world)
        if found.checked or found.random:
            return found.checked, found.random
        programs += found.programs
    return ("", "") if programs != _programs(file) else ("the same program", "")


def program_outcome(program: Path, mutant: sweep.Swept, folder: Path, seeds: list[int]) -> tuple[str, str]:
    """The same for a tutorial, whose output shows whether the data are right."""
    path = folder / program.name
    path.write_text(mutant.text)
    found = ["", ""]
    for races, seed in [(1, 0), *((0, seed) for seed in seeds)]:
        for command, output in expected_runs(program):
            variables, _, words = command.partition("bash launch.sh ")
            env = os.environ | dict(pair.split("=", 1) for pair in variables.split()) | {"TSN_DEVICE": "simulator"}
            env |= {"TSN_TIMEOUT": "10", "TSN_SIM_RACES": str(races), "TSN_SIM_SEED": str(seed)}
            done = jobs.launch(str(path), *words.split()[1:], env=env)
            told = re.search(r"\b(DataRace|WaitTimeout|SimulatorDeadlock)\b", done.stderr)
            wrong = done.returncode != 0 or done.stdout.strip() != output
            found[1 - races] = told[1] if wrong and told else "wrong data" if wrong else ""
            if wrong:
                break
        if not races and found[1]:
            found[1] += f", seed {seed}"
            break
    return found[0], found[1]


def test_every_call_is_changed_once():
    source = "def f():\n    T.sync_threads()\n    w = N.wait(a[0], 'ge', i)\n    N.signal(a[0], 1, pe, fence=True)\n"
    source += "    N.put_signal_warp(y[0], x[0], pe, a[0], 1, op='add', **options)\n    N.signal_block(a[0], 1, pe)\n"
    source += "    N.st(a[0], 1, sem='release', scope='gpu')\n"
    source += "    N.put_signal_thread(y, x, pe, a, 1, 'add', count=n)\n"
    found = sweep.mutants(source)
    assert [m.change for m in found] == [
        "no sync_threads", "no wait", "no fence of signal", "put_signal_warp in two, no fence", "no fence of signal_block",
        "sem of st", "put_signal_thread in two, no fence",
    ]  # fmt: skip
    changed = [m.text.splitlines()[m.line - 1].strip() for m in found]
    assert changed == [
        "pass", "w = T.cast(i, \"uint64\")", "N.signal(a[0], 1, pe, fence=False)",
        "N.put_warp(y[0], x[0], pe, **options); N.signal_warp(a[0], 1, pe, op='add', fence=False)",
        "N.signal_block(a[0], 1, pe, fence=False)", "N.st(a[0], 1, sem='relaxed', scope='gpu')",
        "N.put_thread(y, x, pe, count=n); N.signal(a, 1, pe, op='add')",
    ]  # fmt: skip
    assert all(len(sweep.mutants((FOLDER / f"{file}.py").read_text())) for file in ("exchange", "moe/handshake"))


# -- the registry's, which must show without the race detector: else the runs would prove nothing -----------------------


def _data_shows(mutant: Mutant, path: Path, seeds: list[int], seconds: int = 3) -> str | None:
    """The error of one of the runs: wrong data or a wait that did not end within `seconds`; None when all passed."""
    env = {"TSN_TIMEOUT": str(seconds)}
    if mutant.nodes > 1:  # data that nobody waits for come late
        env |= {"VIRTUAL_NODES": str(mutant.nodes), "TSN_CHAOS": f"seed={seeds[0]},reorder=0.5,delay_us=3000"}
    arguments = mutant.file, str(path), [mutant.run], seeds, False
    outcomes = ranks.launch(2 * mutant.nodes, sweep.run, *arguments, env=env, timeout=150)
    if all(outcome.ok for outcome in outcomes):
        return None
    # The other rank may only have noticed that this one failed. A mutant that does not compile shows nothing.
    kinds = {o.error[1].split("\n")[1] if o.error[0] == "Shown" else o.error[0] for o in outcomes if o.error}
    shown = kinds & {"AssertionError", "WaitTimeout", "RankMismatch", "OutOfBounds", "IndexError"}
    assert shown, [o.error for o in outcomes]
    return shown.pop()


ORIGINALS = sorted({(mutant.run, mutant.nodes) for mutant in MUTANTS.values()})


# test_races.py makes the same runs of the kernels as they are.
@pytest.mark.parametrize("run, nodes", [ORIGINALS[0], *(nightly(*where) for where in ORIGINALS[1:])])
def test_the_originals_pass(run, nodes):
    mutant = next(m for m in MUTANTS.values() if (m.run, m.nodes) == (run, nodes))
    # A rank may wait for one that still compiles.
    assert _data_shows(mutant, FOLDER / f"{mutant.file}.py", [random.randrange(1 << 20)], seconds=60) is None


@variants(3, "name", [nightly(name, when=mutant.nightly) for name, mutant in MUTANTS.items()])
def test_mutants_fail(name, tmp_path):
    mutant, path = MUTANTS[name], tmp_path / "mutant.py"
    original = (FOLDER / f"{mutant.file}.py").read_text()
    assert mutant.old in original, f"the text to replace is not there: {mutant.old}"
    path.write_text(original.replace(mutant.old, mutant.new))
    first = random.randrange(1 << 20)
    for seed in range(first, first + ATTEMPTS, 3):  # ranks that found nothing wrong go on to another schedule
        if _data_shows(mutant, path, [seed, seed + 1, seed + 2]) is not None:
            return
    raise AssertionError(f"{name}: {ATTEMPTS} schedules from seed {first} on did not show it")


# -- all that a machine makes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file, change, number, shown", SAMPLE)
def test_a_sample_is_found(file, change, number, shown, tmp_path):
    of_its_kind = [m for m in sweep.mutants((FOLDER / f"{file}.py").read_text()) if m.change == change]
    mutant = of_its_kind[number]
    assert outcome(file, mutant.text, tmp_path, []).checked == shown, (file, mutant.line, change)


@dataclass(frozen=True)
class Place:
    """Where a mutant is: the change and its index among changes of its kind, in a kernel's file or a numbered tutorial."""

    name: str
    change: str
    number: int

    def __str__(self):
        return f"{self.name}, {self.change}, {self.number}"


def _tutorial(name: str) -> Path | None:
    return next((p for p in PROGRAMS if p.name.startswith(f"{name}_")), None)


@functools.cache
def _original(name: str) -> str:
    folder = Path(__file__).parent if name.startswith("examples/") else FOLDER
    return (_tutorial(name) or folder / f"{name}.py").read_text()


@functools.cache
def _mutants(name: str) -> dict[Place, sweep.Swept]:
    kinds, found = Counter(), {}
    for mutant in sweep.mutants(_original(name)):
        found[Place(name, mutant.change, kinds[mutant.change])] = mutant
        kinds[mutant.change] += 1
    return found


@functools.cache
def _programs(name: str) -> list[str]:
    """An unchanged file in the runs of `kernel_outcome`, none of which is reported."""
    with tempfile.TemporaryDirectory() as folder:
        found = [outcome(name, _original(name), Path(folder), [], world) for world in _worlds(name)]
    assert not any(o.checked for o in found), f"{name} as it is: {found}"
    return [p for o in found for p in o.programs]


def exploration(file: str, text: str, folder: Path) -> str:
    """Results of every schedule of the file's small calls, without the race detector; "-" where it has none."""
    calls = small_calls.OF.get(file)
    if not calls:
        return "-"
    path = folder / f"{file.replace('/', '_')}_explored.py"
    path.write_text(text)
    (found,) = ranks.launch(1, sweep.explore, file, str(path), calls, init=False, timeout=300)
    assert found.ok, found.error
    return found.value or "none wrong"


def row(place: Place, folder: Path, seeds: list[int]) -> str:
    """Print a row for a mutant, and return the report of the run with the check: "" for none.

    Args:
        folder: for the mutant's file.
        seeds: of runs without the check.
    """
    mutant, program = _mutants(place.name)[place], _tutorial(place.name)
    if program:
        checked, random = program_outcome(program, mutant, folder, seeds)
    else:
        checked, random = kernel_outcome(place.name, mutant, folder, seeds)
    explored = "-" if program else exploration(place.name, mutant.text, folder)
    line = _original(place.name).splitlines()[mutant.line - 1].strip()
    shown = f"{mutant.change} | {checked or '-'} | {random or '-'} | {explored}"
    print(f"| {place.name}:{mutant.line} | `{line}` | {shown} |", flush=True)
    return "" if checked == "the same program" else checked


def _swept() -> list[str]:
    """Files of kernels and numbers of tutorials in which there is something to leave out."""
    files = [str(p.relative_to(FOLDER).with_suffix("")) for p in sorted(FOLDER.rglob("*.py"))]
    files += [f"examples/{name}" for name in registry.EXAMPLES]
    return [name for name in [*files, *(p.name[:2] for p in PROGRAMS)] if _mutants(name)]


def test_every_file_is_run():
    assert not [name for name in _swept() if not name.isdigit() and not _runs_of(name)]
    assert survivors.KNOWN.keys() <= set(_swept())
    known = {Place(name, *mutant) for name, of_file in survivors.KNOWN.items() for mutant in of_file}
    assert not known - {place for name in _swept() for place in _mutants(name)}


@pytest.mark.nightly
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", [name for name in _swept() if not name.isdigit()])
def test_a_file_as_it_is_is_not_accused(name):
    assert _programs(name)


@pytest.mark.nightly
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("place", [place for name in _swept() for place in _mutants(name)], ids=str)
def test_one_run_with_the_check_shows_all_but_known_survivors(place, tmp_path):
    """SWEEP_SEEDS is the number of runs without the check, SEEDS by default; `python -m tests.outcomes` makes the table."""
    shown = row(place, tmp_path, list(range(int(os.environ.get("SWEEP_SEEDS", str(SEEDS))))))
    known = survivors.KNOWN.get(place.name, {}).get((place.change, place.number))
    assert shown or known, f"{place}: nothing shows it"


# python -m tests.kernels.test_sweep moe/routing 02
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        for file in sys.argv[1:]:
            for place in _mutants(file):
                row(place, Path(work), list(range(SEEDS)))
