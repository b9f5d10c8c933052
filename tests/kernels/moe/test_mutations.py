"""Kernels with one line of synchronisation left out must fail in the simulator: that is what makes it worth passing."""

import random
from pathlib import Path

import pytest

import tests.kernels.moe
import tilescale_net.kernels.moe
import tilescale_net.runtime.settings as settings
from tests import ranks
from tests.kernels.declared import declared
from tests.kernels.moe import mutants

pytestmark = pytest.mark.skipif(settings.device_kind() == "cuda", reason="on a GPU a race may stay hidden for years")
FOLDER = Path(tilescale_net.kernels.moe.__file__).parent
ATTEMPTS = 12  # a right schedule may hide a missing line
MUTANTS = mutants.MUTANTS | {name: mutant for name, (_, mutant) in declared(tests.kernels.moe, "MUTANTS").items()}


def _attempt(mutant: mutants.MoeMutant, path: str, seed: int) -> str | None:
    """What went wrong in one run: wrong data or a wait that never ended; None when all was right."""
    env = {"TSN_TIMEOUT": "3", "TSN_SIM_VISIBILITY": ("late", "random")[seed % 2]}
    if mutant.nodes > 1:
        env["VIRTUAL_NODES"] = str(mutant.nodes)
        env["TSN_CHAOS"] = f"seed={seed},reorder=0.5,delay_us=3000"  # what is not waited for comes late
    outcomes = ranks.launch(2 * mutant.nodes, mutants.run, mutant.file, path, seed, *mutant.case, env=env, timeout=90)
    wrong = {o.error[0]: o.error[1] for o in outcomes if not o.ok}
    if not wrong:
        return None
    # The other rank may only have noticed that this one failed. A mutant that does not compile shows nothing.
    shown = [
        kind for kind in ("AssertionError", "WaitTimeout", "OutOfBounds", "IndexError", "KernelError") if kind in wrong
    ]
    assert shown, wrong
    return f"{shown[0]}: {wrong[shown[0]]}"


@pytest.mark.parametrize("case", [mutants.EXPERT, mutants.RANK, mutants.LATENCY], ids=["expert", "rank", "latency"])
@pytest.mark.sample(0)
def test_the_originals_pass(case):
    assert _attempt(mutants.MoeMutant("routing", "", case), "", random.randrange(1 << 20)) is None


# Those whose like is among the others.
LATER = (
    "dispatch without wait for room", "combine without wait for rows", "forwarder without what sources said",
    "forwarder sums without fence", "forwarder without wait for sums", "rows for a forwarder without quiet",
    "latency forwarder without wait for sums",
)  # fmt: skip


@pytest.mark.parametrize("mutant", [pytest.param(m, marks=pytest.mark.nightly if m in LATER else []) for m in MUTANTS])
@pytest.mark.sample(1)
def test_mutants_fail(mutant, tmp_path):
    file, text, _, _ = MUTANTS[mutant]
    path = tmp_path / f"{file}.py"
    path.write_text(mutants.mutant((FOLDER / f"{file}.py").read_text(), text))
    first = random.randrange(1 << 20)
    for seed in range(first, first + ATTEMPTS):
        if _attempt(MUTANTS[mutant], str(path), seed) is not None:
            return
    raise AssertionError(f"{mutant}: {ATTEMPTS} schedules from seed {first} on did not show it")
