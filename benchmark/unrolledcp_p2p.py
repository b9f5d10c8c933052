"""Bandwidth of blocks' copies to (push) and from (pull) a peer's memory, next to NVSHMEM.

    GPUS=2 bash launch.sh benchmark/unrolledcp_p2p.py
    GPUS=2 bash launch.sh benchmark/unrolledcp_p2p.py --threads 128,1024 --engine auto,bulk --json run.json

Both have the same timing in the same run, and delivered data are verified. A push ends with
a quiet, on both implementations. Without a GPU the simulator runs the same kernels.
"""

from benchmark.common import Report
from benchmark.common.copies import Nvshmem, TilescaleNet, compare, copy_parser, join, nvshmem

BENCH = dict(quick="--sizes 2K,64K --repeat 2")  # see common/suite.py


def main() -> None:
    parser = copy_parser(__doc__.splitlines()[0], sizes="2K..4M", simulated="2K..256K")
    parser.flag("--no-nvshmem", "leave NVSHMEM out even where it can run")
    args = parser.parse_args()
    parser.require_two_ranks("copies need")
    report = Report("unrolledcp_p2p", args)
    timer = join(report, args)
    library = None if args.no_nvshmem else nvshmem(report)
    capacity = max(args.sizes)
    theirs = [Nvshmem(capacity, library, args.offset)] if library else []
    compare(report, args, [*theirs, TilescaleNet(capacity, args.offset)], timer, reference="NVSHMEM")
    report.finish(library)


if __name__ == "__main__":
    main()
