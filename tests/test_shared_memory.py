"""The check for files in /dev/shm judges the run's own processes and no others."""

import os
import subprocess
import sys
import time

from tests import shared_memory

MAKE = "import os, sys; open(f'/dev/shm/{os.getpid()}:test', 'w').close(); print(os.getpid(), flush=True); sys.stdin.read()"


def _maker(**env):
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip() + ":test"


def test_only_files_of_processes_that_were_started_here_count():
    with shared_memory.Watch() as watch:
        ours, our_name = _maker(**os.environ)
        other, other_name = _maker(PATH=os.environ["PATH"])
        try:
            time.sleep(1)
            assert watch.left() == set()  # their makers still run
            for process in (ours, other):
                process.communicate(timeout=30)
            assert watch.left() == {our_name}
            watch.forget({our_name})
            assert watch.left() == set()
        finally:
            for process, name in ((ours, our_name), (other, other_name)):
                process.kill()
                process.wait()
                os.unlink(os.path.join(shared_memory.FOLDER, name))
