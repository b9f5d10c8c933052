"""Coverage of the proof, from the rules of the race detector and of the exploration.

`python -m tilescale_net.explore.coverage` rewrites the section of docs/simulator.md.
"""

import re
from pathlib import Path

from tilescale_net import _simulator

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"
_BEGIN, _END = "<!-- made by python -m tilescale_net.explore.coverage -->", "<!-- end of the rules -->"


def section() -> str:
    """The tables of the section, as Markdown."""
    lines = [_BEGIN]
    titles = "The race detector (`TSN_SIM_RACES=1`)", "Every schedule (`python -m tilescale_net check`)"
    for title, of_schedules in zip(titles, (False, True)):
        lines += ["", f"| {title} | followed | not followed | named |", "| --- | --- | --- | --- |"]
        for rule in _simulator.rules():
            if rule["of_schedules"] == of_schedules:
                cells = rule["what"], rule["followed"], rule["not_followed"] or "nothing", "named" * rule["named"]
                lines.append(f"| {' | '.join(map(_code, cells))} |")
    return "\n".join([*lines, "", _END])


def _code(text: str) -> str:
    """Format names of functions and options as code."""
    return re.sub(
        r"\b(?:N|T|tsn|torch)\.[a-z_.]+\*?|\b[a-z_]+\(\)|--[a-z-]+|__[a-z]+", lambda name: f"`{name[0]}`", text
    )


def of_page(text: str) -> str:
    """The section of a page; "" without one."""
    found = re.search(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", text, re.DOTALL)
    return found[0] if found else ""


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(page.replace(of_page(page), section()))
