"""`python tilescale_net/launch script.py [args]`: starts one process per rank; launch.sh calls it.

Run by path, so that neither the package nor torch is imported here. Ranks get the variables that torchrun sets (RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …). Rank 0 owns stdout and stderr; the others are heard when they fail, or always
with TSN_OUTPUT=all.
"""

import os
import sys

import environment
from job import Job


def main(arguments: list[str]) -> int:
    script = arguments[0]
    if not script.endswith(".py"):
        environment.refuse(f"{script!r} is neither a Python script (something.py) nor pytest")
    if not os.path.isfile(script):
        environment.refuse(f"there is no script {script!r} in {os.getcwd()}")
    command = [sys.executable, *arguments]
    if environment.srun_starts_ranks():
        os.environ.update(environment.srun_rank())
        os.execv(command[0], command)
    ranks = environment.whole_number("GPUS", 2, 1)
    simulated = os.environ.get("TSN_DEVICE") == "simulator"
    environment.check_ranks(ranks, 0 if simulated else environment.visible_gpus())
    return Job(command, ranks, environment.job(ranks)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
