"""The simulator's native part as a plain program: under sanitizers, and with POSIX contexts instead of its own switch."""

import pytest

from tests.native.builder import ROOT, build, run

PARTS = [ROOT / "tilescale_net" / "csrc" / part for part in ("simulator", "explore")]


# gcc's sanitizers for both: with clang's the test would say nothing of the compiler that the package is built with.
@pytest.mark.parametrize(
    "name, flags", [("own", ()), pytest.param("portable", ("-DTSN_SIM_PORTABLE_FIBERS",), marks=pytest.mark.nightly)]
)
def test_program(name, flags):
    sources = [str(p.relative_to(ROOT)) for part in PARTS for p in sorted(part.glob("*.cpp"))]
    sources = [s for s in sources if not s.endswith(("module.cpp", "bindings.cpp"))]
    assert len(sources) > 10
    test = "tests/native/simulator_test.cpp"
    sources.append("tests/native/explore_test.cpp")
    apart = {s for s in [test, *sources] if "TSN_SIM_PORTABLE_FIBERS" in (ROOT / s).read_text()}
    assert len(apart) == 2
    program = build(
        f"simulator_{name}", [test, *sources], flags=("-fsanitize=address,undefined",), apart=(apart, flags)
    )
    assert run(program) == "ok\n"
