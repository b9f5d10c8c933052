"""Messages of the launcher, under the name that it was called by."""

import sys
from typing import NoReturn

program = "launch.sh"


def say(text: str) -> None:
    """Print a line to stderr that names the launcher."""
    print(f"{program}: {text}", file=sys.stderr, flush=True)


def refuse(text: str) -> NoReturn:
    """End with exit code 2, the code of wrong arguments."""
    say(text)
    raise SystemExit(2)
