"""What a kernel author types: `import tilescale_net.language as N`, next to `import tilelang.language as T`.

    @tsn.jit
    def ring(n, threads=128):
        @T.prim_func
        def kernel(ctx: N.Context(), x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32"),
                   flag: T.Tensor((1,), "uint64")):
            with T.Kernel(1, threads=threads):
                N.put_signal_block(y, x, (N.my_pe() + 1) % N.n_pes(), flag[0], 1)
                N.wait_block(flag[0], "ge", 1)
        return kernel

Sizes are in elements. Symmetric memory is named by its local address. See docs/memory-model.md for what each
primitive guarantees. Wrong use raises KernelError when the kernel is built, naming the primitive and the line.

A primitive is carried out once where it stands, whatever the expression around it: before the rest of its statement, from
left to right, behind `and`, `or` and in an arm of `a if c else b` only when that part is evaluated, and in the condition of
a `while` in every round.
"""

import difflib as _difflib

from tilescale_net.errors import KernelError as _KernelError
from tilescale_net.language import _tracing
from tilescale_net.language.copies import (
    get_block,
    get_thread,
    get_warp,
    put_block,
    put_signal_block,
    put_signal_thread,
    put_signal_warp,
    put_thread,
    put_value,
    put_warp,
)
from tilescale_net.language.memory import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_exch,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xor,
    benign_race,
    ld,
    remote,
    st,
)
from tilescale_net.language.order import (
    barrier_all,
    barrier_grid,
    barrier_node,
    fence,
    fence_block,
    fence_warp,
    flush_async,
    flush_wait,
    quiet,
    quiet_block,
    quiet_warp,
)
from tilescale_net.language.signals import (
    signal,
    signal_block,
    signal_warp,
    test,
    wait,
    wait_block,
    wait_warp,
)
from tilescale_net.language.streams import (
    return_credit,
    return_credit_block,
    return_credit_warp,
    take_slot,
    take_slot_block,
    take_slot_warp,
    wait_slot,
    wait_slot_block,
    wait_slot_warp,
)
from tilescale_net.language.topology import Context, is_direct, my_pe, n_node_pes, n_pes, node_pe

__all__ = [
    "Context",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_exch",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xor",
    "barrier_all",
    "barrier_grid",
    "barrier_node",
    "benign_race",
    "fence",
    "fence_block",
    "fence_warp",
    "flush_async",
    "flush_wait",
    "get_block",
    "get_thread",
    "get_warp",
    "is_direct",
    "ld",
    "my_pe",
    "n_node_pes",
    "n_pes",
    "node_pe",
    "put_block",
    "put_signal_block",
    "put_signal_thread",
    "put_signal_warp",
    "put_thread",
    "put_value",
    "put_warp",
    "quiet",
    "quiet_block",
    "quiet_warp",
    "remote",
    "return_credit",
    "return_credit_block",
    "return_credit_warp",
    "signal",
    "signal_block",
    "signal_warp",
    "st",
    "take_slot",
    "take_slot_block",
    "take_slot_warp",
    "test",
    "wait",
    "wait_block",
    "wait_slot",
    "wait_slot_block",
    "wait_slot_warp",
    "wait_warp",
]

_tracing.silence_dumps()


class _NoPrimitive(_KernelError, AttributeError):
    """A name that is no primitive; an AttributeError as for any module, and a KernelError for whoever builds a kernel."""


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str):
    if name.startswith("_"):  # what Python itself looks for
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    near = [known for known in __all__ if known.startswith(f"{name}_")] or _difflib.get_close_matches(name, __all__)
    hint = f"; did you mean {' or '.join(f'N.{known}' for known in near)}?" if near else ""
    raise _NoPrimitive(f"there is no primitive N.{name}{hint}{_tracing.author_place()}")
