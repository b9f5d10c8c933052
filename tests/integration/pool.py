"""Ranks that stay alive between calls, so that a property-based test can try hundreds of examples."""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable

import pytest

from tests import ranks


def _serve(pipes: list) -> None:
    """What each rank runs: calls functions as it is told, until one raises or it is told to end."""
    import tilescale_net as tsn

    pipe = pipes[tsn.rank()]
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

    def __init__(self, size: int, env: dict[str, str] | None = None, heap: str = "16M", timeout: float = 60.0):
        self._size, self._env, self._heap, self._timeout = size, env, heap, timeout
        self._pipes: list = []
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        both = [multiprocessing.Pipe() for _ in range(self._size)]
        self._pipes = [mine for mine, _ in both]
        self._outcomes: list[ranks.Outcome] = []

        def run() -> None:
            theirs = [end for _, end in both]
            self._outcomes = ranks.launch(self._size, _serve, theirs, env=self._env, heap=self._heap, timeout=3600.0)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def _answer(self, pipe) -> tuple[bool, object]:
        end = time.monotonic() + self._timeout
        while not pipe.poll(0.2):
            if not self._thread.is_alive() and not pipe.poll(0):
                ended = "; ".join(f"rank {o.rank}: {o.error or o.exitcode}" for o in self._outcomes)
                return False, f"the ranks have ended: {ended}"
            if time.monotonic() > end:
                return False, f"no answer within {self._timeout:g} s"
        return pipe.recv()

    def __call__(self, fn: Callable, *args) -> list:
        """`fn(*args)` on every rank; returns their values in rank order.

        Raises:
            RankFailure: a rank raised or did not answer in time; the next call has fresh ranks.
        """
        if not self._pipes:
            self._start()
        answers = []
        try:
            for pipe in self._pipes:
                pipe.send((fn, args))
            answers = [self._answer(pipe) for pipe in self._pipes]
        except (EOFError, ConnectionError) as error:
            answers.append((False, f"a rank vanished: {type(error).__name__}"))
        if all(ok for ok, _ in answers) and len(answers) == self._size:
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
