"""Kernels with one line of synchronisation left out must fail in the simulator: that is what makes it worth passing."""

import importlib
import importlib.util
import random
from pathlib import Path

import pytest

import tilescale_net.kernels.moe
import tilescale_net.runtime.settings as settings
from tests import ranks
from tests.kernels.moe.test_rounds import in_a_row, rounds, weights_at_combine
from tilescale_net.kernels.moe import Tuning

pytestmark = pytest.mark.skipif(settings.device_kind() == "cuda", reason="on a GPU a race may stay hidden for years")
FOLDER = Path(tilescale_net.kernels.moe.__file__).parent
ATTEMPTS = 12  # runs of ROUNDS times four rounds; a right schedule may hide a missing line
ROUNDS = 2
SHAPE = dict(num_experts=4, max_tokens=7, hidden=64, top_k=3)
TUNING = Tuning(blocks=2, threads=32, combine_threads=32, chunk=2)

EXPERT = (rounds, dict(tuning=TUNING), dict(again=True))
RANK = (rounds, dict(layout="rank", tuning=TUNING), dict(again=True))
LATENCY = (rounds, dict(mode="latency", tuning=TUNING), dict())
WEIGHTS = (weights_at_combine, dict(mode="latency", tuning=TUNING), dict())
ROW = (in_a_row, dict(tuning=TUNING), dict())
# file, text to leave out, and the test that must fail with its options
MUTANTS = {
    "plan without wait for records": (
        "routing",
        'N.wait(records_ready[thread], "ge", call * T.uint64(blocks))',
        EXPERT,
    ),
    "dispatch without wait for room": (
        "dispatch_throughput",
        "open_call(ready, active, status, me, call, tag, block, senders, thread)",
        ROW,
    ),
    "dispatch without wait for rows": ("dispatch_throughput", 'N.wait_warp(arrived[peer, c], "ge", call)', EXPERT),
    "dispatch without fence": ("dispatch_throughput", "N.fence(pe)", EXPERT),
    "combine without wait for rows": ("combine_throughput", 'N.wait(arrived[peer, slot // size], "ge", call)', EXPERT),
    "combine without fence": ("combine_throughput", "N.fence(peer)", RANK),
    "weights without wait": ("exchange_weights", 'N.wait_block(sent[parity * R + peer], "ge", call)', WEIGHTS),
    "latency without wait for messages": ("dispatch_latency", 'N.wait_warp(arrived[place], "ge", call)', LATENCY),
}


def _run(module: str, path: str, seed: int, test, options: dict, how: dict) -> None:
    """A test on this rank with the kernel of the file at `path` in the place of the original."""
    if path:
        spec = importlib.util.spec_from_file_location(f"mutant_{module}", path)
        mutant = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(mutant)
        host = importlib.import_module(
            f"tilescale_net.kernels.moe.{'latency' if test is weights_at_combine or 'latency' in module else 'throughput'}"
        )
        name = "plan_routing" if module == "routing" else module
        assert hasattr(host, name)
        setattr(host, name, getattr(mutant, name))
    test(seed, SHAPE, options, how, ("random", "masked", "random", "one rank") * ROUNDS)


def _attempt(module: str, path: str, case: tuple, seed: int) -> str | None:
    """What went wrong in one run: wrong data or a wait that never ended; None when all was right."""
    env = {"TSN_TIMEOUT": "3", "TSN_SIM_VISIBILITY": ("late", "random")[seed % 2]}
    outcomes = ranks.launch(2, _run, module, path, seed, *case, env=env, timeout=90)
    wrong = {o.error[0]: o.error[1] for o in outcomes if not o.ok}
    if not wrong:
        return None
    # The other rank may only have noticed that this one failed. A mutant that does not compile shows nothing.
    shown = [kind for kind in ("AssertionError", "WaitTimeout", "OutOfBounds", "IndexError") if kind in wrong]
    assert shown, wrong
    return f"{shown[0]}: {wrong[shown[0]]}"


@pytest.mark.parametrize("case", [EXPERT, RANK, LATENCY], ids=["expert", "rank", "latency"])
def test_the_originals_pass(case):
    assert _attempt("routing", "", case, random.randrange(1 << 20)) is None


# Those whose like is among the others.
LATER = ("dispatch without wait for room", "combine without wait for rows")


@pytest.mark.parametrize("mutant", [pytest.param(m, marks=pytest.mark.nightly if m in LATER else []) for m in MUTANTS])
def test_mutants_fail(mutant, tmp_path):
    module, text, case = MUTANTS[mutant]
    source = (FOLDER / f"{module}.py").read_text()
    assert source.count(text) == 1, f"the text to leave out is there {source.count(text)} times: {text}"
    path = tmp_path / f"{module}.py"
    path.write_text(source.replace(text, "pass"))
    first = random.randrange(1 << 20)
    for seed in range(first, first + ATTEMPTS):
        if _attempt(module, str(path), case, seed) is not None:
            return
    raise AssertionError(f"{mutant}: {ATTEMPTS} schedules from seed {first} on did not show it")
