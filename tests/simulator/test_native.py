"""The simulator's native part as a plain program: under sanitizers, and with POSIX contexts instead of its own switch."""

import pytest

from tests.native.builder import ROOT, build, run

SIMULATOR = ROOT / "tilescale_net" / "csrc" / "simulator"


# gcc's sanitizers for both: with clang's the test would say nothing of the compiler that the package is built with.
@pytest.mark.parametrize("flags", ["-fsanitize=address,undefined", "-DTSN_SIM_PORTABLE_FIBERS"])
def test_program(flags):
    sources = [str(p.relative_to(ROOT)) for p in sorted(SIMULATOR.glob("*.cpp"))]
    sources = [s for s in sources if not s.endswith(("module.cpp", "bindings.cpp"))]
    assert len(sources) > 10
    assert run(build("simulator_test", ["tests/native/simulator_test.cpp", *sources], flags=(flags,))) == "ok\n"
