"""Heap memory of a rank without a GPU, whose bounds and races the simulator follows."""

import functools

from tilescale_net import _simulator
from tilescale_net.runtime import host_accesses, race_memory, simulator
from tilescale_net.runtime.context import SYSTEM_BYTES
from tilescale_net.runtime.control import Control
from tilescale_net.runtime.shared_memory import SharedMemory


class SimulatorMemory(SharedMemory):
    """Shared memory in which kernels of the simulator run; see `memory.Memory`."""

    device_kind = "simulator"
    poisons = True

    def __init__(self, size: int, limit: int | None = None):
        super().__init__(size, limit)
        self._race_memory: SharedMemory | None = None
        _simulator.register_heap(self.base, size)
        self.on_allocate(self.base, SYSTEM_BYTES, "system area")

    def on_mapped(self, control: Control, rank: int, hosts: list[str], peer_base: list[int]) -> None:
        """Share with the ranks of this host what finds races between ranks."""
        self._race_memory = race_memory.share(self, control, rank, hosts, peer_base)
        if simulator.races() and self._race_memory is not None:
            host_accesses.follow(self.base, self.limit)
            control.on_meeting = functools.partial(_simulator.host_comes, self.base)
            control.on_met = functools.partial(host_accesses.host_meets, self.base)

    def grow(self, size: int) -> None:
        super().grow(size)
        _simulator.register_heap(self.base, size, True)

    def take_back(self, size: int) -> None:
        super().take_back(size)
        _simulator.register_heap(self.base, size, True)

    def on_allocate(self, address: int, nbytes: int, name: str) -> None:
        """Accesses to these bytes are inside a tensor from now on."""
        _simulator.register_allocation(address, nbytes, name)

    def before_free(self, address: int, nbytes: int) -> None:
        """A transfer that is not known to be done races with it."""
        host_accesses.frees(self.base, address, nbytes)

    def on_free(self, address: int) -> None:
        """Accesses to them are outside of every tensor."""
        _simulator.unregister_allocation(address)

    def loads_kernels_late(self) -> bool:
        """Nothing is loaded at a launch."""
        return False

    def finish_kernels(self) -> None:
        """What kernels have sent to other ranks arrives at last."""
        self.await_end_of_kernels()
        _simulator.flush_pending()

    def await_end_of_kernels(self) -> None:
        """Those of other threads: this one's have ended."""
        simulator.running.wait(self.base)

    def part(self) -> None:
        """As SharedMemory; races between ranks are found without this process."""
        host_accesses.forget(self.base)
        super().part()

    def close(self) -> None:
        """As SharedMemory; the simulator forgets the heap first."""
        host_accesses.forget(self.base)
        _simulator.unregister_heap(self.base)
        if self._race_memory is not None:
            self._race_memory.close()
        super().close()
