"""The part of `python -m tilescale_net model` that is about collectives: bytes on each link, and expected times.

As in model.py a link's time is its bytes over its rate, links work at the same time, and a fixed cost comes on top. Fixed
costs and rates are fitted to what docs/results has of two GPUs: of H200s for reductions, of H100s for all-gather and
all-to-all by 64 blocks. More GPUs have been measured with earlier kernels only (docs/results/collectives.md); between nodes
nothing has been measured on GPUs.
"""

from dataclasses import dataclass

from tilescale_net.cli.networks import HOP_US, Network

PIECE = 1 << 20  # bytes of a message to another node (TSN_PROXY_CHUNK)


@dataclass(frozen=True)
class Collective:
    """What a collective takes in a node.

    Attributes:
        fixed: us, independent of the size. rate: GB/s of what a rank sends to others over NVLink.
        steps: times that its parts travel.
    """

    fixed: float
    rate: float
    steps: int = 1


COLLECTIVES = {
    "all_gather": Collective(7.9, 345.0),
    "reduce_scatter": Collective(6.8, 311.0),
    "all_reduce": Collective(4.5, 324.0, steps=2),
    "all_to_all": Collective(7.7, 345.0),
}
SMALL_ALL_REDUCE = Collective(3.14, 156.0)  # in one step, to each peer all of it


@dataclass(frozen=True)
class Expected:
    """A collective of `nbytes` by one way; bytes are what a rank sends, on the average of the ranks; times in us."""

    operation: str
    nbytes: int
    way: str
    nvlink_bytes: float
    network_bytes: float
    bound: float
    expected: float
    limit: str


def sent(operation: str, nbytes: int, nodes: int, gpus: int, way: str) -> tuple[float, float]:
    """Bytes that a rank sends over NVLink and over the network.

    Args:
        nbytes: of the output of an all-gather, the input of the others.
        way: "once per rank" or "once per node"; an all-to-all has one way, as each row has one receiver.
    """
    ranks = nodes * gpus
    part = nbytes / ranks * COLLECTIVES[operation].steps
    if way == "once per node" and operation != "all_to_all":
        return part * nodes * (gpus - 1), part * (nodes - 1)
    return part * (gpus - 1), part * (ranks - gpus)


def expect(operation: str, nbytes: int, nodes: int, gpus: int, way: str, network: Network, nvlink: float) -> Expected:
    """One of COLLECTIVES; `nvlink`: GB/s one way of the hardware, for the bound."""
    kernel, (direct, proxied) = COLLECTIVES[operation], sent(operation, nbytes, nodes, gpus, way)
    wire = proxied * 8 / network.gbps / 1e3 * (1 if network.both_ways else 2)
    remote = 0.0
    if proxied:
        hop = HOP_US if way == "once per node" and gpus > 1 else 0.0
        remote = kernel.steps * (network.latency + hop) + max(wire, proxied / PIECE * network.message)
    times = {"NVLink": direct / kernel.rate / 1e3, "network": remote}
    limit = max(times, key=lambda link: times[link])
    expected = kernel.fixed + times[limit]
    if operation == "all_reduce" and nodes == 1:
        at_once = SMALL_ALL_REDUCE.fixed + nbytes * (gpus - 1) / SMALL_ALL_REDUCE.rate / 1e3
        expected = min(expected, at_once)
    return Expected(operation, nbytes, way, direct, proxied, max(direct / nvlink / 1e3, wire), expected, limit)


def expectations(nbytes: int, nodes: int, gpus: int, network: Network, nvlink: float) -> list[Expected]:
    """All collectives by all ways that differ."""
    found = []
    for operation in COLLECTIVES:
        both = nodes > 1 and gpus > 1 and operation != "all_to_all"
        ways = ("once per rank", "once per node") if both else ("once per rank",)
        found += [expect(operation, nbytes, nodes, gpus, way, network, nvlink) for way in ways]
    return found


def lines(nodes: int, gpus: int, network: Network, found: list[Expected]) -> list[str]:
    """The table, for people."""
    shown = [
        f"{nodes * gpus} ranks on {nodes} nodes, {found[0].nbytes} bytes: output of all-gather, input of the others",
        f"network {network.gbps:.1f} Gbit/s a rank ({network.source})" if nodes > 1 else "NVLink alone",
        *(["fixed costs and NVLink's rate are those between two GPUs; more were not measured"] if gpus > 2 else []),
        "",
        f"{'way':16} {'operation':16} {'NVLink':>10} {'network':>10} {'bound':>10} {'expected':>10}  limit",
    ]
    for e in found:
        shown.append(
            f"{e.way:16} {e.operation:16} {e.nvlink_bytes / 1e6:7.2f} MB {e.network_bytes / 1e6:7.2f} MB "
            f"{e.bound:7.1f} us {e.expected:7.1f} us  {e.limit}"
        )
    return shown
