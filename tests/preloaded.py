"""Imported last by the servers that ranks fork from, after the modules that the launcher preloads.

The kernels for mixture of experts are imported and their macros translated, and the collector of garbage leaves alone what
is there: it would look through all of it in every fork, and copy the pages.
"""

import gc
import sys

import tilescale_net.compiler.simulator.preloaded
import tilescale_net.kernels.moe  # noqa: F401
from tilescale_net.compiler.jit import Macro


def _translate_macros() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("tilescale_net.kernels."):
            for value in list(vars(module).values()):
                if isinstance(value, Macro):
                    value.ir_gen  # noqa: B018  # kept by the macro


_translate_macros()
gc.collect()
gc.freeze()
# Ranks make many objects that stay: the default looks through them hundreds of times, a twentieth of a rank's time.
gc.set_threshold(50000, 20, 20)
