"""Every kernel that is shipped, entered once in each table: small runs, mutants, arguments to compile it with for sm_90.

`RUNS`: test_races.py runs them under many seeds and on many networks, test_sweep.py with each synchronisation of the files
that they name left out. Blocks have two warps or more wherever a kernel allows it, so that threads of a block can race.
`MUTANTS`: test_sweep.py runs them; the data must show them. `SM_90`: test_generated_code.py compiles them.
"""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import tilescale_net as tsn


def file_of_tests(name: str):
    """A file of tests, by what follows "test_"; imported by the runs that need it, which takes longer than most runs."""
    folder, _, name = name.rpartition("/")
    return importlib.import_module(".".join(["tests.kernels", *filter(None, [folder]), f"test_{name}"]))


def module_of(file: str) -> str:
    """The module of a file that RUNS names."""
    return ("tests.kernels." if file.startswith("examples/") else "tilescale_net.kernels.") + file.replace("/", ".")


def forget_kernels(forgotten: Callable[[str], bool] = lambda name: True) -> None:
    """Let this rank import kernels anew, and what tests have made of them: one of them is to be another.

    Args:
        forgotten: whether a module of the kernels is; all by default.
    """
    names = [n for n in sys.modules if n.startswith("tilescale_net.kernels") and forgotten(n)]
    for name in sorted([*names, *(n for n in sys.modules if n.startswith("tests.kernels"))]):
        parent, _, child = name.rpartition(".")
        if hasattr(sys.modules.get(parent), child):  # `from parent import child` looks there first
            delattr(sys.modules[parent], child)
        del sys.modules[name]


# -- small runs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A small run.

    Attributes:
        files: of tilescale_net/kernels, or examples/…, whose kernels it runs and whose mutants it shall show.
        run: function of a seed, called on every rank.
        one_node: needs mapped peers, or runs another kernel across nodes.
        two_ranks: is for two ranks alone.
    """

    files: tuple[str, ...]
    run: Callable[[int], None]
    one_node: bool = False
    two_ranks: bool = False


GEOMETRY = dict(threads=64, blocks=2)
MOE = dict(num_experts=4, max_tokens=7, hidden=64, top_k=3)
TUNING = dict(blocks=2, threads=64, combine_threads=64, chunk=2)
ROUTINGS = ("random", "masked", "one rank")
PARTS = [((1_001,), torch.bfloat16, 2, 0), ((300,), torch.float32, 4, 4)]
SUMS = [((1000,), torch.bfloat16, 0, 0, True), ((77,), torch.float32, 0, 0, True)]
# In the second a block has nothing to do.
SUMS_OF_NODES = [((3000,), torch.bfloat16, 0, 0), ((40,), torch.bfloat16, 0, 0)]
PAIR = [(30, (5,), torch.bfloat16, 2, 0)]
MANY = dict(threads=32, blocks=2)
FP8 = torch.float8_e4m3fn


def _of(file: str, function: str, *args):
    """A run: a function of a file of tests, called with the seed and the arguments."""
    return lambda seed: getattr(file_of_tests(file), function)(seed, *args)


def _moe(function: str, options: dict, *rest, shape: dict = MOE, **tuning):
    """The same of moe/test_rounds.py, with an AllToAll of few blocks."""

    def run(seed: int) -> None:
        from tilescale_net.kernels.moe import Tuning

        tuned = dict(options, tuning=Tuning(**TUNING | tuning))
        getattr(file_of_tests("moe/rounds"), function)(seed, shape, tuned, *rest)

    return run


def _all(*runs):
    def run(seed: int) -> None:
        for one in runs:
            one(seed)

    return run


def _example(name: str, seed: int) -> None:
    importlib.import_module(f"tests.kernels.examples.{name}").small_run(seed)


def _copies(direction: str, count: int = 3000, **way):
    return _of("p2p", "_copies", direction, way, [(count, 2, 1, 3)])


def _experts(seed: int) -> None:
    of = file_of_tests("fused/expert_matmul")
    importlib.import_module("tests.kernels.fused.counted").counted(seed)
    of.fed(seed)
    # The copying warp may begin with several tiles before the first is multiplied: all of k is less than its stages.
    of.fed(seed, 16, dataclasses.replace(of.SMALL, stages=4), 1)
    of.fed_combine(seed)
    of.layers(seed, dict(tuning=of.TUNING), False, ("random", "one expert"))


def _scaled(seed: int) -> None:
    of = file_of_tests("fused/scaled_gemm")
    of.gemms(seed, True, dataclasses.replace(of.TILINGS[0], steps=2), k=400, alone=False)
    # The copying warp is stages ahead, and tiles have several steps.
    in_turn = dataclasses.replace(of.TILINGS[0], stages=3, in_turn=True, low_tiles=False)
    of.gemms(seed, True, in_turn, 40, 72, 400, alone=False)
    file_of_tests("fused/swiglu").test_equals_torch()
    file_of_tests("fused/expert_gradient").of_random_experts(seed, torch.bfloat16)
    of.fed(seed)
    # Beside a dispatch, and before a combine that begins late.
    of.beside(seed, lates=(0.5,), inner=80, tokens=12)


def _over_nodes(seed: int) -> None:
    """By name, since few bytes would go through `buffered`."""
    topology = tsn.world().topology
    way = "push" if topology.nodes == topology.size else "pull"
    options = dict(GEOMETRY, chunk_bytes=512, slots=2, algorithm=way)
    file_of_tests("reduce_scatter")._reduce(seed, SUMS_OF_NODES, options, 3)


def _messages(seed: int) -> None:
    file_of_tests("send_recv")._messages(seed)
    if tsn.size() == 2:
        file_of_tests("send_recv")._numbers_begin_anew()


_gathered = functools.partial(_of, "fused/all_gather_matmul", "_products")
EXCHANGE = ("exchange", "collective")
GATHER_MATMUL = ("fused/all_gather_matmul", "fused/gemm")
THROUGHPUT = ("moe/handshake", "moe/routing", "moe/dispatch", "moe/combine")
LATENCY = ("moe/handshake", "moe/latency_dispatch", "moe/latency_combine")
RUNS = {
    "copies": Run(
        ("p2p",),
        _all(
            _copies("push", threads=64, blocks=4, partition="interleaved", chunk=1024),
            _copies("push", threads=96, blocks=3),
            _copies("push", 20_000, threads=64, blocks=4, partition="dynamic", chunk=4096),
            _copies("pull"),
            _of("p2p", "_ping_pong", 64),
            _of("p2p", "_meetings"),
        ),
        two_ranks=True,
    ),
    "writes by the proxy": Run(("proxy_write",), _of("p2p", "_writes"), two_ranks=True),
    "all-gather": Run(
        (*EXCHANGE, "all_gather"),
        _of("all_gather", "_gather", PARTS, dict(GEOMETRY, chunk_bytes=512, algorithm="puts"), 3),
    ),
    "all-gather, many calls": Run(
        (),
        _of("all_gather", "_gather", [((2_000,), torch.float32, 0, 0), PARTS[1]], dict(MANY, algorithm="puts"), 24),
        two_ranks=True,
    ),
    "all-gather by stores": Run(
        EXCHANGE,
        _of("all_gather", "_gather", [((1_000,), torch.float32, 0, 0)], dict(GEOMETRY, algorithm="stores"), 3),
        one_node=True,
    ),
    # Over nodes through an inbox; on one by packets.
    "few bytes": Run(
        ("buffered", "packets"),
        _all(
            _of("all_gather", "_gather", PARTS, GEOMETRY, 4),
            _of("all_to_all", "_equal", PAIR, GEOMETRY, 4),
            _of("reduce_scatter", "_reduce", PARTS[:1], GEOMETRY, 4),
            _of("all_reduce", "_reduce", SUMS[:1], dict(GEOMETRY, staging_bytes=4096), 3),
        ),
    ),
    "all-to-all": Run(EXCHANGE, _of("all_to_all", "_equal", PAIR, dict(GEOMETRY, algorithm="puts"), 3)),
    "all-to-all, uneven": Run(("all_to_all",), _of("all_to_all", "_uneven", 4, GEOMETRY, (129,), torch.uint8, False)),
    "all-to-all, uneven, many calls": Run((), _of("all_to_all", "_uneven", 24, MANY, (40,), torch.float32, False)),
    "reduce-scatter": Run(
        ("reduce_scatter",),
        _of("reduce_scatter", "_reduce", PARTS[:1], dict(GEOMETRY, chunk_bytes=512, slots=2, algorithm="push"), 3),
    ),
    "reduce-scatter by pull": Run(
        ("collective", "reduce_scatter"),
        _of("reduce_scatter", "_reduce", [((1000,), torch.bfloat16, 0, 0)], dict(GEOMETRY, algorithm="pull"), 3),
        one_node=True,
    ),
    "all-reduce": Run(
        ("collective", "all_reduce_push", "packets", "all_reduce_two_shot"),
        _of("all_reduce", "_reduce", SUMS, GEOMETRY, 3, "all"),
        one_node=True,
    ),
    # A warp has several chunks, and two ranks several launches.
    "all-reduce by FP8": Run(
        ("all_reduce_fp8",),
        _of(
            "all_reduce", "_reduce", [((18_000,), torch.bfloat16, 0, 0, False)], dict(threads=64, blocks=1), 2, ("fp8",)
        ),
        one_node=True,
    ),
    "all-reduce across nodes": Run((), _of("all_reduce", "_reduce", SUMS, dict(GEOMETRY, staging_bytes=4096))),
    "reduce-scatter across nodes": Run(("reduce_scatter",), _over_nodes),
    "broadcast": Run(("broadcast",), _of("broadcast", "small_run")),
    "all-reduce and norm": Run(
        ("all_reduce_norm",),
        _all(
            _of("all_reduce_norm", "_layers", torch.bfloat16, 520),
            _of("all_reduce_norm", "_layers", torch.bfloat16, 8192, 6),  # rows of a call in several steps
        ),
        one_node=True,
    ),
    "all-reduce and norm across nodes": Run((), _of("all_reduce_norm", "_layers", torch.bfloat16, 96, 3)),
    "all-reduce and what surrounds it": Run(
        ("all_reduce_norm",), _of("all_reduce_norm", "_forms", torch.bfloat16, 256), one_node=True
    ),
    "attention merge": Run(
        ("attention_merge",),
        _all(_of("attention_merge", "merges", False, False, 4), _of("attention_merge", "merges", True, True, 4)),
        one_node=True,
    ),
    "attention merge across nodes": Run((), _of("attention_merge", "merges", False, True, 3)),
    "all-to-all, transposed": Run(
        ("all_to_all_transposed",), _all(_of("broadcast", "_transposed"), _of("broadcast", "_uneven"))
    ),
    "all-gather and matmul": Run(
        GATHER_MATMUL,
        _all(
            _gathered(72, 48, 40, torch.bfloat16, False, 3, 4),
            _gathered(72, 48, 48, FP8, True, 3, 4),
            _gathered(72, 16, 40, torch.bfloat16, False, 2, 4),  # tiles of a single step
        ),
    ),
    "all-gather and matmul, pipelined": Run(
        GATHER_MATMUL[:1],
        _all(_gathered(72, 48, 40, torch.bfloat16, False, 3, None), _gathered(72, 48, 48, FP8, True, 2, None)),
    ),
    "matmul and reduce-scatter": Run(
        ("fused/matmul_reduce_scatter", "fused/gemm"),
        _of("fused/matmul_reduce_scatter", "_sums", 72, 48, 40, torch.bfloat16, False, 3, 4),
    ),
    "matmul and all-reduce": Run(
        ("fused/matmul_all_reduce", "fused/gemm"), _of("fused/matmul_all_reduce", "_sums", 72, 48, 40, False, 3, 4)
    ),
    "MoE and its products": Run(("fused/expert_matmul", "moe/tiles", "moe/routing", "moe/combine"), _experts),
    "scaled GEMMs": Run(("fused/scaled_gemm", "fused/swiglu", "fused/expert_gradient"), _scaled, two_ranks=True),
    "send and receive": Run(("send_recv",), _messages, two_ranks=True),
    "MoE by expert": Run(THROUGHPUT[1:], _moe("rounds", dict(alignment=2), {}, ROUTINGS)),
    # Across nodes each row to each of its ranks.
    "MoE, once per rank": Run(
        ("moe/dispatch",), _moe("rounds", dict(alignment=2), {}, ("random",), once_per_node=False)
    ),
    # More choices of a block than its threads are: each warp numbers two groups of 32.
    "MoE, many choices": Run(
        ("moe/routing",),
        _moe("rounds", dict(layout="rank"), {}, ("one rank", "random"), shape=dict(MOE, max_tokens=96, hidden=16)),
    ),
    "MoE by rank": Run(THROUGHPUT, _moe("rounds", dict(layout="rank"), dict(again=True), ROUTINGS)),
    "MoE, dispatches in a row": Run(("moe/dispatch",), _moe("in_a_row", dict())),
    "MoE latency": Run(LATENCY, _moe("rounds", dict(mode="latency"), {}, ROUTINGS)),
    # Rows and scales of a combine are two puts with one signal.
    "MoE latency, quantised": Run(
        LATENCY[2:],
        _moe("rounds", dict(mode="latency", quantize_combine="always"), {}, ("random",), shape=dict(MOE, hidden=128)),
    ),
    "MoE latency, weights at combine": Run(LATENCY[2:], _moe("weights_at_combine", dict(mode="latency"), ROUTINGS)),
    "MoE in an arena": Run(("moe/buffers",), _of("moe/arena", "_by_turns", 4, False)),
    "MoE by rank, rejected": Run(("moe/routing",), _moe("rejected", dict(layout="rank"))),
    "MoE latency, rejected": Run((LATENCY[0], LATENCY[2]), _moe("rejected", dict(mode="latency"))),
}
EXAMPLES = sorted(p.stem for p in Path(__file__).with_name("examples").glob("*.py") if "def small_run" in p.read_text())
RUNS |= {
    f"example {name}": Run(
        (f"examples/{name}",), functools.partial(_example, name), name in ("mailbox", "matmul_atomics", "stealing")
    )
    for name in EXAMPLES
}


# -- mutants ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A kernel without a line of its synchronisation, whose data must be wrong, or which must stand still.

    Attributes:
        file: in tilescale_net/kernels, without its ending.
        old, new: text, which the file has, and what takes its place wherever it stands.
        run: the small run that shows it.
        nodes: 2 for four ranks on two nodes, else two ranks on one.
        nightly: others like it run with every change.
    """

    file: str
    old: str
    run: str
    new: str = "pass"
    nodes: int = 1
    nightly: bool = True


def _unfenced(file: str, signal: str, run: str, nodes: int = 1) -> Mutant:
    """A call of `signal_warp` without its fence."""
    return Mutant(file, signal, run, signal.removesuffix(")") + ", fence=False)", nodes)


# A mutant that runs with every change, not in the nightly run alone.
_often = functools.partial(Mutant, nightly=False)

# A wait whose answer is used, and what takes its place.
CALL = "call << T.uint64(TAG_BITS)"
READY = f'N.wait(ready[thread], "ge", {CALL})', f'({CALL}) | T.cast(tag, "uint64")'
ARRIVED = 'N.wait(arrived[thread, block], "ge", call)'
# A fence too few of kernels by stores shows in no data of the simulator, whose plain stores arrive at once.
MUTANTS = {
    "gather without wait for room": _often("exchange", READY[0], "all-gather", READY[1]),
    "gather without wait for data": Mutant("exchange", ARRIVED, "all-gather"),
    "gather without fence": Mutant("exchange", ", fence=True", "all-gather", ""),
    "gather without quiet": Mutant("exchange", "N.quiet(thread)", "all-gather, many calls"),
    "gather that does not count its calls": _often("exchange", "end_call(calls, block, call, thread)", "all-gather"),
    "stores without wait for room": Mutant("exchange", READY[0], "all-gather by stores", READY[1]),
    "stores without wait for data": _often("exchange", ARRIVED, "all-gather by stores"),
    "few bytes without wait for data": _often("buffered", ARRIVED, "few bytes", nodes=2),
    "few bytes with one inbox": Mutant("buffered", 'T.cast(call % T.uint64(2), "int32")', "few bytes", "T.int32(0)", 2),
    "few bytes that does not count its calls": Mutant(
        "buffered", "end_call(calls, block, call, thread)", "few bytes", nodes=2
    ),
    "all-to-all without wait for data": _often("exchange", ARRIVED, "all-to-all"),
    "uneven without wait for data": Mutant("all_to_all", ARRIVED, "all-to-all, uneven, many calls"),
    "uneven without fence": _often("all_to_all", ", fence=True", "all-to-all, uneven, many calls", ""),
    "uneven without quiet": _often("all_to_all", "N.quiet(thread)", "all-to-all, uneven, many calls"),
    "merge without wait for lse": Mutant(
        "attention_merge", "T.sync_threads()\n                all_agree", "attention merge", "all_agree"
    ),
    "reduce without wait for data": _often(
        "reduce_scatter", "N.wait_slot(arrived[thread, block], done + step - 1, slots)", "reduce-scatter"
    ),
    "reduce without wait for a slot": _often(
        "reduce_scatter", "N.take_slot(consumed[thread, block], done + step, slots)", "reduce-scatter"
    ),
    "reduce without fence": Mutant("reduce_scatter", ", fence=True", "reduce-scatter", ""),
    "reduce without quiet": Mutant("reduce_scatter", "N.quiet(thread)", "reduce-scatter"),
    "send overwrites a slot": Mutant(
        "send_recv", 'N.wait_block(taken[pe, block], "ge", number + 1 - slots)', "send and receive"
    ),
    "plan without wait for records": _often(
        "moe/routing", 'N.wait(records_ready[thread], "ge", call * T.uint64(blocks + absent))', "MoE by expert"
    ),
    "dispatch without wait for room": Mutant(
        "moe/dispatch",
        "handshake.open_call(ready, active, status, me, call, tag, block, senders, thread)",
        "MoE, dispatches in a row",
    ),
    "dispatch without wait for rows": _often(
        "moe/dispatch", 'N.wait_warp(arrived[peer, c], "ge", call)', "MoE by expert"
    ),
    "dispatch without fence": _unfenced(
        "moe/dispatch", "N.signal_warp(mem.arrived[me, chunk.c], call, chunk.peer)", "MoE by expert"
    ),
    "combine without wait for rows": Mutant(
        "moe/combine", 'N.wait(mem.arrived[peer, slot // size], "ge", now.call)', "MoE by expert"
    ),
    "combine without fence": _unfenced("moe/combine", "N.signal_warp(arrived[me, c], call, peer)", "MoE by rank"),
    "weights without wait": _often(
        "moe/latency_combine", 'N.wait_block(sent[parity * R + peer], "ge", call)', "MoE latency, weights at combine"
    ),
    "latency without wait for messages": _often(
        "moe/latency_dispatch", 'N.wait_warp(arrived[index], "ge", call)', "MoE latency"
    ),
    "forwarder without wait for rows": _often(
        "moe/dispatch", 'N.wait_warp(mem.forward_arrived[chunk.k, slot], "ge", call)', "MoE by rank", nodes=2
    ),
    "forwarder without wait for sums": Mutant(
        "moe/combine",
        'N.wait(mem.offer_ready[k * at.size + g * 32 + lane, index // s.chunk], "ge", call)',
        "MoE by rank",
        nodes=2,
    ),
    "forwarder sums without fence": _unfenced(
        "moe/combine", "N.signal_warp(arrived[forwarder, c], call, peer)", "MoE by rank", 2
    ),
    "rows for a forwarder without quiet": Mutant("moe/combine", "N.quiet(me)", "MoE by rank", nodes=2),
    "forwarder without what sources said": Mutant(
        "moe/routing", 'N.wait_block(heads_arrived[b], "ge", call)', "MoE by rank", nodes=2
    ),
    "latency forwarder without wait for messages": _often(
        "moe/latency_dispatch", 'N.wait_warp(mem.forward_arrived[row], "ge", now.call)', "MoE latency", nodes=2
    ),
    "latency forwarder without wait for sums": Mutant(
        "moe/latency_combine",
        'N.wait(mem.partials_arrived[row * at.size + index, part], "ge", now.call)',
        "MoE latency",
        nodes=2,
    ),
}


# -- code for sm_90 ---------------------------------------------------------------------------------------------------

NODES = [(8, 8), (8, 8, 7)]


def _norm(hidden: int, shots: int, **options) -> dict:
    return dict(n_pes=4, dtype="bfloat16", hidden=hidden, capacity=32, shots=shots, threads=544) | options


# By file and kernel of tilescale_net/kernels; kernels/moe and kernels/fused have theirs in test_generated_code.py there.
SM_90 = {
    "all_gather.all_gather": [dict(n_pes=4), dict(n_pes=8, in_place=True, engine="bulk", threads=128)],
    "all_gather.all_gather_mapped": [dict(n_pes=4), dict(n_pes=8, in_place=True), dict(n_pes=4, staged=True)],
    "all_gather.node_all_gather": [dict(n_pes=sum(sizes), node_size=sizes, chunk_bytes=256 * 1024) for sizes in NODES],
    "all_reduce_fp8.all_reduce_fp8": [
        dict(n_pes=4, dtype="bfloat16", capacity=1024),
        dict(n_pes=4, dtype="bfloat16", capacity=1024, dependent=True),
        dict(n_pes=2, dtype="float32", capacity=4096, aligned=False),
    ],
    "all_reduce_norm.all_reduce_norm": [
        *(_norm(8192, shots) for shots in (0, 1, 2)),
        _norm(8192, 1, dependent=True),
        *(
            _norm(7168, shots, threads=928, top_k=top_k, scaled_by=by)
            for shots, top_k, by in zip(
                (1, 2, 1, 2, 1, 1), (0, 0, 8, 8, 0, 0), ("token", "block", "block", "", "tensor", "ue8m0_packed")
            )
        ),
        *(_norm(8192, 2, capacity=136, scaled_by="block", spread=spread) for spread in (2, 4)),
    ],
    "all_reduce_norm.sum_of_experts": [dict(dtype="bfloat16", hidden=7168, top_k=8)],
    "packets.packets": [
        dict(n_pes=4, dtype="bfloat16", capacity=16384),
        dict(n_pes=8, dtype="float32", capacity=8192, aligned=False),
        dict(n_pes=4, dtype="uint8", capacity=8192, sums=False, announces=True),
        dict(n_pes=2, dtype="uint8", capacity=16384, sums=False, announces=True, in_place=True, aligned=False),
        dict(n_pes=4, dtype="uint8", capacity=8192, split=True, sums=False, announces=True),
        dict(n_pes=4, dtype="bfloat16", capacity=8192, split=True, announces=True),
    ],
    "all_reduce_push.all_reduce_push": [
        dict(n_pes=4, dtype="bfloat16", capacity=32768, shots=1),
        dict(n_pes=4, dtype="bfloat16", capacity=32768, shots=1, dependent=True),
        dict(n_pes=2, dtype="float16", capacity=65536, shots=2, batch=2, aligned=False),
    ],
    "all_reduce_two_shot.all_reduce_two_shot": [
        dict(n_pes=4, dtype="bfloat16", staged=False),
        dict(n_pes=4, dtype="bfloat16", staged=False, pulled=True),
        dict(n_pes=8, dtype="float32", staged=True, aligned=False),
        dict(n_pes=4, dtype="bfloat16", staged=False, gathered=True),
    ],
    "all_to_all.all_to_all": [dict(n_pes=4), dict(n_pes=8, engine="bulk", threads=128)],
    "all_to_all.all_to_all_mapped": [dict(n_pes=4), dict(n_pes=8, staged=True)],
    "all_to_all.all_to_all_uneven": [dict(n_pes=4)],
    "all_to_all_transposed.all_to_all_transposed": [dict(n_pes=4, joins_rows=True), dict(n_pes=2, joins_rows=False)],
    "all_to_all_transposed.all_to_all_transposed_mapped": [
        dict(n_pes=4, joins_rows=True, copies=True),
        dict(n_pes=4, joins_rows=False, copies=True),
        dict(n_pes=2, joins_rows=True),
        dict(n_pes=8, joins_rows=False),
    ],
    "attention_merge.attention_merge": [
        dict(n_pes=4, dtype="bfloat16", heads=32, dim=512),
        dict(n_pes=2, dtype="float16", heads=32, dim=128, all_heads=True, shots=2, base_2=True),
        dict(n_pes=8, dtype="float32", heads=16, dim=128, all_heads=True),
        dict(n_pes=4, dtype="bfloat16", heads=32, dim=512, shots=0),
    ],
    "broadcast.broadcast": [dict(n_pes=4)],
    "broadcast.node_broadcast": [dict(n_pes=sum(sizes), node_size=sizes, chunk_bytes=256 * 1024) for sizes in NODES],
    "buffered.buffered": [
        dict(n_pes=2, capacity=1 << 19, vector=16, blocks=64),
        dict(n_pes=4, capacity=32768, vector=1, split=True),
        dict(n_pes=4, capacity=32768, dtype="bfloat16", vector=8, split=True, sums=True, node_size=2),
        dict(n_pes=2, capacity=1 << 19, dtype="float32", vector=4, sums=True),
        dict(n_pes=2, capacity=1 << 19, dtype="bfloat16", vector=1, sums=True),
    ],
    "p2p.push": [dict(capacity=1 << 22, engine="ldst"), dict(capacity=1 << 22, blocks=8, engine="bulk")],
    "p2p.pull": [dict(capacity=1 << 22, engine="ldst"), dict(capacity=1 << 22, engine="bulk")],
    "p2p.ping_pong": [dict(capacity=1 << 20, threads=128)],
    "p2p.meet": [dict()],
    "proxy_write.signals": [dict(capacity=1 << 20)],
    "proxy_write.write": [dict(capacity=1 << 20)],
    "reduce_scatter.node_reduce_scatter": [
        dict(n_pes=sum(sizes), node_size=sizes, dtype="bfloat16", here=sizes[-1]) for sizes in NODES
    ],
    "reduce_scatter.reduce_scatter": [
        dict(n_pes=4, dtype="bfloat16", vector=8),
        dict(n_pes=2, dtype="float32", vector=1, engine="bulk"),
        dict(n_pes=16, dtype="bfloat16", vector=8, node_size=8),
    ],
    "reduce_scatter.reduce_scatter_through": [dict(n_pes=4, dtype="bfloat16")],
    "reduce_scatter.reduce_scatter_pull": [
        dict(n_pes=4, dtype="bfloat16"),
        dict(n_pes=8, dtype="float32", threads=1024),
    ],
    "send_recv.recv": [dict(n_pes=8, chunk=1 << 16)],
    "send_recv.send": [dict(n_pes=8, chunk=1 << 16)],
}
