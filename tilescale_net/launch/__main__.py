"""`python tilescale_net/launch script.py [args]`: the launcher of a checkout, called by launch.sh, by path.

`--check script.py [args]` only reports what could not run, before anything is installed.
"""

import sys
from pathlib import Path

# Replaces this folder, which Python puts there.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from tilescale_net.launch import run  # noqa: E402

if sys.argv[1:2] == ["--check"]:
    run.check(sys.argv[2:])
else:
    sys.exit(run.start(sys.argv[1:]))
