"""`python -m tilescale_net model`: bytes on each link and expected times of MoE dispatch and combine, and of collectives,
before there is a cluster.

A link's time is its bytes over its bandwidth, plus the messages' own cost; NVLink and network work at the same time, so
the slower one counts, plus a fixed cost of launch, handshake and waits. If a rank of another node forwards rows, its
wait, read and put are added once.

Choices of experts are uniform: each token takes `top_k` different experts, every one with equal probability. A row goes once
to each rank that hosts a chosen expert. The expected number of rows towards a rank then follows a hypergeometric draw.

The fixed costs and the distance from NVLink's bound are fitted to docs/results: MoE on 2 and 4 H200s, collectives on
two H100s, minus the difference of two H200s; tests/cli/test_model.py compares them with these results. The cost of the
network is measured (tcp over loopback) or published by others (a NIC), as the table states. Several GPUs of several
nodes have not been measured.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import comb
from typing import Any

from tilescale_net.cli.arguments import positive_float, positive_int
from tilescale_net.errors import ConfigurationError

NVLINK = 372.0  # GB/s one way of single copies between two H200s
HOP_US = 2.5  # put_signal of a row of 8 to 16 KiB over NVLink, docs/results/signals.md: the time to forward a row


@dataclass(frozen=True)
class Network:
    """A rank's way to other nodes. `gbps`: 1e9 bit/s of a rank, one way. `both_ways`: whether it carries that in both
    directions at once; else they share it. `message`: us of a message beyond its bytes, of one proxy thread. `latency`:
    us from a put to its signal at the target. `source`: where the figures are from."""

    gbps: float
    both_ways: bool
    message: float
    latency: float
    source: str

    def time(self, nbytes: float, messages: float) -> tuple[float, float]:
        """us of the bytes alone, and with the cost of messages, without the latency."""
        wire = nbytes * 8 / self.gbps / 1e3 * (1 if self.both_ways else 2)
        return wire, max(wire, messages * self.message)


TCP = Network(37.3, False, 3.5, 15.2, "measured: tcp over loopback, GPU memory staged, docs/results/fabric.md")


def tcp(gbps: float) -> Network:
    """tcp over loopback at `gbps`. Hosts differ: 37.3 with the H200s, 24 with two H100s."""
    return replace(TCP, gbps=gbps, source=TCP.source if gbps == TCP.gbps else "tcp over loopback, the rate as given")


def nic(gbps: float, shared_by: int) -> Network:
    """A NIC of `gbps` for `shared_by` ranks. Not measured: this package has not run on one. Libefaxx and pplx-garden
    publish 97 % of the rate and 10 us one way for EFA; 7.8 M messages per second and thread is FaSST's figure for
    one-sided operations on InfiniBand."""
    return Network(
        0.97 * gbps / shared_by, True, 1 / 7.8, 10.0, "published by others for EFA and InfiniBand, not measured"
    )


@dataclass(frozen=True)
class Expectation:
    """One operation by one way; bytes are of a rank and one direction (of collectives on average), times in us. `way`:
    "once per rank" or "once per node". `bound`: of the busier link, at hardware rates. `expected`: with the costs of
    kernels and messages. `limit`: the limiting link."""

    operation: str
    way: str
    nvlink_bytes: float
    network_bytes: float
    network_messages: float
    bound: float
    expected: float
    limit: str


def _expect(
    operation: str,
    way: str,
    network: Network,
    sent: tuple[float, float, float],
    nvlink_us: float,
    fixed_us: float,
    hops: int,
    steps: int = 1,
) -> Expectation:
    """Expected costs of a call. `sent`: bytes over NVLink and over the network, and messages of the network.
    `nvlink_us`: with the kernels' time beyond the bound. `fixed_us`: independent of the size. `hops`: 1 if a rank
    forwards data from another node. `steps`: number of waits for the network."""
    nvlink, proxied, messages = sent
    wire, sending = network.time(proxied, messages)
    waits = steps * (network.latency + hops * HOP_US)
    times = {"NVLink": nvlink_us, "network": waits + sending if proxied else 0.0}
    limit = max(times, key=lambda link: times[link])
    bound, expected = max(nvlink / NVLINK / 1e3, wire), fixed_us + times[limit]
    named = "messages" if limit == "network" and sending > wire else limit
    return Expectation(operation, way, nvlink, proxied, messages, bound, expected, named)


WAYS = ("once per rank", "once per node")


def _ways(nodes: int, gpus: int) -> Sequence[str]:
    """Those that differ."""
    return WAYS if nodes > 1 and gpus > 1 else WAYS[:1]


# -- MoE --------------------------------------------------------------------------------------------------------------

ROW: dict[str, Callable[[int], int]] = {
    "bf16": lambda hidden: 2 * hidden,
    "fp8": lambda hidden: hidden + 4 * -(-hidden // 128),
}
LAYOUT_US = 26.0  # throughput mode: counting and routing, saved by a cached layout
PROXIED_BYTES = 256 * 1024  # throughput mode: of a message to another node, about (Tuning.proxied_bytes)
# Of a kernel, by mode: us independent of the size; time of the bytes on NVLink, times the bound's.
KERNELS = {
    ("throughput", "dispatch"): (25.0, 1.044),
    ("throughput", "combine"): (46.0, 1.07),
    ("latency", "dispatch"): (16.5, 1.27),
    ("latency", "combine"): (19.0, 1.13),
}
OPERATIONS = {"latency": ("dispatch", "combine"), "throughput": ("dispatch", "dispatch, cached layout", "combine")}


@dataclass(frozen=True)
class Cluster:
    """Inputs of the model. `tokens`: of one rank; `hidden` elements of `dtype` make a row."""

    nodes: int
    gpus: int
    tokens: int
    hidden: int
    top_k: int
    experts: int
    dtype: str
    mode: str
    network: Network

    def check(self) -> None:
        """Raise ValueError for impossible values."""
        ranks = self.nodes * self.gpus
        if self.experts % ranks:
            raise ValueError(f"--experts is {self.experts}; it must be a multiple of the {ranks} ranks")
        if self.top_k > self.experts:
            raise ValueError(f"--top-k is {self.top_k}, more than the {self.experts} experts")

    def reached(self, ranks: int) -> float:
        """Probability that a token chooses an expert of `ranks` given ranks."""
        others = self.experts - self.experts // (self.nodes * self.gpus) * ranks
        return 1 - comb(others, self.top_k) / comb(self.experts, self.top_k)

    def rows(self, way: str) -> tuple[float, float]:
        """Expected rows that a rank sends to others over NVLink, including forwarded ones, and over the network. `way`:
        "once per rank": each row crosses to every rank that needs it, as with `Tuning(once_per_node=False)` or nodes of
        one rank; "once per node": it crosses once for each node, and is forwarded over NVLink there."""
        each = self.tokens * self.reached(1)
        if way == "once per rank":
            return each * (self.gpus - 1), each * self.gpus * (self.nodes - 1)
        return each * (self.gpus - 1) * self.nodes, self.tokens * self.reached(self.gpus) * (self.nodes - 1)


def expect(c: Cluster, operation: str, way: str) -> Expectation:
    """`operation`: one of OPERATIONS. Rows of combine are bfloat16 for any `dtype`."""
    (nvlink, network), kind = c.rows(way), operation.partition(",")[0]
    row = ROW["bf16" if kind == "combine" else c.dtype](c.hidden)
    fixed, slowdown = KERNELS[c.mode, kind]
    fixed += LAYOUT_US if operation == "dispatch" and c.mode == "throughput" else 0.0
    messages = network / (max(1, PROXIED_BYTES // row) if c.mode == "throughput" else 1)
    sent, hops = (nvlink * row, network * row, messages), int(way == "once per node" and c.gpus > 1)
    return _expect(operation, way, c.network, sent, nvlink * row / NVLINK / 1e3 * slowdown, fixed, hops)


# -- collectives ------------------------------------------------------------------------------------------------------

CHUNK = 1 << 20  # bytes of a message to another node (TSN_PROXY_CHUNK)
# In a node: us independent of the size; GB/s that a rank sends to others over NVLink; times that its slices travel.
COLLECTIVES = {
    "all_gather": (7.9, 345.0, 1),
    "reduce_scatter": (9.4, 311.0, 1),
    "all_reduce": (4.5, 324.0, 2),
    "all_to_all": (7.7, 345.0, 1),
}
SMALL_ALL_REDUCE = (2.52, 330.0)  # in one step, all data to each peer
# The others in packets: the same, and the largest size of all parts.
PACKETS = (4.78, 260.0)
PACKETS_UP_TO = {"all_gather": 256 << 10, "all_to_all": 256 << 10, "reduce_scatter": 512 << 10}
# All these are for H100s. Savings of H200s, us: whole, and in packets.
LESS_ON_H200 = {"all_gather": (2.0, 0.5), "reduce_scatter": (2.0, 1.0), "all_to_all": (1.7, 0.9)}


def sent(operation: str, nbytes: int, nodes: int, gpus: int, way: str) -> tuple[float, float]:
    """Bytes that a rank sends over NVLink and over the network. `nbytes`: of the output of an all-gather, the input of
    the others. `way`: "once per rank" or "once per node"; an all-to-all has one way, because each row has one
    receiver."""
    ranks = nodes * gpus
    part = nbytes / ranks * COLLECTIVES[operation][2]
    if way == "once per node" and operation != "all_to_all":
        return part * nodes * (gpus - 1), part * (nodes - 1)
    return part * (gpus - 1), part * (ranks - gpus)


def expect_collective(
    operation: str, nbytes: int, nodes: int, gpus: int, way: str, network: Network, h200: bool = False
) -> Expectation:
    """One of COLLECTIVES of `nbytes` (see `sent`)."""
    fixed, rate, steps = COLLECTIVES[operation]
    less, less_in_packets = LESS_ON_H200.get(operation, (0.0, 0.0)) if h200 else (0.0, 0.0)
    fixed -= less
    direct, proxied = sent(operation, nbytes, nodes, gpus, way)
    hops, all_sent = int(way == "once per node" and gpus > 1), (direct, proxied, proxied / CHUNK)
    found = _expect(operation, way, network, all_sent, direct / rate / 1e3, fixed, hops, steps)
    if operation == "all_reduce" and nodes == 1:
        small = SMALL_ALL_REDUCE[0] + nbytes * (gpus - 1) / SMALL_ALL_REDUCE[1] / 1e3
        return replace(found, expected=min(found.expected, small))
    if nodes == 1 and nbytes <= PACKETS_UP_TO.get(operation, 0):
        return replace(found, expected=PACKETS[0] - less_in_packets + direct / PACKETS[1] / 1e3)
    return found


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    whole = (("nodes", 8), ("gpus", 8), ("tokens", 4096), ("hidden", 7168), ("top-k", 8), ("experts", 256))
    for name, default in whole:
        what = {"gpus": "GPUs of a node", "tokens": "of a rank", "experts": "of the whole job"}.get(name, "")
        command.add_argument(f"--{name}", type=positive_int, default=default, help=f"{what} (%(default)s)".strip())
    command.add_argument("--dtype", choices=list(ROW), default="bf16", help="of dispatched rows (%(default)s)")
    command.add_argument("--mode", choices=list(OPERATIONS), default="throughput", help="(%(default)s)")
    command.add_argument(
        "--nic-gbps", type=positive_float, default=400.0, help="of a NIC, 1e9 bit/s one way (%(default)s)"
    )
    command.add_argument("--nics", type=positive_int, help="of a node (one a GPU)")
    text = "the network of virtual nodes on one host, and its rate one way, by proxy_write.py (%(const)s)"
    command.add_argument("--tcp-loopback", nargs="?", const=TCP.gbps, type=positive_float, metavar="GBPS", help=text)
    text = "a collective's bytes (K, M, G) instead of a layer: output of an all-gather, input of the others"
    command.add_argument("--bytes", metavar="SIZE", help=text)
    command.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table; exit code 0. Raises ConfigurationError for invalid arguments."""
    network = tcp(args.tcp_loopback) if args.tcp_loopback else nic(args.nic_gbps * (args.nics or args.gpus), args.gpus)
    found, facts, head = (_of_a_layer if args.bytes is None else _of_collectives)(args, network)
    if args.json:
        print(json.dumps({**facts, "expected": [asdict(e) for e in found]}, indent=1))
        return 0
    print(*head, "", sep="\n")
    titles = ("NVLink", "network", "messages", "bound", "expected")
    print(
        f"{'way':15} {'operation':24} {titles[0]:>11} {titles[1]:>11} {titles[2]:>9} {titles[3]:>10} {titles[4]:>10}  limit"
    )
    for e in found:
        print(
            f"{e.way:15} {e.operation:24} {e.nvlink_bytes / 1e6:8.2f} MB {e.network_bytes / 1e6:8.2f} MB "
            f"{e.network_messages:9.0f} {e.bound:7.1f} us {e.expected:7.1f} us  {e.limit}"
        )
    return 0


Report = tuple[Sequence[Expectation], dict[str, Any], list[str]]


def _of_collectives(args: argparse.Namespace, network: Network) -> Report:
    from tilescale_net.runtime.settings import parse_bytes

    nbytes, nodes, gpus = parse_bytes(args.bytes, "--bytes"), args.nodes, args.gpus
    head = [
        f"{nodes * gpus} ranks on {nodes} nodes, {nbytes} bytes: output of all-gather, input of the others",
        f"network {network.gbps:.1f} Gbit/s a rank ({network.source})" if nodes > 1 else "NVLink alone",
    ]
    if gpus > 2:
        head.append("fixed costs and NVLink's rate are those between two GPUs; more were not measured")
    found = [
        expect_collective(operation, nbytes, nodes, gpus, way, network)
        for operation in COLLECTIVES
        for way in (_ways(nodes, gpus) if operation != "all_to_all" else WAYS[:1])
    ]
    return found, {"network": asdict(network)}, head


def _of_a_layer(args: argparse.Namespace, network: Network) -> Report:
    from tilescale_net.kernels.moe import AllToAll

    sizes = (args.nodes, args.gpus, args.tokens, args.hidden, args.top_k, args.experts)
    c = Cluster(*sizes, args.dtype, args.mode, network)
    ranks = c.nodes * c.gpus
    try:
        c.check()
        found = [expect(c, operation, way) for way in _ways(c.nodes, c.gpus) for operation in OPERATIONS[c.mode]]
        memory = AllToAll.heap_bytes(c.experts, c.tokens, c.hidden, c.top_k, ranks=ranks, nodes=c.nodes, mode=c.mode)
    except ValueError as err:
        raise ConfigurationError(f"model: {err}") from None
    over = f"; network {network.gbps:.1f} Gbit/s a rank ({network.source})" if c.nodes > 1 else ""
    head = [
        f"{ranks} ranks on {c.nodes} nodes, {c.tokens} tokens a rank, hidden {c.hidden} {c.dtype}, top-{c.top_k} of "
        f"{c.experts} experts, {c.mode} mode",
        f"a token goes to {ranks * c.reached(1):.2f} ranks on {c.nodes * c.reached(c.gpus):.2f} nodes; symmetric heap of a "
        f"rank {memory / 2**20:.0f} MiB",
        f"NVLink {NVLINK:.0f} GB/s{over}",
    ]
    return found, {"cluster": asdict(c), "heap_bytes": memory}, head
