"""`python -m tilescale_net model`: bytes on each link and expected times of MoE dispatch and combine, and of collectives,
before there is a cluster.

Choices are uniform: each token takes `top_k` different experts, every one with equal probability. A row goes once to each
rank that hosts a chosen expert. The expected number of rows towards a rank is then that of a hypergeometric draw. A link's
time is its bytes over its bandwidth, plus the messages' own cost; NVLink and network work at the same time, so the slower
of the two counts, and a fixed cost for the launch, the handshake and the waits comes on top.

The fixed costs and the distance from the bound of NVLink are fitted to what `docs/results/moe.md` reports of 2 and 4 H200s;
tests/cli/test_model.py compares them with these results. Where a rank of the other node passes rows on, its wait, its read
and its put come on top once; what several GPUs of several nodes take has not been measured. What the network costs is
either measured (tcp over loopback, `docs/results/fabric.md`) or published by others (a NIC), as the table states.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from math import comb, inf

from tilescale_net.cli.networks import HOP_US, TCP, Network, nic, tcp

ROW = {"bf16": lambda hidden: 2 * hidden, "fp8": lambda hidden: hidden + 4 * -(-hidden // 128)}
NVLINK = 372.0  # GB/s one way, what single copies reach between two H200s
LAYOUT_US = 26.0  # throughput mode: counting and agreeing on what goes where, saved where a layout is cached
PROXIED_BYTES = 256 * 1024  # throughput mode: of a message to another node, about (Tuning.proxied_bytes)


@dataclass(frozen=True)
class Kernel:
    """What a kernel takes beyond the bytes' own time.

    Attributes:
        fixed: us, independent of the size.
        slowdown: time of the bytes on NVLink, times the bound's.
    """

    fixed: float
    slowdown: float


KERNELS = {
    ("throughput", "dispatch"): Kernel(25.0, 1.044),
    ("throughput", "combine"): Kernel(46.0, 1.07),
    ("latency", "dispatch"): Kernel(16.5, 1.27),
    ("latency", "combine"): Kernel(19.0, 1.13),
}


@dataclass(frozen=True)
class Cluster:
    """What the times depend on. `tokens` are of one rank; `hidden` elements of `dtype` make a row."""

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
        """Raise ValueError for what cannot be."""
        for name in ("nodes", "gpus", "tokens", "hidden", "top_k", "experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be 1 or more")
        ranks = self.nodes * self.gpus
        if self.experts % ranks:
            raise ValueError(f"--experts is {self.experts}; it must be a multiple of the {ranks} ranks")
        if self.top_k > self.experts:
            raise ValueError(f"--top-k is {self.top_k}, more than the {self.experts} experts")

    def reached(self, ranks: int) -> float:
        """Probability that a token chooses an expert of `ranks` given ranks."""
        others = self.experts - self.experts // (self.nodes * self.gpus) * ranks
        return 1 - comb(others, self.top_k) / comb(self.experts, self.top_k)


@dataclass(frozen=True)
class Rows:
    """Expected rows that a rank sends, by way. With `forwarded`, those it passes on for other nodes are in `nvlink`."""

    own: float
    nvlink: float
    network: float


def once_per_rank(c: Cluster) -> Rows:
    """Each row crosses to every rank that needs it: with `Tuning(once_per_node=False)`, or where nodes have one rank."""
    each = c.tokens * c.reached(1)
    return Rows(each, each * (c.gpus - 1), each * c.gpus * (c.nodes - 1))


def once_per_node(c: Cluster) -> Rows:
    """Each row crosses the network once for each node that needs it, and goes on over NVLink there."""
    each = c.tokens * c.reached(1)
    return Rows(each, each * (c.gpus - 1) * c.nodes, c.tokens * c.reached(c.gpus) * (c.nodes - 1))


WAYS = {"once per rank": once_per_rank, "once per node": once_per_node}


@dataclass(frozen=True)
class Expectation:
    """One operation by one way; bytes are of a rank and one direction, times in us.

    Attributes:
        bound: of the busier link, at the rates of the hardware.
        expected: with the costs of the kernels and of messages.
        limit: the link that decides.
    """

    operation: str
    way: str
    nvlink_bytes: float
    network_bytes: float
    network_messages: float
    bound: float
    expected: float
    limit: str


def expect(c: Cluster, operation: str, way: str) -> Expectation:
    """`operation`: "dispatch", "dispatch, cached layout" or "combine". Rows of combine are bfloat16 for any `dtype`."""
    rows, kind = WAYS[way](c), operation.partition(",")[0]
    row = ROW["bf16" if kind == "combine" else c.dtype](c.hidden)
    kernel, net = KERNELS[c.mode, kind], c.network
    per_message = max(1, PROXIED_BYTES // row) if c.mode == "throughput" else 1
    messages = rows.network / per_message
    nvlink = rows.nvlink * row / NVLINK / 1e3
    wire = rows.network * row * 8 / net.gbps / 1e3 * (1 if net.both_ways else 2)
    remote = net.latency + max(wire, messages * net.message) if rows.network else 0.0
    if rows.network and WAYS[way] is once_per_node and c.gpus > 1:
        remote += HOP_US
    agree = LAYOUT_US if operation == "dispatch" and c.mode == "throughput" else 0.0
    times = {"NVLink": nvlink * kernel.slowdown, "network": remote}
    limit = max(times, key=lambda link: times[link])
    if limit == "network" and messages * net.message > wire:
        limit = "messages"
    return Expectation(
        operation, way, rows.nvlink * row, rows.network * row, messages,
        max(nvlink, wire), kernel.fixed + agree + max(times.values()), limit,
    )  # fmt: skip


def expectations(c: Cluster) -> list[Expectation]:
    """All operations of a mode by all ways that differ."""
    ways = list(WAYS) if c.nodes > 1 and c.gpus > 1 else list(WAYS)[:1]
    operations = ["dispatch", "combine"] if c.mode == "latency" else ["dispatch", "dispatch, cached layout", "combine"]
    return [expect(c, operation, way) for way in ways for operation in operations]


def _memory(c: Cluster) -> int:
    from tilescale_net.kernels.moe import AllToAll

    return AllToAll.heap_bytes(
        *(c.experts, c.tokens, c.hidden, c.top_k), ranks=c.nodes * c.gpus, nodes=c.nodes, mode=c.mode
    )


def lines(c: Cluster, found: list[Expectation], memory: int) -> list[str]:
    """The table, for people."""
    ranks = c.nodes * c.gpus
    reached = ranks * c.reached(1), c.nodes * c.reached(c.gpus)
    shown = [
        f"{ranks} ranks on {c.nodes} nodes, {c.tokens} tokens a rank, hidden {c.hidden} {c.dtype}, top-{c.top_k} of "
        f"{c.experts} experts, {c.mode} mode",
        f"a token goes to {reached[0]:.2f} ranks on {reached[1]:.2f} nodes; symmetric heap of a rank "
        f"{memory / 2**20:.0f} MiB",
        f"NVLink {NVLINK:.0f} GB/s; network {c.network.gbps:.1f} Gbit/s a rank ({c.network.source})" if c.nodes > 1 else
        f"NVLink {NVLINK:.0f} GB/s",
        "",
        f"{'way':26} {'operation':24} {'NVLink':>10} {'network':>10} {'messages':>9} {'bound':>9} {'expected':>9}  limit",
    ]  # fmt: skip
    for e in found:
        shown.append(
            f"{e.way:26} {e.operation:24} {e.nvlink_bytes / 1e6:7.1f} MB {e.network_bytes / 1e6:7.1f} MB "
            f"{e.network_messages:9.0f} {e.bound:6.0f} us {e.expected:6.0f} us  {e.limit}"
        )
    return shown


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    whole = (("nodes", 8), ("gpus", 8), ("tokens", 4096), ("hidden", 7168), ("top-k", 8), ("experts", 256))
    for name, default in whole:
        what = {"gpus": "GPUs of a node", "tokens": "of a rank", "experts": "of the whole job"}.get(name, "")
        command.add_argument(f"--{name}", type=int, default=default, help=f"{what} (%(default)s)".strip())
    command.add_argument("--dtype", choices=list(ROW), default="bf16", help="of dispatched rows (%(default)s)")
    command.add_argument("--mode", choices=("throughput", "latency"), default="throughput", help="(%(default)s)")
    command.add_argument("--nic-gbps", type=float, default=400.0, help="of a NIC, 1e9 bit/s one way (%(default)s)")
    command.add_argument("--nics", type=int, help="of a node (one a GPU)")
    text = "the network of virtual nodes on one host, and what it carries one way, by proxy_write.py (%(const)s)"
    command.add_argument("--tcp-loopback", nargs="?", const=TCP.gbps, type=float, metavar="GBPS", help=text)
    text = "a collective's bytes (K, M, G) instead of a layer: output of an all-gather, input of the others"
    command.add_argument("--bytes", metavar="SIZE", help=text)
    command.add_argument("--json", action="store_true", help="as JSON")


def _collectives(args: argparse.Namespace, network: Network) -> int:
    """The same of collectives."""
    from tilescale_net.cli import model_collectives
    from tilescale_net.runtime.settings import parse_bytes

    nbytes = parse_bytes(args.bytes, "--bytes")
    found = model_collectives.expectations(nbytes, args.nodes, args.gpus, network, NVLINK)
    if args.json:
        print(json.dumps({"network": asdict(network), "expected": [asdict(e) for e in found]}, indent=1))
    else:
        print("\n".join(model_collectives.lines(args.nodes, args.gpus, network, found)))
    return 0


def run(args: argparse.Namespace) -> int:
    """Print the table; exit code 0, or 2 for arguments that make no sense."""
    from tilescale_net.errors import ConfigurationError

    for name in ("nic_gbps", "nics", "tcp_loopback"):
        given = getattr(args, name)
        if given is not None and not 0 < given < inf:
            raise ConfigurationError(f"model: --{name.replace('_', '-')} is {given}; it must be above 0")
    for name in ("nodes", "gpus"):
        if getattr(args, name) < 1:
            raise ConfigurationError(f"model: --{name} is {getattr(args, name)}; it must be 1 or more")
    network = tcp(args.tcp_loopback) if args.tcp_loopback else nic(args.nic_gbps * (args.nics or args.gpus), args.gpus)
    if args.bytes is not None:
        return _collectives(args, network)
    c = Cluster(
        *(args.nodes, args.gpus, args.tokens, args.hidden, args.top_k, args.experts, args.dtype, args.mode), network
    )
    try:
        c.check()
        found, memory = expectations(c), _memory(c)
    except ValueError as err:
        raise ConfigurationError(f"model: {err}") from None
    if args.json:
        print(
            json.dumps({"cluster": asdict(c), "heap_bytes": memory, "expected": [asdict(e) for e in found]}, indent=1)
        )
    else:
        print("\n".join(lines(c, found, memory)))
    return 0
