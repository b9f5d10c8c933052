"""Reading the compiler's output."""

import re


def read_only_loads(ptx: str) -> list[str]:
    """Loads through the read-only cache that the compiler chose: stale where a peer writes.

    The device headers load a few words of the context like that, which nobody writes while a kernel runs; inline
    assembly, which is theirs alone, does not count.
    """
    own = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.S)
    return re.findall(r"ld\.global\.nc\S*|ldu\.\S+", own)


def loads_behind_loads(ptx: str) -> list[str]:
    """Loads before the first label of a kernel whose address was itself loaded: nothing says that it is one.

    The compiler moves loads through the read-only cache ahead of the conditions that guard them.
    """
    entry = ptx[ptx.index(".entry") :]
    start = entry[: re.search(r"^\$L\w+:", entry, re.M).start()] if "$L" in entry else entry
    loaded: set[str] = set()
    found = []
    for line in start.splitlines():
        target, *sources = re.findall(r"%\w+", line) or [""]
        load = "ld.global.nc" in line
        if load and loaded & set(sources):
            found.append(line.strip())
        if load or loaded & set(sources):
            loaded.add(target)
        else:
            loaded.discard(target)
    return found
