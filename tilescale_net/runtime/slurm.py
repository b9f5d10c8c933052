"""What Slurm's variables say of this process: a task of srun, or a shell or script in an allocation, which is none.

Shells and batch scripts have the variables of task 0 and SLURM_NTASKS of the whole allocation. Only srun sets those of a
step, and what runs in an allocation may hand on those of the step around it.
"""

import os
from pathlib import Path

# Steps that hold a shell, a batch script or what Slurm runs for itself, by their numbers.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def tasks() -> int:
    """Number of tasks of the srun step that this process is a task of; 1 where srun started no others beside it."""
    env = os.environ
    if "SLURM_PROCID" not in env or _number("SLURM_STEP_ID") >= _FIRST_RESERVED_STEP or _is_in_shell():
        return 1
    return max(1, _number("SLURM_STEP_NUM_TASKS"))


def nodes() -> int:
    """Number of hosts of that step."""
    return max(1, _number("SLURM_STEP_NUM_NODES") or _number("SLURM_NNODES"))


def step() -> str:
    """Job and step, as text that is equal on all tasks of the step and on no other; '' where Slurm does not say."""
    job, number = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    return f"{job}.{number}" if job and number and "SLURM_HET_SIZE" not in os.environ else ""


def promised() -> str | None:
    """That the allocation has more tasks than were started; None where it has not."""
    if "SLURM_PROCID" not in os.environ or tasks() > 1 or (count := _number("SLURM_NTASKS")) < 2:
        return None
    return (
        f"srun did not start this process, so it is a job of one rank, though SLURM_NTASKS={count}: start it by srun, or "
        "by launch.sh, whose GPUS is the number of ranks on this host"
    )


def _is_in_shell() -> bool:
    """Whether a user typed the command in a shell that `srun --pty` started, be it as one task of several."""
    task = os.environ.get("SLURM_TASK_PID", "")
    if "SLURM_PTY_PORT" not in os.environ or not task.isdigit() or int(task) == os.getpid() or not os.isatty(0):
        return False
    try:
        program, *options = Path(f"/proc/{task}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return False
    return bool(program) and all(option.startswith(b"-") and option != b"-c" for option in options)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
