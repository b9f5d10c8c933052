"""Imported by the server that tests/ranks.py forks simulated ranks from: libfabric looks for its providers once.

That takes 0.1 s of a processor in each rank: it reads all symbols of the Linux kernel. Not imported by the server of jobs.py,
whose launchers may name the stand-in for EFA, which must be there before libfabric looks.
"""

import contextlib
import os

from tilescale_net.runtime import fabric

# EFA opens devices then, which ranks cannot share.
if not (os.environ.get("TSN_LIBFABRIC") or os.environ.get("TSN_PROVIDER")):
    with contextlib.suppress(Exception):  # a rank that needs libfabric reports why there is none
        fabric.offers()
