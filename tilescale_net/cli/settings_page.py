"""`python -m tilescale_net settings`: the table of settings as the page docs/settings.md."""

from tilescale_net.runtime.setting import Setting
from tilescale_net.runtime.settings import SECTIONS

HEAD = """# Settings
Environment variables; a wrong value is an error that names the variable, and so is a name that begins with TSN_ and is none
of these. All ranks of a job should see the same ones. `python -m tilescale_net settings` prints this page, which is made from the table in
`tilescale_net/runtime/settings.py`.
"""

CHAOS_FIELDS = {
    "seed": "of the random numbers (1)",
    "reorder": "probability that an operation or an arrival is held back, so that later ones overtake it",
    "delay_us": "the longest that anything is held back, in microseconds (100)",
    "split": "probability that a write travels in several pieces, which arrive in any order",
    "eagain": 'probability that a post is answered with "try again"',
    "depth": "outstanding operations of an endpoint",
    "max_write": "bytes of the largest transfer",
    "imm_bits": "width of immediates (32)",
    "error": "probability that an operation fails",
    "error_after": "number of the operation from which on all fail",
    "error_code": "with which operations fail (5, EIO); 104 (ECONNRESET) is what a process that is gone looks like",
    "stall_after": "number of the operation from which on nothing moves any more, as with a dead peer",
}

NOTES = {
    "Network": "\n".join(
        [
            "`TSN_CHAOS=on`, or some of these, comma-separated, such as `seed=7,reorder=0.3,delay_us=200`:",
            "",
            "| field | meaning |",
            "| --- | --- |",
            *(f"| `{name}` | {text} |" for name, text in CHAOS_FIELDS.items()),
            "",
            "`on` stands for `seed=1,reorder=0.3,split=0.2,eagain=0.1`.",
        ]
    ),
    "Simulator": "One seed makes a different schedule of every launch and every rank, and the same ones again in the next run.",
    "Launcher and build": (
        "`bash launch.sh script.py` and `python -m tilescale_net run script.py` read the first six; flags of `run` stand for "
        "most of them. Without them ranks read what torchrun, srun or mpirun set."
    ),
}


def _table(rows: tuple[Setting, ...]) -> list[str]:
    lines = ["| variable | meaning | default |", "| --- | --- | --- |"]
    return lines + [f"| `{row.name}` | {row.meaning} | {row.shown} |".replace("|  |", "| |") for row in rows]


def page() -> str:
    """docs/settings.md."""
    parts = [HEAD]
    for title, rows in SECTIONS.items():
        parts.append("\n".join([*([f"## {title}"] if title else []), *_table(rows)]) + "\n")
        if title in NOTES:
            parts.append(NOTES[title] + "\n")
    return "\n".join(parts)
