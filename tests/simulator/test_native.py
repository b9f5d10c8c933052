"""The simulator's native part as a plain program: under sanitizers, and with POSIX contexts instead of its own switch."""

from tests.native.builder import ROOT, build, run
from tests.variants import nightly, variants

SIMULATOR = ROOT / "tilescale_net" / "csrc" / "simulator"


# gcc's sanitizers for both: with clang's the test would say nothing of the compiler that the package is built with.
@variants(0, "name, flags", [("own", ()), nightly("portable", ("-DTSN_SIM_PORTABLE_FIBERS",))])
def test_program(name, flags):
    found = [str(p.relative_to(ROOT)) for p in sorted(SIMULATOR.glob("*.cpp"))]
    sources = [s for s in found if not s.endswith(("module.cpp", "bindings.cpp"))]
    assert len(sources) > 2
    tests = ["tests/native/simulator_test.cpp", "tests/native/explore_test.cpp"]
    apart = {s for s in [*tests, *sources] if "TSN_SIM_PORTABLE_FIBERS" in (ROOT / s).read_text()}
    assert len(apart) == 2
    program = build(
        f"simulator_{name}",
        [tuple(s for s in sources if s not in apart), *sorted({*tests, *apart})],
        flags=("-fsanitize=address,undefined",),
        apart=(apart, flags),
    )
    assert run(program) == "ok\n"
