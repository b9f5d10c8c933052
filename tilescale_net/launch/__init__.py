"""Starts the ranks of a job on one host: behind `launch.sh` and `python -m tilescale_net run`.

docs/decisions.md says why there is a launcher beside torchrun. It restarts nothing, and imports nothing but the standard
library and the table of settings.
"""

import sys
from typing import NoReturn

program = "launch.sh"  # the launcher's name in its messages


def say(text: str) -> None:
    """Print a line to stderr that names the launcher."""
    print(f"{program}: {text}", file=sys.stderr, flush=True)


def refuse(text: str) -> NoReturn:
    """End with exit code 2, the code of wrong arguments."""
    say(text)
    raise SystemExit(2)
