"""What the files of tests say of their kernels beside the tests: how to compile them for sm_90, and the lines they need.

A file may have `SM_90`, a dictionary from the kernel's full name to the arguments that it is compiled with, and `MUTANTS`,
a dictionary from a name to a `Mutant`. test_generated_code.py and test_mutations.py run them.
"""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A kernel without a line of its synchronisation, and what must fail then.

    Attributes:
        file: in tilescale_net/kernels, without its ending.
        function: of the file, in which the text stands once.
        old, new: text, and what takes its place.
        test: function of the declaring file, `test(seed)`, that a rank runs; it must pass with the original.
        nightly: others like it run with every change.
    """

    file: str
    function: str
    old: str
    test: str
    new: str = "pass"
    nightly: bool = False


# Lines of kernels/exchange.py and its like, and what takes the place of a wait whose answer is used.
WAIT_READY = 'N.wait(ready[thread], "ge", call << T.uint64(TAG_BITS))'
NO_WAIT = '(call << T.uint64(TAG_BITS)) | T.cast(tag, "uint64")'
WAIT_ARRIVED = 'N.wait(arrived[thread, block], "ge", call)'


def declared(package, name: str) -> dict:
    """All that files `test_*.py` of a package declare under a name; a key stands once."""
    found: dict = {}
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module.name.rpartition(".")[2].startswith("test_"):
            for key, value in getattr(importlib.import_module(module.name), name, {}).items():
                assert key not in found, f"{module.name}.{name}: {key!r} stands in another file, too"
                found[key] = (module.name, value)
    return found


def forget_kernels(forgotten: Callable[[str], bool] = lambda name: True) -> None:
    """Let this rank import kernels anew, and what tests have made of them: one of them is to be another.

    Args:
        forgotten: whether a module of the kernels is; all by default.
    """
    names = [n for n in sys.modules if n.startswith("tilescale_net.kernels") and forgotten(n)]
    for name in sorted([*names, *(n for n in sys.modules if n.startswith("tests.kernels"))]):
        parent, _, child = name.rpartition(".")
        if hasattr(sys.modules.get(parent), child):  # `from parent import child` looks there first
            delattr(sys.modules[parent], child)
        del sys.modules[name]


# Here, since a process that unpickles it imports its module: test_mutations.py imports all kernels.
def run(path: str | None, file: str, module: str, test: str, seed: int) -> None:
    """Run a function of a file of tests on this rank with the file at `path` in the place of a kernel's."""
    if path:
        spec = importlib.util.spec_from_file_location(f"tilescale_net.kernels.{file}", path)
        forget_kernels()
        mutant = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = mutant
        spec.loader.exec_module(mutant)
    getattr(importlib.import_module(module), test)(seed)
