"""Bandwidth of a large copy by number of blocks, against the copy engine's rate in the same run.

    GPUS=2 bash launch.sh benchmark/large_copy.py
    GPUS=2 bash launch.sh benchmark/large_copy.py --engine ldst --threads 512 --partition interleaved --nvshmem

Buffers of 256 MiB by default, of 1 MiB in the simulator, which has no copy engine.
"""

import tilescale_net as tsn
from benchmark.common import Report
from benchmark.common.arguments import on_gpu
from benchmark.common.copies import (
    CopyEngine,
    Implementation,
    Nvshmem,
    TilescaleNet,
    compare,
    copy_parser,
    join,
    nvshmem,
)

BENCH = dict(quick="--sizes 256K --blocks 1,4 --repeat 2")  # see common/suite.py

SIMULATED_BLOCKS = (1, 4, 16)
BLOCKS = (1, 4, 8, 12, 16, 24, 32, 64, 132)


def main() -> None:
    blocks = BLOCKS if on_gpu() else SIMULATED_BLOCKS
    parser = copy_parser(__doc__.splitlines()[0], sizes="256M", simulated="1M", threads=512, blocks=blocks)
    parser.flag("--nvshmem", "measure NVSHMEM too, at the same threads and blocks")
    parser.set_defaults(timing="launch")  # a copy takes as long as a hundred launches; graphs would only cost memory
    args = parser.parse_args()
    parser.require_two_ranks("copies need")
    report = Report("large_copy", args)
    timer = join(report, args)
    library = nvshmem(report) if args.nvshmem else None
    capacity = max(args.sizes)
    ours = TilescaleNet(capacity, args.offset)
    engines: list[Implementation] = [CopyEngine(ours)] if timer.on_gpu and tsn.world().topology.is_direct(1) else []
    others = [Nvshmem(capacity, library, args.offset)] if library else []
    compare(report, args, [*engines, ours, *others], timer, reference=CopyEngine.name, percent=True)
    report.finish(library)


if __name__ == "__main__":
    main()
