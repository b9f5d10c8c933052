"""Starts the ranks of a job on one host: behind `launch.sh` and `python -m tilescale_net run`.

torchrun works as well (ranks read the variables that it sets), and so does srun. There is a launcher of our own because

- it names the rank that failed first, not the ones that noticed, with its last words and the signal that killed it;
- it ends everything that a rank has started, when the job ends, is interrupted, or the launcher itself is killed;
- rank 0 keeps the terminal (progress lines, Ctrl-C once), the others are heard when they fail;
- it handles simulated GPUs, VIRTUAL_NODES and wrong settings before any rank starts, and starts without importing
  torch, which takes torchrun some seconds.

It restarts nothing: elastic jobs belong to torchrun.

This folder imports nothing but the standard library and the table of settings.
"""
