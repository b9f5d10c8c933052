"""Reading the compiler's output."""

import re


def read_only_loads(ptx: str) -> list[str]:
    """Loads through the read-only cache that the compiler chose: stale where a peer writes.

    The device headers load a few words of the context like that, which nobody writes while a kernel runs; inline
    assembly, which is theirs alone, does not count.
    """
    own = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.S)
    return re.findall(r"ld\.global\.nc\S*|ldu\.\S+", own)
