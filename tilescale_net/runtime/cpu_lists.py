"""Lists of CPUs as Linux writes them, and as settings take them."""

from tilescale_net.errors import ConfigurationError

_CPUS = 1 << 16  # more than any machine has


def cpus(value: str, name: str) -> str | list[int]:
    """CPUs such as `2,3` or `4-7`, or the word `node`."""
    if value == "node":
        return value
    return cpu_list(value, name)


def cpu_list(value: str, name: str) -> list[int]:
    """CPUs as Linux writes them: `2,3`, `4-7`."""
    found: list[int] = []
    try:
        for part in value.split(","):
            first, _, last = part.partition("-")
            some = range(int(first), int(last or first) + 1)
            if not some or some[-1] >= _CPUS:
                raise ValueError
            found += some
    except ValueError:
        raise ConfigurationError(f"{name}={value!r} is not a list such as 2,3 or 4-7") from None
    return found
