"""Starts the ranks of a job on one host: behind `launch.sh` and `python -m tilescale_net run`.

torchrun works as well (ranks read the variables that it sets), and so does srun. There is a launcher of our own because

- it names the rank that failed first, not the ones that noticed, with its last words and the signal that killed it;
- it ends everything that a rank has started, when the job ends, is interrupted, or the launcher itself is killed;
- rank 0 keeps the terminal (progress lines, Ctrl-C once), the others are shown when they fail;
- it handles simulated GPUs, VIRTUAL_NODES and wrong settings before any rank starts, and starts without importing
  torch, which takes torchrun some seconds.

It restarts nothing: elastic jobs belong to torchrun.

This folder imports nothing but the standard library and the table of settings.
"""

import sys
from typing import NoReturn

program = "launch.sh"  # the name that the launcher was called by, which begins its messages


def say(text: str) -> None:
    """Print a line to stderr that names the launcher."""
    print(f"{program}: {text}", file=sys.stderr, flush=True)


def refuse(text: str) -> NoReturn:
    """End with exit code 2, the code of wrong arguments."""
    say(text)
    raise SystemExit(2)
