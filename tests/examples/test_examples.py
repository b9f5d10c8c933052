"""Every program of examples/ runs, checks its own result, and is listed."""

import os
from pathlib import Path

from tests import jobs, ranks
from tests.variants import variants

FOLDER = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py"))
RANKS = {"moe_model.py": 4}  # the others two


def test_every_example_is_listed():
    text = (FOLDER / "README.md").read_text()
    assert len(PROGRAMS) == 6 and all(f"[{name}]({name})" in text for name in PROGRAMS)


@variants(2, "name", PROGRAMS)
def test_runs_and_is_right(name):
    size = RANKS.get(name, 2)
    device = {"TSN_DEVICE": "simulator"} if ranks.gpus() < size else {}
    done = jobs.launch(str(FOLDER / name), env=os.environ | device | {"GPUS": str(size)})
    assert done.returncode == 0 and done.stdout.startswith("rank 0"), done.stderr
