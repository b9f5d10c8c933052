"""`python -m tilescale_net run script.py [args]`: starts one process per rank on this host.

Ranks get the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …). Rank 0 owns stdout and stderr; the
others are heard when they fail, or always with TSN_OUTPUT=all.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tilescale_net.errors import ConfigurationError
from tilescale_net.launch import environment, forking, messages
from tilescale_net.launch.job import Job
from tilescale_net.runtime import private_folder, settings, this_host

PACKAGE = Path(__file__).resolve().parents[1]


def check(arguments: list[str]) -> None:
    """Refuse what cannot run: no such script, a folder that cannot be on Python's path, wrong settings.

    It needs the standard library alone: launch.sh calls it before it installs anything.
    """
    script = _script(arguments)
    if script is not None:
        if not script.endswith(".py"):
            messages.refuse(
                f"{script!r} is neither a Python script (something.py) nor pytest; ranks and hosts are chosen by variables "
                "in front: GPUS=2 bash launch.sh script.py"
            )
        if not os.path.isfile(script):
            messages.refuse(f"there is no script {script!r} in {os.getcwd()}")
    if (folder := import_folder()) and os.pathsep in str(folder):
        messages.refuse(
            f"{PACKAGE.parent} has {os.pathsep!r} in its name, which PYTHONPATH cannot hold; rename the folder"
        )
    try:
        settings.check()
    except ConfigurationError as err:
        messages.refuse(str(err))
    for name, near in settings.misspelt_launch():
        messages.say(f"{name} has no meaning here; did you mean {near}?")
    if not environment.srun_starts_ranks():
        environment.value(settings.GPUS)


def _script(arguments: list[str]) -> str | None:
    """What is to run; None for a module (`-m`)."""
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        return None
    return arguments[0] if arguments else ""


def start(arguments: list[str]) -> int:
    """Run a script (or `-m module`) with its arguments on the ranks that the environment requests; the exit code."""
    check(arguments)
    if folder := import_folder():
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    os.environ.update(private_folder.for_tilelang())
    imports = _imports_the_package(arguments)
    if imports and (missing := this_host.missing_native()):
        messages.refuse(missing)
    command = [sys.executable, *arguments]
    if environment.srun_starts_ranks():
        os.environ.update(environment.srun_rank())
        os.execv(command[0], command)
    ranks = environment.value(settings.GPUS)
    gpus = 0 if settings.DEVICE.get() == "simulator" else environment.visible_gpus()
    environment.check_ranks(ranks, gpus)
    shared = environment.job(ranks)
    forked = not gpus and imports and forking.preload(shared)
    try:
        forking.status = Job(command, ranks, shared, forking.Process if forked else subprocess.Popen).run()
        return forking.status
    except forking.BecomeRank as rank:
        program = rank
    program.run()
    return 0


def _imports_the_package(arguments: list[str]) -> bool:
    """Whether the ranks of a script will import what they can share; a script that prints its usage imports nothing."""
    script = _script(arguments)
    if script is None or not {"-h", "--help"}.isdisjoint(arguments):
        return False
    text = Path(script).read_bytes()
    return b"tilescale_net" in text or b"tilelang" in text


def import_folder() -> Path | None:
    """The checkout's root, for the ranks' PYTHONPATH; None where the package is installed."""
    root = PACKAGE.parent
    return root if (root / "launch.sh").is_file() else None


# Flags of `run`, each of which is a variable that launch.sh reads.
FLAGS = {
    "--ranks": ("GPUS", "N", "ranks on this host: one per GPU, or simulated ones where there is no GPU (2)"),
    "--virtual-nodes": ("VIRTUAL_NODES", "N", "split them into nodes that may only talk through the fabric (1)"),
    "--nodes": ("NODES", "N", "hosts of the job (1); run the same line on every host"),
    "--node-rank": ("NODE_RANK", "I", "this host's index"),
    "--master-addr": ("MASTER_ADDR", "HOST", "name or address of the host with index 0"),
    "--master-port": ("MASTER_PORT", "PORT", "where rank 0 listens (29500 where there are several hosts)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `run` to a parser."""
    for flag, (variable, metavar, text) in FLAGS.items():
        names = ["-n", flag] if flag == "--ranks" else [flag]
        parser.add_argument(*names, dest=variable, metavar=metavar, help=f"{text}; as {variable}=")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module instead of a script")
    parser.add_argument("script", help="Python script, or module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Start what the parsed flags of `add_arguments` request; the job's exit code."""
    messages.program = "tilescale_net run"
    for variable, _, _ in FLAGS.values():
        value = getattr(args, variable)
        if value is not None:
            os.environ[variable] = value
    return start([*(["-m"] if args.module else []), args.script, *args.arguments])
