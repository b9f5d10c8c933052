"""Runs a function on several ranks, each a process of its own, and collects what they return or raise.

Ranks fork from a server that has imported torch and tilelang, so that a test with fresh processes costs a fraction of a
second. On a machine with enough GPUs the ranks use them; elsewhere they use the simulator.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

_context = multiprocessing.get_context("forkserver")


@functools.cache
def gpus() -> int:
    """GPUs that ranks can use; jobs of more ranks run in the simulator."""
    import torch

    return 0 if os.environ.get("TSN_DEVICE") == "simulator" else torch.cuda.device_count()


def _preload() -> None:
    """Import what is slow before ranks fork. tilelang looks for GPUs when imported, after which a fork could not use one."""
    heavy = ["torch", "torch.distributed", "tilescale_net", "hypothesis"]
    _context.set_forkserver_preload(heavy if gpus() else [*heavy, "tilelang"])


@dataclass
class Outcome:
    """How one rank ended: `value` if it returned, `error` (class name, message, traceback) if it raised."""

    rank: int
    value: object = None
    error: tuple[str, str, str] | None = None
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0


class RankFailure(AssertionError):
    """At least one rank raised, was killed, or did not end in time."""


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _body(rank: int, size: int, env: dict[str, str], fn: Callable, args: tuple, init: bool, heap: str, pipe) -> None:
    os.environ.update(env)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1234 + rank)
    code = 0
    try:
        import tilescale_net as tsn

        if init:
            tsn.init(heap)
        value = fn(*args)
        if init:
            tsn.finalize()
        pipe.send(pickle.dumps((value, None)))
    except BaseException as err:
        if init:
            try:
                from tilescale_net.runtime import world

                if world._current is not None:
                    world._current._watchdog.announce_failure(f"{type(err).__name__}: {err}")
                    world._current._failure = world._current._failure or tsn.TileScaleError(str(err))
            except Exception:
                pass
        pipe.send(pickle.dumps((None, (type(err).__name__, str(err), traceback.format_exc()))))
        if init:
            try:
                world._current._watchdog.wait_for_others()
            except Exception:  # there is no world yet
                pass
        code = 1
    pipe.close()
    if code:
        os._exit(code)


def launch(
    size: int,
    fn: Callable,
    *args,
    env: dict[str, str] | None = None,
    init: bool = True,
    heap: str = "32M",
    timeout: float = 120.0,
    on_start: Callable[[list], None] | None = None,
) -> list[Outcome]:
    """Run `fn(*args)` on `size` ranks and return every rank's outcome; ranks still alive at `timeout` are killed.

    Args:
        fn: a module-level function.
        init: call tsn.init(heap) before and tsn.finalize() after.
        on_start: called with the process objects, for tests that kill ranks.
    """
    _preload()
    base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    if gpus() < size:
        base["TSN_DEVICE"] = "simulator"
    base.update(env or {})
    pipes, procs = [], []
    for rank in range(size):
        mine, theirs = _context.Pipe(duplex=False)
        proc = _context.Process(target=_body, args=(rank, size, base, fn, args, init, heap, theirs), daemon=True)
        proc.start()
        theirs.close()
        pipes.append(mine)
        procs.append(proc)
    if on_start:
        on_start(procs)
    end = time.monotonic() + timeout
    outcomes = [Outcome(r) for r in range(size)]
    for rank, (pipe, proc) in enumerate(zip(pipes, procs)):
        try:
            if pipe.poll(max(0.0, end - time.monotonic())):
                outcomes[rank].value, outcomes[rank].error = pickle.loads(pipe.recv())
            else:
                outcomes[rank].error = ("Timeout", f"rank {rank} did not end within {timeout:g} s", "")
        except (EOFError, ConnectionResetError):
            outcomes[rank].error = ("Died", f"rank {rank} ended without a word", "")
    for rank, proc in enumerate(procs):
        proc.join(max(5.0, end - time.monotonic()) if outcomes[rank].error is None else 5.0)
        if proc.is_alive():
            os.kill(proc.pid, signal.SIGKILL)
            proc.join(5)
        outcomes[rank].exitcode = proc.exitcode
    return outcomes


def run(size: int, fn: Callable, *args, **kwargs) -> list:
    """As `launch`, but every rank must succeed; returns their values in rank order."""
    outcomes = launch(size, fn, *args, **kwargs)
    bad = [o for o in outcomes if not o.ok]
    if bad:
        lines = []
        for o in bad:
            name, text, trace = o.error or ("Exit", f"exit status {o.exitcode}", "")
            lines.append(f"rank {o.rank}: {name}: {text}\n{trace}")
        raise RankFailure("\n".join(lines))
    return [o.value for o in outcomes]
