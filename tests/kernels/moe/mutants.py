"""Kernels of mixture of experts without a line of their synchronisation, and what must fail then.

A file of tests may have `MUTANTS` of its own, of the same form: for each name a `MoeMutant`.
"""

import importlib.util
import sys
from typing import NamedTuple

from tests.kernels.moe.test_rounds import in_a_row, rounds, weights_at_combine
from tilescale_net.kernels.moe import Tuning

ROUNDS = 2
SHAPE = dict(num_experts=4, max_tokens=7, hidden=64, top_k=3)
TUNING = Tuning(blocks=2, threads=32, combine_threads=32, chunk=2)

EXPERT = (rounds, dict(tuning=TUNING), dict(again=True))
RANK = (rounds, dict(layout="rank", tuning=TUNING), dict(again=True))
LATENCY = (rounds, dict(mode="latency", tuning=TUNING), dict())
WEIGHTS = (weights_at_combine, dict(mode="latency", tuning=TUNING), dict())
ROW = (in_a_row, dict(tuning=TUNING), dict())


class MoeMutant(NamedTuple):
    """A kernel without a line of its synchronisation, and what must fail then.

    Attributes:
        file: in tilescale_net/kernels/moe, without its ending.
        text: to leave out, or that and what takes its place.
        case: function of test_rounds.py, options of the AllToAll, and how it is used.
        nodes: 2 for four ranks on two nodes, else two ranks.
    """

    file: str
    text: str | tuple[str, str]
    case: tuple
    nodes: int = 1


def unfenced(signal: str) -> tuple[str, str]:
    """A call of `signal_warp`, and the same without a fence."""
    return signal, signal.removesuffix(")") + ", fence=False)"


def left_out(text: str) -> tuple[str, str]:
    """A text that both forms of a kernel have, and what takes its place."""
    return text, "pass"


MUTANTS = {
    "plan without wait for records": MoeMutant(
        "routing",
        'N.wait(records_ready[thread], "ge", call * T.uint64(blocks + absent))',
        EXPERT,
    ),
    "dispatch without wait for room": MoeMutant(
        "dispatch",
        left_out("handshake.open_call(ready, active, status, me, call, tag, block, senders, thread)"),
        ROW,
    ),
    "dispatch without wait for rows": MoeMutant(
        "dispatch", left_out('N.wait_warp(arrived[peer, c], "ge", call)'), EXPERT
    ),
    "dispatch without fence": MoeMutant(
        "dispatch", unfenced("N.signal_warp(mem.arrived[me, chunk.c], call, chunk.peer)"), EXPERT
    ),
    "combine without wait for rows": MoeMutant(
        "combine",
        'N.wait(mem.arrived[peer, slot // size], "ge", now.call)',
        EXPERT,
    ),
    "combine without fence": MoeMutant("combine", unfenced("N.signal_warp(arrived[me, c], call, peer)"), RANK),
    "weights without wait": MoeMutant("latency_combine", 'N.wait_block(sent[parity * R + peer], "ge", call)', WEIGHTS),
    "latency without wait for messages": MoeMutant(
        "latency_dispatch", 'N.wait_warp(arrived[index], "ge", call)', LATENCY
    ),
}


def mutant(source: str, text: str | tuple[str, str]) -> str:
    """The kernel's file with its text left out, or with what takes its place; each time that the latter is there."""
    if isinstance(text, tuple):
        assert text[0] in source, f"the text to replace is not there: {text[0]}"
        return source.replace(*text)
    assert source.count(text) == 1, f"the text to leave out is there {source.count(text)} times: {text}"
    return source.replace(text, "pass")


def run(module: str, path: str, seed: int, test, options: dict, how: dict) -> None:
    """A test on this rank with the kernel of the file at `path` in the place of the original."""
    if path:
        name = f"tilescale_net.kernels.moe.{module}"
        original = sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = mutant = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(mutant)
        # Whoever has imported the original, or something of it, takes the mutant's: kernels their steps as well.
        instead = {id(original): mutant} | {id(old): vars(mutant)[what] for what, old in vars(original).items()}
        for user in [m for n, m in sys.modules.items() if n.startswith("tilescale_net.kernels.moe")]:
            for what, old in [*vars(user).items()]:
                if not what.startswith("__") and id(old) in instead:
                    setattr(user, what, instead[id(old)])
    test(seed, SHAPE, options, how, ("random", "masked", "random", "one rank") * ROUNDS)
