"""How fast blocks copy to (push) and from (pull) a peer's memory, next to NVSHMEM.

    GPUS=2 bash launch.sh benchmark/unrolledcp_p2p.py
    GPUS=2 bash launch.sh benchmark/unrolledcp_p2p.py --threads 128,1024 --engine auto,bulk --json run.json

Both are timed in the same way in the same run, and what they delivered is compared with what was sent. A push ends with
a quiet, on both implementations. Without a GPU the simulator runs the same kernels.
"""

import argparse

from benchmark.common import Report
from benchmark.common.copies import copy_parser, finish, join, nvshmem, require_two_ranks

BENCH = dict(quick="--sizes 2K,64K --repeat 2")  # see common/suite.py


def parse() -> argparse.Namespace:
    parser = copy_parser(__doc__.splitlines()[0], sizes="2K..4M", simulated="2K..256K")
    parser.add_argument("--no-nvshmem", action="store_true", help="leave NVSHMEM out even where it can run")
    args = parser.parse_args()
    require_two_ranks(parser)
    return args


def main() -> None:
    args = parse()
    from benchmark.common.copies import Nvshmem, TilescaleNet, compare

    report = Report("unrolledcp_p2p", args)
    timer = join(report, args)
    library = None if args.no_nvshmem else nvshmem(report)
    capacity = max(args.sizes)
    implementations = ([Nvshmem(capacity, library, args.offset)] if library else []) + [
        TilescaleNet(capacity, args.offset)
    ]
    compare(report, args, implementations, timer, reference="NVSHMEM")
    finish(report, library)


if __name__ == "__main__":
    main()
