"""Every exception that tilescale_net raises on purpose.

Each message names the rank, the peer (PE) and the operation concerned, the value that was wrong with its limit,
and what to do about it.
"""


class TileScaleError(RuntimeError):
    """Base class of all errors of this package."""


class ConfigurationError(TileScaleError):
    """The environment does not allow what was requested: missing compiler, wrong tilelang version, too few GPUs, …"""


class PeerUnreachable(ConfigurationError):
    """A GPU of this node, or its memory, cannot be reached from another one's: no peer access, or ranks in several containers."""


class KernelError(TileScaleError):
    """A kernel misuses a primitive; reported when the kernel is built, with the primitive and the user's line."""


class SimulatorUnsupported(TileScaleError):
    """A kernel uses a construct that the simulator cannot run; names the construct."""


class SimulatorDeadlock(TileScaleError):
    """Threads of a simulated kernel wait for each other for ever; names where they wait."""


class DataRace(TileScaleError):
    """Nothing orders two things that a simulated kernel does although it needs them in order; names both."""


class HeapError(TileScaleError):
    """The symmetric heap cannot serve a request: exhausted, freed twice, or a tensor that does not live in it."""


class RankMismatch(TileScaleError):
    """Ranks called a collective operation with different arguments; names two ranks and what each of them requested."""


class OutOfBounds(TileScaleError):
    """A kernel touched memory outside a live allocation of the symmetric heap."""


class PeOutOfRange(TileScaleError):
    """A kernel named a PE that does not exist."""


class WaitTimeout(TileScaleError):
    """A device-side wait passed its deadline; names the word, the value expected and the value seen last."""


class PeerLost(TileScaleError):
    """Another rank failed or vanished while this one depended on it."""


class InvalidDescriptor(TileScaleError):
    """The proxy refused a descriptor: outside the heap, to an unknown PE, or of an unknown kind."""


class FabricError(TileScaleError):
    """libfabric, a provider or a link failed."""
