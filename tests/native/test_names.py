"""One name, one thing: two classes or inline functions of one qualified name are one to the linker, even if they
differ.

The linker keeps one definition of each inline function, constructor and destructor; without inlining, the code of one
file runs on the objects of another.
"""

import os
import re
import shutil
import subprocess
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fabric.programs import headers
from tests.native.builder import BASE, ROOT

CSRC = ROOT / "tilescale_net" / "csrc"
# What the simulator is made of goes into a module of its own.
MODULES = {
    "_native": ["", "common", "cuda", "fabric", "proxy", "testing", "launch"],
    "_simulator": ["common", "simulator", "explore"],
}

# Code is formatted: what belongs to a namespace stands at the start of a line.
NAMESPACE = re.compile(r"^(?:inline )?namespace ([\w:]*) ?\{")
CLASS = re.compile(
    r"^(?:class|struct|union|enum class|enum) (?:\[\[[^]]*\]\] |alignas\(\w+\) )?(\w+(?:::\w+)*)(?![\w:])(?:[^;]*$|.*\{.*)"
)
FUNCTION = re.compile(r"^(?:\[\[.*\]\] )?(?:inline|constexpr|template<>)\b[^=(]*?\b(\w+)\(")


def definitions(text: str) -> set[str]:
    """Qualified names of the classes and inline functions that a file defines outside of unnamed namespaces."""
    found: set[str] = set()
    scopes: list[str] = []
    for line in text.splitlines():
        if match := NAMESPACE.match(line):
            scopes.append(match[1])
        elif line.startswith("} // namespace"):
            scopes.pop()
        elif (match := CLASS.match(line) or FUNCTION.match(line)) and "" not in scopes:
            found.add("::".join([*scopes, match[1]]))
    assert not scopes, scopes
    return found


def test_definitions_are_found():
    text = """
namespace tsn::proxy {
class Staging {
};
struct alignas(16) Line { int x; };
class Declared;
inline uint64_t ticks() { return 0; }
namespace {
class Hidden {
};
} // namespace
} // namespace tsn::proxy
"""
    assert definitions(text) == {"tsn::proxy::Staging", "tsn::proxy::Line", "tsn::proxy::ticks"}


@pytest.mark.parametrize("module", MODULES)
def test_no_name_is_defined_twice(module):
    places = defaultdict(list)
    for folder in MODULES[module]:
        for path in sorted((CSRC / folder).glob("*.h")) + sorted((CSRC / folder).glob("*.cpp")):
            for name in definitions(path.read_text()):
                places[name].append(str(path.relative_to(ROOT)))
    assert len(places) > 10
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.nightly
def test_the_linker_sees_one_definition_of_each_type(tmp_path: Path):
    """Clashes that no pattern finds: the whole module at once, with the compiler's own comparison of types."""
    gcc = shutil.which("g++")
    if not gcc:
        pytest.skip("needs g++ for -Wodr")
    folders = [CSRC / name for name in MODULES["_native"]] + [ROOT / "benchmark" / "native"]
    sources = [path for folder in folders for path in sorted(folder.glob("*.cpp"))]
    plain = [path for path in sources if "#include <pybind11/" not in path.read_text()]
    assert {path.parent.name for path in plain} == {"cuda", "fabric", "proxy", "testing", "native"}
    flags = ["-flto", "-fPIC", "-Wodr", "-Wlto-type-mismatch", "-Werror=odr", "-Werror=lto-type-mismatch"]
    objects = [tmp_path / f"{number}.o" for number in range(len(plain))]

    def run(*words: str | Path) -> None:
        done = subprocess.run([gcc, *BASE, *headers(), *flags, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda path, to: run("-c", path, "-o", to), plain, objects))
    run("-shared", *objects, "-o", tmp_path / "all.so", "-ldl", "-lpthread")
