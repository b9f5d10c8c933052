"""What the system reports of processes of this host."""


def is_stopped(pid: int | None) -> bool:
    """Whether a process exists and is stopped, by SIGSTOP or a debugger; False for None."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
