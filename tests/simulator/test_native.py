"""The simulator's native part as a plain program: under sanitizers, and with POSIX contexts instead of its own switch."""

from tests.native.builder import ROOT, build, run
from tests.variants import nightly, variants

PARTS = [ROOT / "tilescale_net" / "csrc" / part for part in ("simulator", "explore")]


# gcc's sanitizers for both: with clang's the test would say nothing of the compiler that the package is built with.
@variants(0, "name, flags", [("own", ()), nightly("portable", ("-DTSN_SIM_PORTABLE_FIBERS",))])
def test_program(name, flags):
    found = [[str(p.relative_to(ROOT)) for p in sorted(part.glob("*.cpp"))] for part in PARTS]
    parts = [[s for s in part if not s.endswith(("module.cpp", "bindings.cpp"))] for part in found]
    assert all(len(part) > 2 for part in parts)
    tests = ["tests/native/simulator_test.cpp", "tests/native/explore_test.cpp"]
    apart = {s for s in [*tests, *parts[0], *parts[1]] if "TSN_SIM_PORTABLE_FIBERS" in (ROOT / s).read_text()}
    assert len(apart) == 2
    together = [tuple(s for s in part if s not in apart) for part in parts]
    program = build(
        f"simulator_{name}",
        [*together, *sorted({*tests, *apart})],
        flags=("-fsanitize=address,undefined",),
        apart=(apart, flags),
    )
    assert run(program) == "ok\n"
