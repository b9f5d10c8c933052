"""Imports of the process that ranks fork from, which each rank would otherwise repeat."""

import inspect

import tilescale_net.compiler.jit
import tilescale_net.runtime.simulator  # init imports these late
import tilescale_net.trace.recorder
import tilescale_net.trace.reporter  # noqa: F401
from tilescale_net.compiler.simulator import cache, host_compiler
from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import worlds


def _hash_sources() -> None:
    """Sources, headers, versions."""
    cache.package_hash()
    cache.tool_versions()
    try:
        host_compiler.headers_hash()
        host_compiler.identity(host_compiler.compiler())
    except ConfigurationError:
        pass  # a rank that needs them reports it
    finally:
        host_compiler.compiler.cache_clear()  # ranks may name others in CXX
    inspect.getmodule(_hash_sources.__code__)  # checks the files of all modules once


_hash_sources()
worlds.replace_exit()
