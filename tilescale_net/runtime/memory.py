"""What the heap lies in: one class for each kind of device, chosen here once."""

from typing import Any, Protocol

import torch

from tilescale_net.runtime.control import Control
from tilescale_net.runtime.topology import Topology


class Memory(Protocol):
    """Memory of one rank, in which its heap lies, and how to wait for the kernels that use it.

    Attributes:
        device_kind: "cuda" or "simulator", as in settings.
        kind: "cuda" or "host", as the fabric calls it.
        device: torch device of tensors in it.
        ordinal: number of the GPU; -1 without one.
        size, base: of the heap in bytes, and its address in this process.
        limit: bytes to which the heap can grow where it is.
        poisons: whether fresh and freed tensors are filled with NaN patterns, which shows reads of unwritten data.
    """

    device_kind: str
    kind: str
    device: torch.device
    ordinal: int
    size: int
    limit: int
    base: int
    poisons: bool

    def handle(self) -> tuple[Any, ...]:
        """What a peer on this host needs to map this heap."""

    def map_peer(self, pe: int, handle: Any) -> int:
        """Map a peer's heap and return its address here. Raises ConfigurationError when the system refuses."""

    def on_mapped(self, control: Control, rank: int, hosts: list[str], peer_base: list[int]) -> None:
        """All ranks have mapped their peers. Collective.

        Args:
            hosts: of every rank.
            peer_base: address of every rank's heap in this process; 0 if not mapped.
        """

    def grow(self, size: int) -> None:
        """Grow the heap to so many bytes. Raises TileScaleError or OSError if that fails."""

    def grown_handle(self) -> tuple[Any, ...]:
        """What a peer on this host needs to map what `grow` has added."""

    def map_grown(self, pe: int, handle: Any) -> None:
        """Map what a peer has added, behind what is mapped of it."""

    def take_back(self, size: int) -> None:
        """Undo `grow` and `map_grown`, to a heap of `size` bytes."""

    def bytes_tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over heap bytes [offset, offset + nbytes)."""

    def upload(self, data: bytes) -> torch.Tensor:
        """A uint8 tensor that kernels can read, holding `data`."""

    def pinned(self, nbytes: int) -> int:
        """Address of zeroed memory that host and kernels both reach; it lives as long as this object."""

    def on_allocate(self, address: int, nbytes: int, name: str) -> None:
        """The heap has given away these bytes."""

    def before_free(self, address: int, nbytes: int) -> None:
        """The heap is about to take back these bytes, whatever is on its way to or from them."""

    def on_free(self, address: int) -> None:
        """The heap has got them back."""

    def loads_kernels_late(self) -> bool:
        """Whether a kernel's first launch may wait for the kernels that run; see settings.load_kernels_early."""

    def synchronize(self) -> None:
        """Wait for kernels that this rank has launched."""

    def finish_kernels(self) -> None:
        """`synchronize`, and what these kernels have sent to other ranks is on its way."""

    def await_end_of_kernels(self) -> None:
        """Wait for kernels whose waits were ended, where nothing else keeps them from memory that is unmapped."""

    def part(self) -> None:
        """In a child made by fork: what it writes concerns no rank."""

    def close(self) -> None:
        """Let go of everything but what tensors still refer to."""


def create(kind: str, size: int, limit: int, device: torch.device | None, group: Any, topology: Topology) -> Memory:
    """Memory with a heap of `size` bytes, which may grow to `limit`.

    Args:
        kind: "cuda" or "simulator".
        device: that of the other worlds of this process; None: `group` and `topology` say which GPU is this rank's,
            see `cuda_memory.ordinal`.

    Raises:
        ConfigurationError: the machine has no such memory.
    """
    if kind == "cuda":
        from tilescale_net.runtime import cuda_memory

        ordinal = device.index if device is not None else cuda_memory.ordinal(group, topology.local_rank)
        shared = device is not None or cuda_memory.bound(group) is not None
        # A NIC that reaches memory of a GPU has it registered in one piece.
        return cuda_memory.CudaMemory(size, limit if topology.nodes == 1 else size, ordinal, shared)
    from tilescale_net.runtime.simulator_memory import SimulatorMemory

    return SimulatorMemory(size, limit)
