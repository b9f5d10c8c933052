"""What a rank looks at before it meets the others: its environment, and which version it is of."""

import tilescale_net
from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import native_part, settings

LOADED_LATE = (
    "CUDA loads kernels at their first launch here; where data to and from other nodes are staged in host memory, that "
    "waits for a running kernel, and the kernel for its data until TSN_TIMEOUT. Set CUDA_MODULE_LOADING=EAGER before CUDA "
    "starts"
)


def check_settings() -> tuple[ConfigurationError | None, float, float]:
    """What is wrong with the environment, and the seconds of the two timeouts: their defaults where they are wrong."""
    try:
        if missing := native_part.lacking():
            raise ConfigurationError(missing)
        settings.check()
        settings.load_kernels_early()
        _check_build()
        return None, settings.TIMEOUT.get(), settings.HEARTBEAT_TIMEOUT.get()
    except ConfigurationError as err:
        wrong = err
    seconds = []
    for row in (settings.TIMEOUT, settings.HEARTBEAT_TIMEOUT):
        try:
            seconds.append(row.get())
        except ConfigurationError:
            seconds.append(row.default)
    return wrong, *seconds


def _check_build() -> None:
    try:
        from tilescale_net import _native, _simulator  # noqa: F401
    except ImportError as err:
        raise ConfigurationError(str(err)) from None


def version() -> str:
    """What ranks must have in common to understand each other."""
    from tilescale_net.compiler import toolchain

    return f"tilescale_net {tilescale_net.__version__}, device code {toolchain.sources_hash()}"
