"""How fast NVSHMEM's block-scope put and get copy to and from a peer's memory: the baseline alone.

    GPUS=2 bash launch.sh benchmark/nvshmem_p2p.py --threads 128,1024

Timed and verified as in unrolledcp_p2p.py. NVSHMEM 3.7 and later copy by TMA when NVSHMEM_TMA_POLICY=ENABLE is set.
"""

from benchmark.common import Report
from benchmark.common.copies import Nvshmem, compare, copy_parser, finish, join, nvshmem


def main() -> None:
    parser = copy_parser(__doc__.splitlines()[0], sizes="2K..4M", simulated="2K..256K")
    args = parser.parse_args()
    from benchmark.nvshmem import missing

    report = Report("nvshmem_p2p", args)
    if reason := missing():
        report.nothing(reason.partition("not measured; ")[2] or reason)
    parser.require_two_ranks("copies need")
    timer = join(report, args)
    library = nvshmem(report)
    if library:
        compare(report, args, [Nvshmem(max(args.sizes), library, args.offset)], timer)
    finish(report, library)


if __name__ == "__main__":
    main()
