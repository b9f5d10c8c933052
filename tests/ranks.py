"""Runs a function on several ranks, each a process of its own, and collects their results and errors.

Ranks fork from a server that has imported torch and tilelang, so that a test with fresh processes costs a fraction of a
second. On a machine with enough GPUs the ranks use them; elsewhere, and where a test has set TSN_DEVICE=simulator, they
use the simulator.
"""

import contextlib
import functools
import multiprocessing
import os
import pickle
import secrets
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from tests import hosts

_context = multiprocessing.get_context("forkserver")


def _simulated() -> bool:
    return os.environ.get("TSN_DEVICE") == "simulator"


# The choice for the whole run; single tests make theirs later.
_always_simulated = _simulated()


@functools.cache
def visible_gpus() -> int:
    """GPUs of this machine, for any device that tests have chosen."""
    import torch

    return torch.cuda.device_count()


def gpus() -> int:
    """GPUs that ranks can use; jobs of more ranks run in the simulator."""
    return 0 if _simulated() else visible_gpus()


def _heap_for(size: int) -> str:
    """Bytes of the heap of such a job: on GPUs it does not grow, and an `AllReduce` with its defaults takes 44 MiB."""
    return "256M" if 0 < size <= gpus() else "32M"


def _preload() -> None:
    """Import slow modules before ranks fork. tilelang looks for GPUs when imported, after which a fork could not use one.

    All tests share one server: a test in the simulator may start it, and one that needs a GPU may be next.
    """
    heavy = ["torch", "torch.distributed", "tilescale_net", "hypothesis", "pytest"]
    with_tilelang = ["tilelang", "tilescale_net.language", "tilescale_net.compiler.jit", "tests.kernels.support"]
    with_tilelang += ["tests.preloaded_fabric", "tests.preloaded"]
    _context.set_forkserver_preload([*heavy, *with_tilelang] if _always_simulated or not visible_gpus() else heavy)


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


_is_rank = False


def _body(rank: int, size: int, env: dict[str, str], fn: Callable, args: tuple, init: bool, heap: str, pipe) -> None:
    global _is_rank
    _is_rank = True
    os.environ.update(env)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    if prefix := env.get(hosts.VARIABLE):
        hosts.enter(f"{prefix}{rank}")
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
        try:
            world = tsn.world()
        except Exception:  # no world
            world = None
        if init and world is not None:
            with contextlib.suppress(Exception):
                world.announce(tsn.TileScaleError(f"{type(err).__name__}: {err}"))
        pipe.send(pickle.dumps((None, (type(err).__name__, str(err), traceback.format_exc()))))
        if world is not None:
            world.wait_for_others()
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
    heap: str | None = None,
    timeout: float = 240.0,
    on_start: Callable[[list], None] | None = None,
) -> list[Outcome]:
    """Run `fn(*args)` on `size` ranks and return every rank's outcome; ranks still alive at `timeout` are killed.

    Args:
        fn: a module-level function.
        heap: of each rank; by default 32M, which grows, and on GPUs 256M.
        init: call tsn.init(heap) before and tsn.finalize() after.
        on_start: called with the process objects, for tests that kill ranks.
    """
    from tilescale_net.launch.run import reserve_port  # here, because ranks import this module early

    _preload()
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        base["TSN_JOB"] = secrets.token_hex(8)  # as launch.sh names its jobs, so that ranks sign their messages
        # Always said, because ranks have the environment of the test that happened to start their server.
        base["TSN_DEVICE"] = "simulator" if gpus() < size else os.environ.get("TSN_DEVICE", "auto")
        base.update(env or {})
        pipes, procs = [], []
        for rank in range(size):
            mine, theirs = _context.Pipe(duplex=False)
            proc = _context.Process(
                target=_body, args=(rank, size, base, fn, args, init, heap or _heap_for(size), theirs), daemon=True
            )
            proc.start()
            theirs.close()
            pipes.append(mine)
            procs.append(proc)
        if on_start:
            on_start(procs)
        return _collect(pipes, procs, timeout)


def _collect(pipes: list, procs: list, timeout: float) -> list[Outcome]:
    """Every rank's outcome; ranks still alive at `timeout` are killed."""
    end = time.monotonic() + timeout
    outcomes = [Outcome(r) for r in range(len(procs))]
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


def _values(outcomes: list[Outcome]) -> list:
    bad = [o for o in outcomes if not o.ok]
    if bad:
        lines = []
        for o in bad:
            name, text, trace = o.error or ("Exit", f"exit status {o.exitcode}", "")
            lines.append(f"rank {o.rank}: {name}: {text}\n{trace}")
        raise RankFailure("\n".join(lines))
    return [o.value for o in outcomes]


def run(size: int, fn: Callable, *args, **kwargs) -> list:
    """As `launch`, but every rank must succeed; returns their values in rank order."""
    return _values(launch(size, fn, *args, **kwargs))


# Arguments of tests that say where they run, and the variables of their ranks.
_VARIABLES = {"nodes": "VIRTUAL_NODES", "visibility": "TSN_SIM_VISIBILITY", "races": "TSN_SIM_RACES"}


def _on_ranks(
    judge: Callable[[dict, list[Outcome]], object], size: int, env: dict[str, str], options: dict
) -> Callable:
    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def test(**arguments) -> None:
            if _is_rank:
                return body(**arguments)
            variables = {_VARIABLES[name]: str(value) for name, value in arguments.items() if name in _VARIABLES}
            started = functools.partial(test, **arguments)
            judge(arguments, launch(arguments.get("size", size), started, env=env | variables, **options))

        return test

    return decorate


def on(size: int = 2, *, heap: str | None = None, init: bool = True, timeout: float = 240.0, **env: str) -> Callable:
    """A test whose body runs on each of `size` ranks, as `run` runs a function.

    Its own arguments `size`, `nodes`, `visibility` and `races` set the number of ranks and their environment; a
    fixture `seed` is the same on all of them.

    Args:
        env: environment of the ranks.
    """
    return _on_ranks(
        lambda arguments, outcomes: _values(outcomes), size, env, dict(heap=heap, init=init, timeout=timeout)
    )


def fails(
    error: str, *words: str, size: int = 2, rank: int | None = None, init: bool = True, timeout: float = 240.0, **env: str
) -> Callable:  # fmt: skip
    """A test whose body, run as by `on`, must end every rank, or one, with an error.

    Args:
        error: name of its class.
        words: of its message; so is the test's own argument `words`, one or several.
        rank: the only rank that must raise.
    """

    def judge(arguments: dict, outcomes: list[Outcome]) -> None:
        more = arguments.get("words", ())
        for o in outcomes if rank is None else [outcomes[rank]]:
            assert o.error and o.error[0] == error, o
            assert all(word in o.error[1] for word in (*words, *([more] if isinstance(more, str) else more))), o

    return _on_ranks(judge, size, env, dict(init=init, timeout=timeout))
