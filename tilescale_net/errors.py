"""Every exception that tilescale_net raises on purpose.

Each message names the rank, the peer (PE), the operation, the wrong value with its limit, and the remedy.
"""


class TileScaleError(RuntimeError):
    """Base class of all errors of this package."""


class ConfigurationError(TileScaleError):
    """The environment does not allow the request: missing compiler, wrong tilelang version, too few GPUs, …"""


class PeerUnreachable(ConfigurationError):
    """A GPU of this node, or its memory, cannot be reached from another GPU: no peer access, or ranks in several containers."""


class KernelError(TileScaleError):
    """A kernel misuses a primitive; raised when the kernel is built, with the primitive and the user's line."""


class SimulatorUnsupported(TileScaleError):
    """A kernel uses a construct that the simulator cannot run; names the construct."""


class SimulatorDeadlock(TileScaleError):
    """Threads of a simulated kernel wait for each other forever; names the places of the waits."""


class DataRace(TileScaleError):
    """Nothing orders two conflicting accesses of simulated kernels; names both."""


class HeapError(TileScaleError):
    """The symmetric heap cannot serve a request: exhausted, freed twice, or a tensor of other memory."""


class RankMismatch(TileScaleError):
    """Ranks called a collective operation with different arguments; names two ranks and their requests."""


class OutOfBounds(TileScaleError):
    """A kernel accessed memory outside a live allocation of the symmetric heap."""


class PeOutOfRange(TileScaleError):
    """A kernel named a PE that does not exist."""


class WaitTimeout(TileScaleError):
    """A device-side wait passed its deadline; names the word, the expected value and the last observed value."""


class PeerLost(TileScaleError):
    """Another rank failed or vanished while this one depended on it."""


class InvalidDescriptor(TileScaleError):
    """The proxy rejected a descriptor: outside the heap, for an unknown PE, or of an unknown kind."""


class FabricError(TileScaleError):
    """libfabric, a provider or a link failed."""
