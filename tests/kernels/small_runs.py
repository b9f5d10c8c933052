"""One small run of every kernel that is shipped, for tests that care for schedules and orders more than for shapes.

`RUNS[name]` is `(files, function)`: files of tilescale_net/kernels whose kernels the function runs, `function(seed)`, on
every rank. A file of tests that sets `SMALL_RUN_OF = (files)` and has a function `small_run(seed)` need not stand here.
Blocks have two warps or more wherever a kernel allows it, so that threads of a block can race. Kernels are imported by
the runs that need them: an import takes longer than most runs.
"""

import ast
import dataclasses
import functools
import importlib
from pathlib import Path

import torch

import tilescale_net as tsn

GEOMETRY = dict(threads=64, blocks=2)
PARTS = [((1_001,), torch.bfloat16, 2, 0), ((300,), torch.float32, 4, 4)]
MOE = dict(num_experts=4, max_tokens=7, hidden=64, top_k=3)
ROUTINGS = ("random", "masked", "one rank")


def _of(name):
    """A file of tests, by what follows "test_"."""
    folder, _, name = name.rpartition("/")
    return importlib.import_module(".".join(["tests.kernels", *filter(None, [folder]), f"test_{name}"]))


@functools.cache
def _tuning():
    from tilescale_net.kernels.moe import Tuning

    return Tuning(blocks=2, threads=64, combine_threads=64, chunk=2)


def copies(seed):
    _of("p2p")._copies("push", dict(threads=64, blocks=4, partition="interleaved", chunk=1024), [(3000, 2, 1, 3)], seed)
    _of("p2p")._copies("push", dict(threads=96, blocks=3), [(3000, 2, 1, 3)], seed)
    _of("p2p")._copies("push", dict(threads=64, blocks=4, partition="dynamic", chunk=4096), [(20_000, 2, 1, 3)], seed)
    _of("p2p")._copies("pull", dict(), [(3000, 2, 1, 3)], seed)
    _of("p2p")._ping_pong(seed, 64)
    _of("p2p")._meetings(seed)


def writes(seed):
    _of("p2p")._writes(seed)


def gather(seed):
    _of("all_gather")._gather(seed, PARTS, dict(GEOMETRY, chunk_bytes=512, algorithm="puts"), 3)


def gather_by_stores(seed):
    _of("all_gather")._gather(seed, [((1_000,), torch.float32, 0, 0)], dict(GEOMETRY, algorithm="stores"), 3)


def equal_splits(seed):
    _of("all_to_all")._equal(seed, [(30, (5,), torch.bfloat16, 2, 0)], dict(GEOMETRY, algorithm="puts"), 3)


def uneven_splits(seed):
    _of("all_to_all")._uneven(seed, 4, dict(GEOMETRY), (129,), torch.uint8, False)


def reduce_by_push(seed):
    options = dict(GEOMETRY, chunk_bytes=512, slots=2, algorithm="push")
    _of("reduce_scatter")._reduce(seed, [((1001,), torch.bfloat16, 2, 0)], options, 3)


def reduce_by_pull(seed):
    options = dict(GEOMETRY, algorithm="pull")
    _of("reduce_scatter")._reduce(seed, [((1000,), torch.bfloat16, 0, 0)], options, 3)


def reduce_everywhere(seed):
    options = dict(GEOMETRY, algorithms=[*_of("all_reduce").ALGORITHMS])
    _of("all_reduce")._reduce(
        seed, [((1000,), torch.bfloat16, 0, 0, True), ((77,), torch.float32, 0, 0, True)], options, 3
    )


def reduce_across_nodes(seed):
    options = dict(GEOMETRY, chunk_bytes=512, slots=2)  # slots are used again
    cases = [((3000,), torch.bfloat16, 0, 0), ((40,), torch.bfloat16, 0, 0)]  # in the second a block has nothing to do
    _of("reduce_scatter")._reduce(seed, cases, options, 3, (0, 1))


def broadcast_across_nodes(seed):
    _of("broadcast").small_run(seed)


def norm(seed):
    _of("all_reduce_norm")._layers(seed, torch.bfloat16, 520)


def transposed(seed):
    _of("broadcast")._transposed(seed)


def gather_and_multiply(seed):
    _of("fused/all_gather_matmul")._products(seed, 72, 48, 40, torch.bfloat16, False, 3, 4)
    _of("fused/all_gather_matmul")._products(seed, 72, 48, 48, torch.float8_e4m3fn, True, 3, 4)
    _of("fused/all_gather_matmul")._products(seed, 72, 16, 40, torch.bfloat16, False, 2, 4)  # tiles of a single step


def gather_and_multiply_pipelined(seed):
    _of("fused/all_gather_matmul")._products(seed, 72, 48, 40, torch.bfloat16, False, 3, None)
    _of("fused/all_gather_matmul")._products(seed, 72, 48, 48, torch.float8_e4m3fn, True, 2, None)


def multiply_and_reduce(seed):
    _of("fused/matmul_reduce_scatter")._sums(seed, 72, 48, 40, torch.bfloat16, False, 3, 4)


def multiply_and_reduce_everywhere(seed):
    _of("fused/matmul_all_reduce")._sums(seed, 72, 48, 40, False, 3, 4)


def multiply_by_experts(seed):
    of = _of("fused/expert_matmul")
    importlib.import_module("tests.kernels.fused.counted").counted(seed)
    of.fed(seed)
    # The copying warp may begin with several tiles before the first is multiplied: all of k is less than its stages.
    of.fed(seed, 16, dataclasses.replace(of.SMALL, stages=4), 1)
    of.fed_combine(seed)
    of.layers(seed, dict(tuning=of.TUNING), False, ("random", "one expert"))


def messages(seed):
    _of("send_recv")._messages(seed)
    if tsn.size() == 2:
        _of("send_recv")._numbers_begin_anew()


def moe_by_expert(seed):
    _of("moe/rounds").rounds(seed, MOE, dict(alignment=2, tuning=_tuning()), dict(), ROUTINGS)


def moe_once_per_rank(seed):
    """Across nodes each row to each of its ranks."""
    tuning = dataclasses.replace(_tuning(), once_per_node=False)
    _of("moe/rounds").rounds(seed, MOE, dict(alignment=2, tuning=tuning), dict(), ("random",))


def moe_of_many_choices(seed):
    """More choices of a block than its threads are: each warp numbers two groups of 32."""
    shape = dict(MOE, max_tokens=96, hidden=16)
    _of("moe/rounds").rounds(seed, shape, dict(layout="rank", tuning=_tuning()), dict(), ("one rank", "random"))


def moe_by_rank(seed):
    _of("moe/rounds").rounds(seed, MOE, dict(layout="rank", tuning=_tuning()), dict(again=True), ROUTINGS)


def moe_latency(seed):
    _of("moe/rounds").rounds(seed, MOE, dict(mode="latency", tuning=_tuning()), dict(), ROUTINGS)


def moe_latency_quantised(seed):
    """Rows and scales of a combine are two puts with one signal."""
    options = dict(mode="latency", quantize_combine=True, tuning=_tuning())
    _of("moe/rounds").rounds(seed, dict(MOE, hidden=128), options, dict(), ("random",))


def moe_latency_weights(seed):
    _of("moe/rounds").weights_at_combine(seed, MOE, dict(mode="latency", tuning=_tuning()), dict(), ROUTINGS)


def moe_arena(seed):
    _of("moe/arena")._by_turns(seed, 4, False)


def moe_rejected(seed):
    _of("moe/rounds").rejected(seed, MOE, dict(layout="rank", tuning=_tuning()))


def moe_latency_rejected(seed):
    _of("moe/rounds").rejected(seed, MOE, dict(mode="latency", tuning=_tuning()))


EXCHANGE = ("exchange", "collective")
THROUGHPUT = ("moe/handshake", "moe/routing", "moe/dispatch", "moe/combine")
RUNS = {
    "copies": (("p2p",), copies),
    "writes by the proxy": (("proxy_write",), writes),
    "all-gather": ((*EXCHANGE, "all_gather"), gather),
    "all-gather by stores": (EXCHANGE, gather_by_stores),
    "all-to-all": (EXCHANGE, equal_splits),
    "all-to-all, uneven": (("all_to_all",), uneven_splits),
    "reduce-scatter": (("reduce_scatter",), reduce_by_push),
    "reduce-scatter by pull": (("collective", "reduce_scatter"), reduce_by_pull),
    "all-reduce": (
        ("collective", "all_reduce_push", "all_reduce_packets", "all_reduce_two_shot"),
        reduce_everywhere,
    ),
    "reduce-scatter across nodes": (("reduce_scatter",), reduce_across_nodes),
    "broadcast across nodes": (("broadcast",), broadcast_across_nodes),
    "all-reduce and norm": (("all_reduce_norm",), norm),
    "all-to-all, transposed": (("all_to_all_transposed",), transposed),
    "all-gather and matmul": (("fused/all_gather_matmul", "fused/gemm"), gather_and_multiply),
    "all-gather and matmul, pipelined": (("fused/all_gather_matmul",), gather_and_multiply_pipelined),
    "matmul and reduce-scatter": (
        ("fused/matmul_reduce_scatter", "fused/gemm"),
        multiply_and_reduce,
    ),
    "matmul and all-reduce": (("fused/matmul_all_reduce", "fused/gemm"), multiply_and_reduce_everywhere),
    "MoE and its products": (
        ("fused/expert_matmul", "moe/tiles", "moe/routing", "moe/combine"),
        multiply_by_experts,
    ),
    "send and receive": (("send_recv",), messages),
    "MoE by expert": (("moe/routing", "moe/dispatch", "moe/combine"), moe_by_expert),
    "MoE, once per rank": (("moe/dispatch",), moe_once_per_rank),
    "MoE, many choices": (("moe/routing",), moe_of_many_choices),
    "MoE by rank": (THROUGHPUT, moe_by_rank),
    "MoE latency": (
        ("moe/handshake", "moe/latency_dispatch", "moe/latency_combine"),
        moe_latency,
    ),
    "MoE latency, quantised": (("moe/latency_combine",), moe_latency_quantised),
    "MoE latency, weights at combine": (("moe/latency_combine",), moe_latency_weights),
    "MoE in an arena": (("moe/buffers",), moe_arena),
    "MoE by rank, rejected": (("moe/routing",), moe_rejected),
    "MoE latency, rejected": (("moe/handshake", "moe/latency_combine"), moe_latency_rejected),
}


def _run(name, seed):
    _of(name).small_run(seed)


def _declared():
    """Those of files of tests, which are read and not imported."""
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text()
        if "\nSMALL_RUN_OF = " in text:
            files = next(
                ast.literal_eval(node.value)
                for node in ast.parse(text).body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SMALL_RUN_OF"
            )
            name = (path.parent / path.stem.removeprefix("test_")).relative_to(folder).as_posix()
            yield name, (files, functools.partial(_run, name))


def _example(name, seed):
    importlib.import_module(f"tests.kernels.examples.{name}").small_run(seed)


RUNS |= _declared()
EXAMPLES = sorted(p.stem for p in Path(__file__).with_name("examples").glob("*.py") if "def small_run" in p.read_text())
RUNS |= {f"example {name}": ((f"examples/{name}",), functools.partial(_example, name)) for name in EXAMPLES}
# Need mapped peers, or use another kernel across nodes.
ONE_NODE = ("all-gather by stores", "broadcast", "reduce-scatter by pull", "all-reduce", "all-reduce and norm")
ONE_NODE += ("example mailbox", "example matmul_atomics", "example stealing")


def module_of(file):
    """Of a file that RUNS names."""
    return ("tests.kernels." if file.startswith("examples/") else "tilescale_net.kernels.") + file.replace("/", ".")
