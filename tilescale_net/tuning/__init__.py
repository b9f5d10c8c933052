"""Tuning of calls on the machine at hand: explicit, in lockstep on all ranks, and kept on disk.

    from tilescale_net import tuning

    print(tuning.product("matmul_all_reduce", 4096, 7168, 8192).text())
    print(tuning.moe(256, 4096, 7168, 8).text())

or `python -m tilescale_net tune`. Without it, calls take what was measured on H100s and H200s (`kernels.fused.choice`,
`kernels.moe.config`); nothing is ever searched in a call.
"""

from tilescale_net.tuning.moe import moe
from tilescale_net.tuning.products import product
from tilescale_net.tuning.search import Found, Trial

__all__ = ["Found", "Trial", "moe", "product"]
