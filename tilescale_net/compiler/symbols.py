"""Names of kernels: as users and the simulator see them, and as linkers and profilers do."""

from __future__ import annotations

from tilescale_net.errors import KernelError

SUFFIX = "_kernel"  # which tilelang puts behind the name of what runs on the device


def plain(name: str) -> str:
    """A kernel's name as one identifier: `moe::dispatch` is moe_dispatch.

    Raises:
        KernelError: the parts are no identifiers.
    """
    parts = name.split("::")
    if not all(part.isidentifier() for part in parts):
        raise KernelError(f"kernel name {name!r} is not an identifier, nor several with '::' between them")
    return "_".join(parts)


def linked(name: str) -> str:
    """The symbol of a kernel on a GPU, without tilelang's suffix.

    One in a namespace is what a C++ compiler would make of a function with a parameter of type `_kernel`: the suffix ends
    it, and profilers show moe::dispatch(_kernel). Programs that look for kernels of others by `::` find it so.
    """
    parts = name.split("::")
    return name if len(parts) == 1 else f"_ZN{''.join(f'{len(part.encode())}{part}' for part in parts)}E{len(SUFFIX)}"
