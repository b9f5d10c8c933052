"""Kernels with one line of synchronisation left out must fail in the simulator: that is what makes it worth passing.

Each mutant is a copy of a kernel's file with some text replaced; it takes the original's place in the ranks, which then
run the ordinary tests of that kernel.
"""

import importlib
import importlib.util
import random
import re
import sys
from pathlib import Path

import pytest

import tilescale_net.runtime.settings as settings
from tests import ranks
from tilescale_net import kernels

pytestmark = pytest.mark.skipif(settings.device_kind() == "cuda", reason="on a GPU a race may stay hidden for years")
FOLDER = Path(kernels.__file__).parent
ATTEMPTS = 12  # runs of CALLS calls; a right schedule may hide a missing line, and most mutants show at once
CALLS = 24

GATHER = ("tests.kernels.test_all_gather", "_gather", dict(threads=32, blocks=2))
STORES = ("tests.kernels.test_all_gather", "_gather", dict(threads=32, blocks=2, stores_from=0))
EQUAL = ("tests.kernels.test_all_to_all", "_equal", dict(threads=32, blocks=2))
UNEVEN = ("tests.kernels.test_all_to_all", "_uneven", dict(threads=32, blocks=2))
REDUCE = (
    "tests.kernels.test_reduce_scatter",
    "_reduce",
    dict(threads=32, blocks=1, slots=2, chunk_bytes=256, algorithm="push"),
)

WAIT_READY = 'N.wait(ready[thread], "ge", call << T.uint64(TAG_BITS))'
NO_WAIT = '(call << T.uint64(TAG_BITS)) | T.cast(tag, "uint64")'
WAIT_ARRIVED = 'N.wait(arrived[thread, block], "ge", call)'
# file, function, what is replaced and by what, the test that must fail
MUTANTS = {
    "gather without wait for room": ("exchange", "exchange", WAIT_READY, NO_WAIT, GATHER),
    "gather without wait for data": ("exchange", "exchange", WAIT_ARRIVED, "pass", GATHER),
    "gather without fence": ("exchange", "exchange", ", fence=True", "", GATHER),
    "gather without quiet": ("exchange", "exchange", "N.quiet(thread)", "pass", GATHER),
    "gather that does not count its calls": ("exchange", "exchange", "calls[block] = call", "pass", GATHER),
    "stores without wait for room": ("exchange", "exchange_by_stores", WAIT_READY, NO_WAIT, STORES),
    "stores without wait for data": ("exchange", "exchange_by_stores", WAIT_ARRIVED, "pass", STORES),
    "stores without fence": ("exchange", "exchange_by_stores", ", fence=True", "", STORES),
    "all-to-all without wait for data": ("exchange", "exchange", WAIT_ARRIVED, "pass", EQUAL),
    "uneven without wait for data": ("all_to_all_uneven", "all_to_all_uneven", WAIT_ARRIVED, "pass", UNEVEN),
    "uneven without fence": ("all_to_all_uneven", "all_to_all_uneven", ", fence=True", "", UNEVEN),
    "uneven without quiet": ("all_to_all_uneven", "all_to_all_uneven", "N.quiet(thread)", "pass", UNEVEN),
    "reduce without wait for data": ("reduce_scatter", "reduce_scatter", 'N.wait_slot(arrived[thread, block], done + step - 1, slots)', "pass", REDUCE),
    "reduce without wait for a slot": (
        "reduce_scatter", "reduce_scatter", 'N.take_slot(consumed[thread, block], done + step, slots)', "pass", REDUCE
    ),
    "reduce without fence": ("reduce_scatter", "reduce_scatter", ", fence=True", "", REDUCE),
    "reduce without quiet": ("reduce_scatter", "reduce_scatter", "N.quiet(thread)", "pass", REDUCE),
}  # fmt: skip
# One of each kind of line, and one of each kernel, in every run; the others nightly.
ALWAYS = {
    "gather without wait for room", "stores without wait for data", "gather that does not count its calls", "all-to-all without wait for data",
    "uneven without fence", "uneven without quiet", "reduce without wait for data", "reduce without wait for a slot",
}  # fmt: skip


def _cases(name: str, seed: int) -> tuple:
    import torch

    if name == "_uneven":
        return CALLS, (40,), torch.float32, False
    shapes = [((2_000,), torch.float32, 0, 0), ((300,), torch.float32, 4, 4)]
    if name == "_equal":
        return ([(2_000, (), torch.float32, 0, 0), (300, (), torch.float32, 4, 4)],)
    return (shapes,)


def _run(path: str, module: str, test: str, function: str, options: dict, seed: int) -> None:
    """Run a kernel's test on this rank with the file at `path` in the place of the kernel's module."""
    spec = importlib.util.spec_from_file_location(f"tilescale_net.kernels.{module}", path)
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = mutant
    spec.loader.exec_module(mutant)
    body = getattr(importlib.import_module(test), function)
    first = _cases(function, seed)
    if function == "_uneven":
        calls, row, dtype, as_tensors = first
        body(seed, calls, options, row, dtype, as_tensors)
    else:
        body(seed, *first, options, CALLS)


def _attempt(path, module, test, seed: int) -> str | None:
    """What went wrong in one run: wrong data or a wait that never ended; None when all was right."""
    env = {"TSN_TIMEOUT": "3", "TSN_SIM_VISIBILITY": ("late", "random")[seed % 2]}
    outcomes = ranks.launch(2, _run, str(path), module, *test, seed, env=env, timeout=150)
    wrong = {o.error[0]: o.error[1] for o in outcomes if not o.ok}
    if not wrong:
        return None
    # The other rank may only have noticed that this one failed. A mutant that does not compile shows nothing.
    shown = [kind for kind in ("AssertionError", "WaitTimeout", "RankMismatch") if kind in wrong]
    assert shown, wrong
    return f"{shown[0]}: {wrong[shown[0]]}"


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "all_to_all_uneven", "reduce_scatter"])
def test_the_originals_pass(name):
    test = dict(all_gather=GATHER, all_to_all=EQUAL, all_to_all_uneven=UNEVEN, reduce_scatter=REDUCE)[name]
    assert _attempt(FOLDER / f"{name}.py", name, test, random.randrange(1 << 20)) is None


@pytest.mark.parametrize("mutant", [m if m in ALWAYS else pytest.param(m, marks=pytest.mark.nightly) for m in MUTANTS])
def test_mutants_fail(mutant, tmp_path):
    module, function, old, new, test = MUTANTS[mutant]
    text = (FOLDER / f"{module}.py").read_text()
    before, define, rest = text.partition(f"\ndef {function}(")
    body, *after = re.split(r"(?=\n(?:def|class|@) ?)", rest, maxsplit=1)
    assert body.count(old) == 1, f"the text to replace is in {function} {body.count(old)} times: {old}"
    path = tmp_path / f"{module}.py"
    path.write_text(before + define + body.replace(old, new) + "".join(after))
    first = random.randrange(1 << 20)
    for seed in range(first, first + ATTEMPTS):
        if _attempt(path, module, test, seed) is not None:
            return
    raise AssertionError(f"{mutant}: {ATTEMPTS} schedules from seed {first} on did not show it")
