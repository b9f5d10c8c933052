"""Reading the compiler's output."""

import re


def read_only_loads(ptx: str) -> list[str]:
    """Loads through the read-only cache that the compiler chose: stale where a peer writes.

    The device headers load a few words of the context like that, which are not written while a kernel runs; inline
    assembly, which is theirs alone, does not count.
    """
    own = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.S)
    return re.findall(r"ld\.global\.nc\S*|ldu\.\S+", own)


def loads_behind_loads(ptx: str) -> list[str]:
    """Loads before the first label of a kernel whose address was itself loaded: it may be no address.

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


def polling_loops(ptx: str) -> list[str]:
    """Bodies of the innermost loops that load with acquire order at system scope."""
    labels = {m[1]: m.start() for m in re.finditer(r"^(\$L\w+):", ptx, re.M)}
    loops = [(labels[m[1]], m.start()) for m in re.finditer(r"bra(?:\.uni)?\s+(\$L\w+);", ptx) if m[1] in labels]
    loops = [(start, end) for start, end in loops if start < end and "ld.acquire.sys" in ptx[start:end]]
    return [ptx[a:b] for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
