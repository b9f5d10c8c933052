"""What the blocks beside a product have not sent is sent, and summed, when the product has ended."""

import random
from unittest import mock

import tilescale_net as tsn
from tests import ranks
from tests.kernels.fused.test_expert_matmul import TUNING, layers
from tilescale_net.kernels.moe.throughput import ThroughputMode


def _sent_behind(seed):
    """The blocks beside the product send all or nothing, as when they are slow; the kernel that sums finds the rest."""
    pace = random.Random(f"{seed} {tsn.rank()}")

    def receive(mode, pending):
        if pending.sums is None:
            return mode._stream.wait(pending.rest)
        sending, taken = mode._fixed["combine"]["tickets"][:, 0], pace.choice((0, 1 << 20))
        sending.fill_(taken)
        mode._stream.wait(pending.rest)
        if taken:
            sending.zero_()
        pending.sums()

    with mock.patch.object(ThroughputMode, "receive", receive):
        layers(seed, dict(tuning=TUNING), False, ("random", "twice", "one expert"))


def test_all_multiprocessors_send_what_is_left():
    ranks.run(2, _sent_behind, random.randrange(1 << 30), timeout=300)
