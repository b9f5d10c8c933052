"""Locks of files: one holder at a time, which is not waited for when it is stopped."""

import os
import signal
import subprocess
import sys
import threading
import time

from tilescale_net.runtime import this_host

HOLDER = """
import sys, time
from tilescale_net.runtime import this_host
lock = this_host.lock_file(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_holder_that_is_stopped_is_not_waited_for(tmp_path):
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        taken = []
        waiter = threading.Thread(target=lambda: taken.append(this_host.lock_file(path)))
        waiter.start()
        waiter.join(3)
        assert waiter.is_alive(), "a holder that runs is waited for"
        os.kill(holder.pid, signal.SIGSTOP)
        begin = time.monotonic()
        waiter.join(30)
        assert taken and 2 <= time.monotonic() - begin
        taken.pop().close()
        os.kill(holder.pid, signal.SIGCONT)
        holder.stdin.close()
        holder.wait()
        this_host.lock_file(path).close()  # free at once
        assert path.read_text().split() == [str(word) for word in this_host.own_process()]
