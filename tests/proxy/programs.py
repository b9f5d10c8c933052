"""The C++ programs of these tests, and their sources."""

from pathlib import Path

from tests.fabric.programs import headers, sources
from tests.native.builder import build

_PROXY = "tilescale_net/csrc/proxy/"
_WORKER_FILES = ("heap_memory", "worker", "worker_send", "worker_receive", "proxy")
# Each compiled as one file, and once for all programs of a sanitizer.
_WORKER = (*(_PROXY + f"{name}.cpp" for name in _WORKER_FILES), "tilescale_net/csrc/cuda/driver.cpp")
_CHAOS = "tilescale_net/csrc/testing/chaos.cpp"
_NULL = "tilescale_net/csrc/testing/null_transport.cpp"


def queue_test(sanitizer: str = "") -> Path:
    return build("queue_test", ["tests/native/queue_test.cpp"], sanitizer)


def ordering_test(sanitizer: str = "") -> Path:
    return build("proxy_ordering_test", ["tests/native/proxy_ordering_test.cpp"], sanitizer)


def proxy_test(sanitizer: str = "") -> Path:
    """PEs of one process over the loopback transport; without libfabric, which sanitizers cannot look into."""
    return build("proxy_test", ["tests/native/proxy_test.cpp", _WORKER, _CHAOS], sanitizer)


def fabric_test() -> Path:
    """The same program with libfabric."""
    return build(
        "fabric_test",
        ["tests/native/proxy_fabric_test.cpp", _WORKER, _CHAOS, _NULL, sources("fabric")],
        flags=headers(),
    )


def fuzz_peer() -> Path:
    """libFuzzer's program over data read from a peer."""
    return build("fuzz_peer", ["tests/native/fuzz_peer.cpp"], "fuzzer")


def fuzz_worker() -> Path:
    """libFuzzer's program over a whole proxy and a foreign process's messages."""
    return build("fuzz_worker", ["tests/native/fuzz_worker.cpp", _WORKER, _CHAOS], "fuzzer")


def null_test() -> Path:
    return build("proxy_null_test", ["tests/native/proxy_null_test.cpp", _WORKER, _CHAOS, _NULL])
