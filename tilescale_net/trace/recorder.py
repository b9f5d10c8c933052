"""Records this rank's events in its parts of the trace, and merges all parts at the end of the job.

One recorder per process, of the first world made while TSN_TRACE is set. A process that is killed leaves its
parts beside the file; `python -m tilescale_net trace FILE` merges them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tilescale_net.errors import ConfigurationError
from tilescale_net.runtime import profiling, settings
from tilescale_net.trace import events, timeline

if TYPE_CHECKING:
    from tilescale_net.runtime.world import World
    from tilescale_net.trace.gpu import GpuCalls


class Recorder:
    """The parts of one rank. `gpu_calls`: calls of primitives on this rank's GPU; None without one, and after the
    recorder has stopped. `world`: whose ranks are traced; its memory is there, its proxy is not. `path`: the file that
    rank 0 writes. Raises ConfigurationError: the file cannot be written."""

    def __init__(self, world: World, path: str):
        hosts = world.control.hosts
        self._world, self._path, self._hosts = world, path, hosts
        self._adding = threading.Lock()
        self._capacity = settings.TRACE_EVENTS.get()
        alone = len(set(hosts)) == 1  # one host has one clock
        exchange = lambda mine: world.control.gather("tilescale_net.init (trace)", mine)  # noqa: E731
        self._offset = (0, 0) if alone else clock_offset(exchange, world.rank)
        self._near = hosts[world.rank] == hosts[0]
        if self._near:
            self._offset = (0, 0)
        self._threads: dict[int, int] = {}
        self._gpu = None
        self.gpu_calls: GpuCalls | None = None
        self.parts: list[str] = []
        self._proxy_threads = 0
        try:
            self._ring: events.Ring | None = self._new("host")
            if world.device_kind == "simulator":
                from tilescale_net import _simulator

                kernels = self._new("kernels")
                kernels.close()
                assert world.memory is not None
                _simulator.trace_start(kernels.path, world.memory.base)
            else:
                from tilescale_net.trace.gpu import GpuCalls, GpuKernels

                self.gpu_calls = GpuCalls(world, self._capacity)
                self._kernels = self._new(
                    "kernels", 2 * self._capacity, self.gpu_calls.error_ns
                )  # waits are two events
                self._gpu = GpuKernels(
                    lambda name, begin, end, stream: self.add(events.Kind.KERNEL, name, begin, end, stream)
                )
        except OSError as err:
            raise self._unwritable(err) from None

    def _unwritable(self, err: OSError) -> ConfigurationError:
        """Remove the files made so far; returns the error."""
        for part in self.parts:
            with contextlib.suppress(OSError):
                os.unlink(part)
        less = "; TSN_TRACE_EVENTS makes it smaller" if err.errno == errno.ENOSPC else ""
        return ConfigurationError(f"TSN_TRACE={self._path}: the trace cannot be written there ({err.strerror}){less}")

    def _new(self, what: str, capacity: int = 0, more_error_ns: int = 0) -> events.Ring:
        path = timeline.part_path(self._path, self._world.rank, what)
        self.parts.append(path)
        try:
            offset, error = self._offset
            capacity = capacity or self._capacity
            return events.Ring(path, self._world.rank, self._world.size, capacity, offset, error + more_error_ns)
        except OSError as err:
            raise self._unwritable(err) from None

    def proxy_files(self, threads: int) -> list[str]:
        """A file for each thread of the proxy to write to."""
        first = self._proxy_threads
        self._proxy_threads += threads
        made = [self._new(f"proxy{i}") for i in range(first, first + threads)]
        for one in made:
            one.close()
        return [one.path for one in made]

    def timed(self, launch: Callable[..., None], name: str) -> Callable[..., None]:
        """`launch`, which launches a kernel on a GPU, with its times in the trace."""
        return self._gpu.timed(launch, name) if self._gpu is not None else launch

    def add_host_call(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Record a finished call of the package by this thread."""
        self.add(events.Kind.HOST, name, begin_ns, end_ns)

    def add(self, kind: events.Kind, name: str, begin_ns: int, end_ns: int, track: int | None = None) -> None:
        """Add an event of the host, or of a GPU. `track`: events of one track do not overlap; None: the thread's own."""
        with self._adding:
            if track is None:
                track = self._threads.setdefault(threading.get_ident(), len(self._threads))
            if self._ring is not None:
                self._ring.add_span(kind, self._ring.name(name), begin_ns, end_ns, track)

    def stop(self) -> None:
        """Write no more events; the proxy has ended."""
        if profiling.recorder is self:
            profiling.recorder = None
        if self._world.device_kind == "simulator":
            from tilescale_net import _simulator

            _simulator.trace_stop()
        if self._gpu is not None:
            self._gpu.ended = True
            self._gpu.read()
        if self.gpu_calls is not None:
            calls, self.gpu_calls = self.gpu_calls, None
            calls.write(self._kernels)
        with self._adding:
            if self._ring is not None:
                if self._gpu is not None:
                    self._ring.correct(events.Kind.KERNEL, self._gpu.correction())
                self._ring.close()
            self._ring = None

    def finish(self) -> None:
        """Write the file at the regular end of a job. Collective."""
        self.stop()
        self._send()
        self._world.control.agree("tilescale_net.finalize", "traced")
        self._merge()

    def _send(self) -> None:
        """Send the parts to rank 0 if it does not see this host's files."""
        if self._near:
            return
        for index, path in enumerate(self.parts):
            with open(path, "rb") as file:
                raw = path.split(".")[-2].encode() + b"\n" + events.packed(file.read())
            key = f"trace/{self._world.rank}/{index}"
            self._world.control.store.ask(functools.partial(_put, key, raw))

    def _merge(self) -> None:
        """When every rank has sent: on rank 0 write the file; remove the parts."""
        if self._world.rank == 0:
            parts = [part for rank in range(self._world.size) for part in self._parts_of(rank)]
            timeline.write(self._path, parts, self._world.heap.describe)
            timeline.remove_parts(self._path)
        elif not self._near:
            for path in self.parts:
                with contextlib.suppress(FileNotFoundError):  # rank 0 sees the folder too, and was faster
                    os.unlink(path)

    def _parts_of(self, rank: int) -> list[events.Part]:
        if self._hosts[rank] == self._hosts[0]:
            return timeline.read_parts(self._path, rank)
        found: list[events.Part] = []
        store = self._world.control.store
        while (raw := store.ask(lambda s: s.get(f"trace/{rank}/{len(found)}"))) is not None:
            what, _, packed = raw.partition(b"\n")
            where = f"the trace of rank {rank}"
            try:
                found.append(events.read_part(events.unpacked(packed, where), where, what.decode(errors="replace")))
            except ValueError as err:  # the timeline omits it: the job itself has ended well
                settings.log.warning("%s; it is left out of %s", err, self._path)
                break
        return found

    def leave(self) -> None:
        """Keep the parts of a failed job. Rank 0 prints how to merge them."""
        if self._world.rank == 0:
            settings.log.warning(
                "the parts of the trace are left beside %s; `python -m tilescale_net trace %s` puts them together",
                self._path,
                self._path,
            )


def _put(key: str, value: bytes, store: Any) -> None:
    store.set(key, value)


def start(world: World) -> Recorder | None:
    """The recorder of a new world; None without a trace. Collective."""
    path = settings.TRACE.get()
    if not path or profiling.recorder is not None:
        return None
    if world.group is not None:
        path += f".of_{'_'.join(map(str, world.job_ranks[:8]))}"
    made = Recorder(world, os.path.abspath(path))
    profiling.recorder = made
    return made


@contextlib.contextmanager
def user_range(name: str) -> Iterator[None]:
    """See `tilescale_net.range`."""
    if profiling.recorder is None:
        yield
        return
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        if isinstance(profiling.recorder, Recorder):
            profiling.recorder.add(events.Kind.RANGE, name, begin, time.monotonic_ns())


# -- clocks of other hosts -------------------------------------------------------------------------------------------

# All ranks exchange their times once per round. A rank reads its clock for round k after its round k - 1 has ended, so
# after rank 0 has read its own for that round, and before round k has ended for rank 0. So each round bounds the
# difference from both sides; the tightest bounds of all rounds count.
ROUNDS = 12


def clock_offset(exchange: Callable[[list[int]], list[list[int]]], rank: int) -> tuple[int, int]:
    """Offset from this process's time.monotonic_ns() to rank 0's, and its error. Collective.
    `exchange`: gives every rank's numbers, in rank order, to all."""
    ended, rounds = 0, []
    for _ in range(ROUNDS):
        everyone = exchange([time.monotonic_ns(), ended])
        ended = time.monotonic_ns()
        rounds.append(everyone)
    last = exchange([0, ended])
    sent = [r[rank][0] for r in rounds]
    first_sent = [r[0][0] for r in rounds]
    # A rank's value in a round is the end of its previous round.
    first_ended = [r[0][1] for r in (*rounds[1:], last)]
    return from_rounds(sent, first_sent, first_ended) if rank else (0, 0)


def from_rounds(sent: list[int], first_sent: list[int], first_ended: list[int]) -> tuple[int, int]:
    """The offset and its error from the rounds' times: when this rank and rank 0 sent, and when each ended for rank 0."""
    least = max(before - mine for before, mine in zip(first_sent, sent[1:]))
    most = min(after - mine for after, mine in zip(first_ended, sent))
    return (least + most) // 2, max(0, most - least) // 2
