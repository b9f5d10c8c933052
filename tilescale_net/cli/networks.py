"""What links cost, for `python -m tilescale_net model`: measured here, or published by others."""

from dataclasses import dataclass, replace

HOP_US = 2.5  # put_signal of a row of 8 to 16 KiB over NVLink, docs/results/signals.md: what passing a row on takes


@dataclass(frozen=True)
class Network:
    """A rank's way to other nodes.

    Attributes:
        gbps: 1e9 bit/s of a rank, one way.
        both_ways: whether it carries that in both directions at once; else they share it.
        message: us of a message beyond its bytes, of one proxy thread.
        latency: us from a put to its signal at the target.
        source: where the figures are from.
    """

    gbps: float
    both_ways: bool
    message: float
    latency: float
    source: str


TCP = Network(37.3, False, 3.5, 15.2, "measured: tcp over loopback, GPU memory staged, docs/results/fabric.md")


def tcp(gbps: float) -> Network:
    """tcp over loopback on a host where that carries `gbps`. Hosts differ: the H200s' 37.3, two H100s' 24."""
    return replace(TCP, gbps=gbps, source=TCP.source if gbps == TCP.gbps else "tcp over loopback, the rate as given")


def nic(gbps: float, shared_by: int) -> Network:
    """A NIC of `gbps` for `shared_by` ranks. Not measured: this package has not run on one.

    97 % of the rate and 10 us one way are what Libefaxx and pplx-garden publish of EFA; 7.8 M messages a second and thread
    is what one thread reaches on InfiniBand in FaSST's benchmark of one-sided operations.
    """
    return Network(
        0.97 * gbps / shared_by, True, 1 / 7.8, 10.0, "published by others for EFA and InfiniBand, not measured"
    )
