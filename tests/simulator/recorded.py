"""Errors of this rank's kernels, recorded instead of ending the job."""

from collections.abc import Callable, Iterable

import tilescale_net as tsn
from tilescale_net.runtime import simulator


def recorded_errors() -> list[str]:
    """A list to which each error of a kernel is appended, with its class: the kernel has run, and the next one can follow."""
    from tilescale_net.compiler.simulator.kernel import SimulatedFunction

    errors: list[str] = []
    SimulatedFunction._give_up = lambda self, context, error: errors.append(f"{type(error).__name__}: {error}")
    return errors


def first_reports(keys: Iterable[tuple], launch: Callable) -> dict[tuple, str]:
    """What this rank reports first of each key, or "": of `launch(*key)` under the seed that is the key's last part.

    All ranks call it together. `launch` makes what it needs; it may yield between launches that all ranks are to end.
    """
    errors, told = recorded_errors(), {}
    for key in keys:
        errors.clear()
        with simulator.schedule(key[-1]):
            for _ in launch(*key):
                tsn.barrier()
        tsn.barrier()
        told[key] = errors[0] if errors else ""
    return told
