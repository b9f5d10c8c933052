"""Kernels with one line of synchronisation left out must fail in the simulator: that is what makes it worth passing.

Each mutant is a copy of a kernel's file with some text replaced; it takes the original's place in the ranks, which then
run the ordinary tests of that kernel.
"""

import random
import re
from pathlib import Path

import pytest

import tests.kernels
import tilescale_net.runtime.settings as settings
from tests import ranks
from tests.kernels.declared import declared, run
from tilescale_net import kernels

pytestmark = pytest.mark.skipif(settings.device_kind() == "cuda", reason="on a GPU a race may stay hidden for years")
FOLDER = Path(next(iter(kernels.__path__)))
ATTEMPTS = 12  # a right schedule may hide a missing line, and most mutants show at once

MUTANTS = declared(tests.kernels, "MUTANTS")


def _attempt(path: str | None, file: str, module: str, test: str, seed: int) -> str | None:
    """What went wrong in one run: wrong data or a wait that never ended; None when all was right."""
    env = {"TSN_TIMEOUT": "3", "TSN_SIM_VISIBILITY": ("late", "random")[seed % 2]}
    outcomes = ranks.launch(2, run, path, file, module, test, seed, env=env, timeout=150)
    wrong = {o.error[0]: o.error[1] for o in outcomes if not o.ok}
    if not wrong:
        return None
    # The other rank may only have noticed that this one failed. A mutant that does not compile shows nothing.
    shown = [kind for kind in ("AssertionError", "WaitTimeout", "RankMismatch") if kind in wrong]
    assert shown, wrong
    return f"{shown[0]}: {wrong[shown[0]]}"


@pytest.mark.parametrize("module, test", sorted({(module, mutant.test) for module, mutant in MUTANTS.values()}))
@pytest.mark.sample(1)
def test_the_originals_pass(module, test):
    assert _attempt(None, "", module, test, random.randrange(1 << 20)) is None


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly if mutant.nightly else []) for n, (_, mutant) in MUTANTS.items()]
)
@pytest.mark.sample(2)
def test_mutants_fail(name, tmp_path):
    module, mutant = MUTANTS[name]
    text = (FOLDER / f"{mutant.file}.py").read_text()
    before, define, rest = text.partition(f"\ndef {mutant.function}(")
    body, *after = re.split(r"(?=\n(?:def |class |@))", rest, maxsplit=1)
    found = body.count(mutant.old)
    assert found == 1, f"the text to replace is in {mutant.function} {found} times: {mutant.old}"
    path = tmp_path / f"{mutant.file}.py"
    path.write_text(before + define + body.replace(mutant.old, mutant.new) + "".join(after))
    first = random.randrange(1 << 20)
    for seed in range(first, first + ATTEMPTS):
        if _attempt(str(path), mutant.file, module, mutant.test, seed) is not None:
            return
    raise AssertionError(f"{name}: {ATTEMPTS} schedules from seed {first} on did not show it")
