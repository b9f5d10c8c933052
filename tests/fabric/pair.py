"""Two connected transports, in one process or in two, and the libraries and providers that this machine has."""

import atexit
import ctypes
import multiprocessing
import os
import time

from tilescale_net import _native
from tilescale_net.errors import FabricError
from tilescale_net.runtime import fabric, settings

SYSTEM, BUNDLED = "libfabric.so.1", fabric.bundled_library()


def _providers() -> list[tuple[str, str, str]]:
    """(test id, library, provider) of every provider that works on this machine alone, or of the user's choice."""
    chosen, library = settings.PROVIDER.get(), settings.LIBFABRIC.get()
    if chosen and library:
        return [(f"chosen-{chosen}", library, chosen)]
    found = []
    for name, library in (("system", SYSTEM), ("bundled", BUNDLED)):
        try:
            version = _native.fabric_library(library)["version"]
            offered = {o["provider"] for o in _native.fabric_offers(library)}
        except FabricError:
            continue
        for provider in ("tcp", "tcp;ofi_rxm", "shm", "sockets"):
            if provider in offered:
                found.append((f"{name}-{version}-{provider}", library, provider))
        found += [(f"{name}-{version}-{own}", library, own) for own in settings.OWN_TRANSPORTS]
    return found


PROVIDERS = _providers()
IDS = [p[0] for p in PROVIDERS]


class End:
    """One transport with one registered buffer of `bytes` bytes, connected to its twin as peer 1 - rank."""

    def __init__(self, rank: int, bytes: int = 1 << 20, **options):
        self.rank, self.bytes = rank, bytes
        self.transport = _native.Transport(fabric.transport_options(rank=rank, **options))
        self.memory = (ctypes.c_ubyte * bytes)()
        self.region = self.transport.register_memory(ctypes.addressof(self.memory), bytes)
        self.events: list[dict] = []
        self.twin: End | None = None

    def address(self) -> tuple[bytes, bytes]:
        return self.transport.address(), self.transport.region_key(self.region)

    def join(self, address: bytes, key: bytes) -> None:
        self.transport.connect(1 - self.rank, address)
        self.remote = self.transport.add_remote(1 - self.rank, key)

    def properties(self) -> dict:
        return self.transport.properties()

    def load(self, offset: int = 0, bytes: int | None = None) -> bytes:
        return ctypes.string_at(ctypes.addressof(self.memory) + offset, self.bytes if bytes is None else bytes)

    def store(self, data: bytes, offset: int = 0) -> None:
        ctypes.memmove(ctypes.addressof(self.memory) + offset, data, len(data))

    def poll(self) -> list[dict]:
        got = self.transport.poll()
        self.events += got
        return got

    def of(self, kind: str) -> list[dict]:
        return [e for e in self.events if e["kind"] == kind]

    def post(self, call: str, *args, timeout: float = 20, **kwargs) -> int:
        """Post until it is taken, polling both ends meanwhile: connecting takes two. Returns how often it was not."""
        end = time.monotonic() + timeout
        refused = 0
        while not getattr(self.transport, call)(*args, **kwargs):
            refused += 1
            assert time.monotonic() < end, f"{call} was answered 'again' for {timeout} s"
            self.poll()
            if self.twin:
                self.twin.poll()
        return refused

    def write(self, offset: int, bytes: int, **kwargs) -> int:
        """Write [offset, offset + bytes) of this end's memory to the same place of the other's."""
        kwargs.setdefault("remote_offset", offset)
        return self.post("write", 1 - self.rank, self.region, self.remote, bytes, offset, **kwargs)

    def message(self, data: bytes, **kwargs) -> int:
        return self.post("message", 1 - self.rank, data, **kwargs)


class RemoteEnd:
    """An End in the session's second process, which polls it all the time."""

    _pipe = None

    def __init__(self, *args, **kwargs):
        self.events: list[dict] = []
        self.number = self._ask("new", args, kwargs)
        self.bytes = kwargs.get("bytes", args[1] if len(args) > 1 else 1 << 20)
        self.region = self._ask("region")

    @classmethod
    def _start(cls) -> None:
        context = multiprocessing.get_context("spawn")
        cls._pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        atexit.register(process.kill)

    def _ask(self, method: str, args=(), kwargs=None):
        if self._pipe is None:
            self._start()
        self._pipe.send((getattr(self, "number", None), method, args, kwargs or {}))
        assert self._pipe.poll(60), f"the second process did not answer {method}"
        good, value = self._pipe.recv()
        if not good:
            raise value
        return value

    def __getattr__(self, name: str):
        if name not in ("address", "join", "properties", "load", "store", "post", "write", "message"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._ask(name, args, kwargs)

    def poll(self) -> list[dict]:
        got = self._ask("take")
        self.events += got
        return got

    def of(self, kind: str) -> list[dict]:
        return [e for e in self.events if e["kind"] == kind]

    def __del__(self):
        if "number" in self.__dict__:
            self._ask("drop")


def _serve(pipe) -> None:
    ends: dict[int, End] = {}
    made = 0
    while True:
        for end in ends.values():
            end.poll()
        if not pipe.poll(0 if ends else None):  # with nothing to poll it sleeps: other tests want the processor
            os.sched_yield()
            continue
        number, method, args, kwargs = pipe.recv()
        try:
            if method == "new":
                made += 1
                ends[made] = End(*args, **kwargs)
                answer = made
            elif method == "drop":
                end = answer = None  # the loop's variable would keep it alive
                del ends[number]
            elif method == "take":
                answer, ends[number].events = ends[number].events, []
            elif method == "region":
                answer = ends[number].region
            else:
                answer = getattr(ends[number], method)(*args, **kwargs)
            pipe.send((True, answer))
        except Exception as err:
            pipe.send((False, err))


def pair(library: str = "", provider: str = "", bytes: int = 1 << 20, options=({}, {}), **common):
    """Two connected ends with ranks 0 and 1. Options as for `fabric.transport_options`.

    Both live in this process, which makes tests quick and repeatable; the second one lives in another process when they
    share memory, because libfabric 2.5's shm provider crashes on two of its endpoints in one process.
    """
    second = RemoteEnd if provider == "shm" else End
    a = End(0, bytes, library=library, provider=provider, **common, **options[0])
    b = second(1, bytes, library=library, provider=provider, **common, **options[1])
    addresses = a.address(), b.address()
    a.join(*addresses[1])
    b.join(*addresses[0])
    if second is End:
        a.twin, b.twin = b, a
    return a, b


def until(condition, *ends, timeout: float = 20) -> None:
    """Poll all ends until `condition()`; fails after `timeout` seconds, and at once on an unexpected failure."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"nothing more in {timeout} s; events: {[e.events[-5:] for e in ends]}"
        for one in ends:
            for event in one.poll():
                assert event["kind"] != "failed", event
