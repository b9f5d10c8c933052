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


def first_reports(keys: Iterable[tuple], launch: Callable) -> dict[tuple, list[str]]:
    """The first report of each rank that has one, by key: of `launch(*key)` under the seed that is the key's last part.

    All ranks call it together. `launch` may yield between launches that all ranks must end.
    """
    errors, reports = recorded_errors(), {}
    for key in keys:
        errors.clear()
        with simulator.schedule(key[-1]):
            for _ in launch(*key):
                tsn.barrier()
        tsn.barrier()
        reports[key] = errors[0] if errors else ""
    everyone = tsn.world().control.gather("reports", list(reports.values()))
    return {key: list(filter(None, of_key)) for key, *of_key in zip(reports, *everyone)}


def all_reports(reports: Iterable[str]) -> list[str]:
    """The reports of all ranks, which call it together."""
    everyone = tsn.world().control.gather("reports", "\0".join(reports))
    return [report for joined in everyone for report in joined.split("\0") if report]
