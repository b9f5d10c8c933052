"""What the benchmarks of the fabric itself share: arguments, the job's ranks, and the report's header.

They need libfabric and nothing else of the package: no heap, no kernels, no GPU.
"""

import os
import sys
from collections.abc import Callable

from benchmark.common.arguments import BenchmarkParser, format_bytes, positive_float, positive_int
from benchmark.common.environment import rank, world_size
from benchmark.common.table import Column


class SizeColumn(Column):
    """Sizes as 8M."""

    def show(self, value) -> str:
        return format_bytes(value)


def add_fabric_arguments(parser: BenchmarkParser) -> None:
    """Adds --provider, --domain and --timeout."""
    group = parser.add_argument_group("fabric")
    group.add_argument(
        "--provider", default="", metavar="NAME", help="libfabric provider (TSN_PROVIDER, else the best)"
    )
    text = "domain or interface, such as lo or rdmap0s0; several separated by commas (loopback on one host)"
    group.add_argument("-d", "--domain", default="", metavar="NAME", help=text)
    text = "seconds without any progress after which a run gives up (30)"
    group.add_argument("--timeout", type=positive_float, default=30.0, metavar="S", help=text)


def add_rails_argument(parser: BenchmarkParser) -> None:
    text = "network endpoints that carry the messages in turn (one for each NIC near the GPU)"
    parser.add_argument("--rails", type=positive_int, default=0, metavar="N", help=text)


class FabricJob:
    """The ranks of a benchmark, and transports with the user's choice of provider and interface.

    Args:
        parser, args: as parsed; choices that libfabric does not offer end the process with exit code 2.
        ranks: how many ranks the method takes; None: two or more.
    """

    def __init__(self, parser: BenchmarkParser, args, ranks: int | None = None):
        size = world_size()
        if ranks and size != ranks:
            parser.error(
                f"the method takes {ranks} ranks, this job has {size}; start it with GPUS={ranks} bash launch.sh …"
            )
        if size < 2:
            parser.error("the method takes two ranks or more; start it with GPUS=2 bash launch.sh …")
        from tilescale_net import errors, fabric
        from tilescale_net.runtime import control, topology

        self.parser, self.args = parser, args
        self.rank, self.size = rank(), size
        try:
            self.library = fabric.library()
            self._check_choices(fabric.offers())
        except errors.FabricError as err:
            raise SystemExit(f"{parser.prog}: {err}") from None
        # Only death ends a collective call early: the native loops have a time limit of their own.
        self.control = control.Control(3600.0)
        hosts = self.control.gather("hosts", topology.host_identity())
        self.multi_host = len(set(hosts)) > 1
        self._local_rank = hosts[: self.rank].count(hosts[self.rank])

    def _check_choices(self, offers: list[dict]) -> None:
        args, providers = self.args, sorted({o["provider"] for o in offers})
        if args.provider and args.provider not in providers:
            self.parser.error(f"--provider {args.provider!r} is not one of {', '.join(providers)}")
        known = {o["domain"] for o in offers} | {o["address"] for o in offers}
        for name in filter(None, args.domain.split(",")):
            if name not in known:
                self.parser.error(f"--domain {name!r} is not one of {', '.join(sorted(known - {''}))}")

    def options(self, **fields):
        """Transport options: the user's choices, this rank, and `fields`."""
        from tilescale_net import fabric

        fields.setdefault("gpu_pci", self.gpu_pci())
        return fabric.transport_options(
            rank=self.rank,
            provider=self.args.provider,
            interface=self.args.domain,
            multi_host=self.multi_host,
            rails=getattr(self.args, "rails", 1),
            **fields,
        )

    def properties(self, **fields) -> dict:
        """What a transport with these options can do, before memory is set aside for it."""
        from tilescale_net import _native

        return _native.Transport(self.options(**fields)).properties()

    def device(self) -> int | None:
        """Ordinal of this rank's GPU, None without one."""
        import torch

        return self._local_rank % torch.cuda.device_count() if torch.cuda.is_available() else None

    def gpu_pci(self) -> str:
        """PCI address of this rank's GPU, '' without one."""
        ordinal = self.device()
        if ordinal is None:
            return ""
        import torch

        p = torch.cuda.get_device_properties(ordinal)
        return f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"

    def session(self, size: int, **fields):
        """A native session with a buffer of `size` bytes, introduced to every rank. Collective.

        Args:
            fields: of the transport options; `device_address` and `device` put the buffer into GPU memory.
        """
        from tilescale_net import _native

        place = {name: fields.pop(name) for name in ("device_address", "device") if name in fields}
        session = _native.BenchSession(self.options(**fields), self.size, size, self.args.timeout, **place)
        for other, address in enumerate(self.control.gather("addresses", session.address())):
            if other != self.rank:
                session.connect(other, address)
        return session

    def header(self, properties: dict) -> dict[str, str]:
        """For Report.environment."""
        rails = f", {properties['rails']} rails" if properties["rails"] > 1 else ""
        return {
            "provider": f"{properties['provider']} on {properties['interface']}{rails}",
            "libfabric": properties["version"],
            "hosts": "several" if self.multi_host else "one: both ends share its processors and memory",
        }

    def link_gbps(self, properties: dict) -> float:
        """Speed of all rails together as the NICs tell it, in 10^9 bits a second; 0 when they do not."""
        return properties["link_gbps"]


def run(main: Callable[[], None]) -> None:
    """Call main(); an error of the package becomes its message on stderr and exit code 1."""
    from tilescale_net.errors import TileScaleError

    try:
        main()
    except TileScaleError as err:
        sys.stderr.write(f"{err}\n")
        sys.stderr.flush()
        os._exit(1)  # at once: other ranks may be waiting for this one


def note_of_cores(needed: int, what: str) -> str | None:
    """A warning where this machine has fewer cores than busy threads, else None."""
    cores = len(os.sched_getaffinity(0))
    if cores >= needed:
        return None
    return f"{what} keep {needed} threads busy on {cores} cores: the figures mean little."


__all__ = [
    "FabricJob",
    "SizeColumn",
    "add_fabric_arguments",
    "add_rails_argument",
    "note_of_cores",
    "run",
]
