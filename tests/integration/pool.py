"""Ranks that stay alive between calls, so that a property-based test can try hundreds of examples."""

import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable

import pytest

from tests import ranks


def _serve(pipes: list) -> None:
    """The program of each rank: it calls the functions that it receives, until one raises or the pool ends."""
    import tilescale_net as tsn

    pipe = pipes[tsn.rank()]
    pipe.send((True, "ready"))
    while True:
        job = pipe.recv()
        if job is None:
            return
        fn, args = job
        try:
            answer = (True, fn(*args))
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        pipe.send(answer)
        if not answer[0]:
            raise RuntimeError(answer[1])


class Pool:
    """`size` ranks that have called tsn.init() once. Ranks are started when first needed and again after a failure.

    Args:
        size: number of ranks.
        env: environment of the ranks.
        heap: size of the symmetric heap.
        timeout: seconds that one call may take.
    """

    # Seconds until all ranks are ready. Where many ranks start at once, importing torch and starting CUDA take long.
    START = 180.0

    def __init__(self, size: int, env: dict[str, str] | None = None, heap: str = "16M", timeout: float = 180.0):
        self._size, self._env, self._heap, self._timeout = size, env, heap, timeout
        self._pipes: list = []
        self._thread: threading.Thread | None = None

    def _start(self) -> list[tuple[bool, object]]:
        """Start the ranks; what each of them reports when it is ready, or why it is not."""
        both = [multiprocessing.Pipe() for _ in range(self._size)]
        self._pipes = [mine for mine, _ in both]
        self._outcomes: list[ranks.Outcome] = []

        def run() -> None:
            theirs = [end for _, end in both]
            self._outcomes = ranks.launch(self._size, _serve, theirs, env=self._env, heap=self._heap, timeout=3600.0)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        return [self._answer(pipe, self.START) for pipe in self._pipes]

    def _answer(self, pipe, seconds: float) -> tuple[bool, object]:
        end = time.monotonic() + seconds
        try:
            while not pipe.poll(0.2):
                if not self._thread.is_alive() and not pipe.poll(0):
                    return False, self._ended()
                if time.monotonic() > end:
                    return False, f"no answer within {seconds:g} s"
            return pipe.recv()
        except (EOFError, ConnectionError):  # the far end is closed when the last rank has ended
            return False, self._ended()

    def _ended(self) -> str:
        """How the ranks have ended, when they have."""
        self._thread.join(10)
        how = [f"rank {o.rank}: {': '.join(o.error) if o.error else o.exitcode}" for o in self._outcomes]
        return "the ranks have ended\n" + "\n".join(how)

    def _ask(self, job) -> list[tuple[bool, object]]:
        for pipe in self._pipes:
            try:
                pipe.send(job)
            except ConnectionError:  # then there is no answer either, but a reason
                pass
        return [self._answer(pipe, self._timeout) for pipe in self._pipes]

    def __call__(self, fn: Callable, *args) -> list:
        """`fn(*args)` on every rank; returns their values in rank order.

        Raises:
            RankFailure: a rank raised or did not answer in time; the next call has fresh ranks.
        """
        answers = [] if self._pipes else self._start()
        if all(ok for ok, _ in answers):
            answers = self._ask((fn, args))
        if all(ok for ok, _ in answers):
            return [value for _, value in answers]
        self.close()
        raise ranks.RankFailure("\n".join(f"rank {r}: {text}" for r, (ok, text) in enumerate(answers) if not ok))

    def close(self) -> None:
        """End the ranks and wait for them."""
        pipes, self._pipes = self._pipes, []
        for pipe in pipes:
            try:
                pipe.send(None)
            except (OSError, EOFError):
                pass
            pipe.close()
        if self._thread is not None:
            self._thread.join(60)
            self._thread = None


def pool_fixture(size: int, **options):
    """A module-scoped pytest fixture that yields a Pool."""

    @pytest.fixture(scope="module")
    def pool():
        made = Pool(size, **options)
        yield made
        made.close()

    return pool
