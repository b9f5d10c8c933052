"""Imported last by the servers that ranks fork from: what every rank would otherwise do again for itself.

The kernels for mixture of experts are imported and their macros translated, so is what `init` imports late, what kernels'
keys are made of is read, and the collector of garbage leaves alone what is there: it would look through all of it in every
fork, and copy the pages.
"""

import gc
import inspect
import sys

import tilescale_net.kernels.moe
import tilescale_net.runtime.simulator_memory  # noqa: F401
from tilescale_net.compiler.macro import Macro
from tilescale_net.compiler.simulator import host_toolchain, kernel_keys, lowered_cache
from tilescale_net.errors import ConfigurationError


def _translate_macros() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("tilescale_net.kernels."):
            for value in list(vars(module).values()):
                if isinstance(value, Macro):
                    value.ir_gen  # noqa: B018  # kept by the macro


def _hash_sources() -> None:
    """What every rank would read for the keys of kernels: sources, headers, versions."""
    kernel_keys._sources()
    lowered_cache.versions()
    try:
        host_toolchain.headers_hash()
        host_toolchain._identity(host_toolchain.compiler())
    except ConfigurationError:
        pass  # the test that needs them reports it
    finally:
        host_toolchain.compiler.cache_clear()  # tests name others in CXX
    inspect.getmodule(_hash_sources.__code__)  # looks at the files of all modules once


_translate_macros()
_hash_sources()
gc.collect()
gc.freeze()
# Ranks make many objects that stay: the default looks through them hundreds of times, a twentieth of a rank's time.
gc.set_threshold(50000, 20, 20)
