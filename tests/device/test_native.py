"""Device headers as plain host programs, under the address and undefined-behaviour sanitizers."""

import subprocess

from tests.native.builder import build, run
from tests.variants import variants
from tilescale_net.launch import set_up


@variants(0, "name", ["engines", "semantics"])
def test_program(name):
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    assert run(build(name, [f"tests/device/{name}.cpp"], flags=flags)) == "ok\n"


def test_names_of_attributes_are_no_macros(tmp_path):
    """Headers of libstdc++ 13 and newer write attributes so; a macro of that name would end in an error there."""
    probe = tmp_path / "probe.cpp"
    names = "__noinline__, __noclone__, __cold__, __always_inline__, __aligned__(8)"
    probe.write_text(f'#include "tilescale_net/device/host/crt/host_defines.h"\nint f() __attribute__(({names}));\n')
    done = subprocess.run([*set_up.compiler(), "-I.", "-fsyntax-only", str(probe)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
