"""Device headers as plain host programs, under the address and undefined-behaviour sanitizers."""

import pytest

from tests.native.builder import build, run


@pytest.mark.parametrize("name", ["engines", "semantics"])
@pytest.mark.sample(0)
def test_program(name):
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    assert run(build(name, [f"tests/device/{name}.cpp"], flags=flags)) == "ok\n"
