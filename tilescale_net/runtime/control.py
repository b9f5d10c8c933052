"""The control plane: torch.distributed with gloo. Collective calls that agree, or say who disagrees or is missing.

Every collective host call of the package goes through `Control.agree`: ranks exchange what they were asked to do
before anything is done, so that a difference becomes an error on every rank instead of a hang or a corrupted heap.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
import pickle
import time

import torch
import torch.distributed as dist

from tilescale_net.errors import ConfigurationError, PeerLost, RankMismatch

_RECORD = 512  # bytes of one rank's description of a call


def _leave_default() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Control:
    """Rank, size, and the collective calls of the host side.

    Args:
        timeout: seconds after which a collective call gives up and names the ranks that did not arrive.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        if not dist.is_initialized():
            self._initialise_default()
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.store = dist.distributed_c10d._get_default_store()
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        # A world of its own in the store: init after finalize must not read the keys of the earlier one.
        generation = self.store.add(f"tsn/generation/{self.rank}", 1)
        self.prefix = f"tsn/{generation}/"
        self._calls = 0
        self.reason_of = None  # set by the watchdog: () -> str | None, why peers are known to be lost

    def _initialise_default(self) -> None:
        # One host needs no other interface than loopback, and must not pick one by accident.
        if os.environ.get("NODES", "1") == "1" and "GROUP_WORLD_SIZE" not in os.environ:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        elif os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        limit = datetime.timedelta(seconds=max(self.timeout, 60.0))
        env = os.environ
        if "RANK" in env and "WORLD_SIZE" in env:
            dist.init_process_group("gloo", timeout=limit)
        elif "SLURM_PROCID" in env and "MASTER_ADDR" in env and "MASTER_PORT" in env:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
                rank=int(env["SLURM_PROCID"]),
                world_size=int(env["SLURM_NTASKS"]),
                timeout=limit,
            )
        elif "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
            raise ConfigurationError(
                "srun started several tasks but MASTER_ADDR and MASTER_PORT are not set; export them (any free port on "
                "the first node), or start the script through launch.sh"
            )
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        # Gloo's threads may still drop references to tensors when the last collective call has returned. A thread that
        # does so while the interpreter shuts down aborts the process; destroying the group waits for them.
        atexit.register(_leave_default)

    # -- collective calls -------------------------------------------------------------------------------------------

    def agree(self, call: str, arguments: str = "") -> None:
        """Wait until every rank makes this same call with the same arguments; also a barrier.

        Raises:
            RankMismatch: another rank made a different call; the message holds both.
            PeerLost: a rank did not arrive within the timeout, or died.
        """
        self._calls += 1
        text = f"{call}({arguments})".encode()
        if len(text) > _RECORD - 8:
            text = text[: _RECORD - 8]
        mine = torch.zeros(_RECORD, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._publish(call)
        self._collective(call, lambda: dist.all_gather(everyone, mine, group=self._group))
        for other, record in enumerate(everyone):
            if not torch.equal(record, mine):
                said = bytes(record.tolist()).rstrip(b"\0").decode(errors="replace")
                raise RankMismatch(
                    f"rank {self.rank} called {text.decode(errors='replace')} while rank {other} called {said}; "
                    "every rank must make the same calls with the same arguments, in the same order"
                )

    def gather(self, what: str, value: object) -> list:
        """Every rank's `value` (picklable), in rank order. Raises PeerLost as `agree` does."""
        payload = pickle.dumps(value)
        size = torch.tensor([len(payload)], dtype=torch.int64)
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        self._publish(what)
        self._collective(what, lambda: dist.all_gather(sizes, size, group=self._group))
        longest = max(int(s) for s in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._collective(what, lambda: dist.all_gather(everyone, mine, group=self._group))
        return [pickle.loads(t[: int(n)].numpy().tobytes()) for t, n in zip(everyone, sizes)]

    def _collective(self, what: str, run) -> None:
        try:
            run()
        except (RuntimeError, dist.DistBackendError) as err:
            raise PeerLost(self._explain(what, err)) from err

    # -- who is where -----------------------------------------------------------------------------------------------

    def _publish(self, call: str) -> None:
        if self.size > 1:
            self._set(f"call/{self.rank}", json.dumps([self._calls, call]))

    def _set(self, key: str, value: str) -> None:
        try:
            self.store.set(self.prefix + key, value)
        except RuntimeError:  # the process that hosts the store is gone; the collective call itself will tell
            pass

    def _get(self, key: str) -> str | None:
        try:
            if self.store.check([self.prefix + key]):
                return self.store.get(self.prefix + key).decode()
        except RuntimeError:
            pass
        return None

    def _explain(self, what: str, err: Exception) -> str:
        # The watchdog may need a moment longer than gloo to learn why a connection closed.
        end = time.monotonic() + 2.0
        while self.reason_of and not self.reason_of() and time.monotonic() < end:
            time.sleep(0.05)
        reason = self.reason_of() if self.reason_of else None
        if reason:
            return f"rank {self.rank}: {what} could not finish: {reason}"
        behind = []
        for other in range(self.size):
            said = self._get(f"call/{other}")
            calls, call = json.loads(said) if said else (0, "nothing yet")
            if calls < self._calls:
                behind.append(f"rank {other} (last call: {call})")
        who = ", ".join(behind) if behind else "no rank is known to be missing"
        first_line = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        return (
            f"rank {self.rank}: {what} did not finish within {self.timeout:g} s; not arrived: {who}. Look at those "
            f"ranks' output, or raise TSN_TIMEOUT if they are only slow ({first_line})"
        )

    def close(self) -> None:
        """Leave the package's own group. The default group stays: others may use it, and another init needs it."""
        try:
            dist.destroy_process_group(self._group)
        except (RuntimeError, ValueError, AssertionError):
            pass
