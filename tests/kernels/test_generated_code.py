"""Every kernel of kernels/ compiled for sm_90: wide stores, bulk copies, and no read-only loads, which may be stale."""

import functools
import re

import pytest

from tests import sass
from tests.generated import Code, Generated, Traced, factory_of, kernels_of
from tests.integration.test_order import fresh_source
from tests.kernels.registry import SM_90
from tests.ptx import loads_behind_loads, polling_loops, read_only_loads
from tests.variants import nightly, variants
from tilescale_net import kernels
from tilescale_net.compiler import inspect, toolchain
from tilescale_net.errors import ConfigurationError

# What the fused products send with; the products are in fused/test_generated_code.py.
ROWS = dict(n_pes=4, rows=1024, n=8192, height=128, across=32, slices=2, pieces=4)
PIPELINED = "tilescale_net.kernels.fused.all_gather_matmul"
PROBE, WEIGHTED = "benchmark.common.queue.probe", "benchmark.common.weighted_outputs.weighted_outputs"  # of benchmarks
PUSH, PING_PONG = "tilescale_net.kernels.p2p.push", "tilescale_net.kernels.p2p.ping_pong"
FUSED = {
    "tilescale_net.kernels.fused.all_gather_matmul.push_rows": [
        dict(n_pes=4, rows=1024, k=8192, dtype="bfloat16", chunk=128)
    ],
    f"{PIPELINED}.barrier_peers": [dict(n_pes=4, threads=512)],
    f"{PIPELINED}.await_rows": [dict(n_pes=4)],
    f"{PIPELINED}.put_to_peers": [
        dict(n_pes=4, nbytes=16 << 20, threads=512),
        dict(n_pes=4, nbytes=4096, threads=512, signals=False),
    ],
    "tilescale_net.kernels.fused.matmul_reduce_scatter.send_parts": [
        dict(ROWS, dtype="bfloat16", out_dtype="bfloat16", shares=True)
    ],
    "tilescale_net.kernels.fused.matmul_all_reduce.send_and_collect": [
        dict(ROWS, carried="bfloat16", dtype="bfloat16", threads=512)
    ],
    "tilescale_net.kernels.fused.swiglu.swiglu_rows": [
        dict(inner=2048, words=16, weighted=True),
        dict(inner=7168, words=56, gated=False),
        dict(inner=2048, words=1, quantised=False),
    ],
    "tilescale_net.kernels.fused.swiglu.swiglu_gradient_rows": [dict(inner=2048, weighted=True, keeps=True)],
    "tilescale_net.kernels.fused.swiglu.quantised_blocks": [dict(n=4096, k=7168), dict(n=4096, k=7168, rounded=True)],
    "tilescale_net.kernels.fused.swiglu.widened_rows": [dict(k=7168, words=56, n=4096)],
}
# Of rows of experts, without communication; the others of kernels/moe are in moe/test_generated_code.py.
MOE = {
    "tilescale_net.kernels.moe.row_ops.weighted_rows": [dict(dtype="bfloat16", dotted=True)],
    "tilescale_net.kernels.moe.row_ops.zero_padding_rows": [dict(width=4, copied=True), dict(width=4, copied=False)],
}
KERNELS = {f"tilescale_net.kernels.{name}": variants for name, variants in SM_90.items()} | FUSED | MOE
KERNELS |= {PROBE: [dict()], WEIGHTED: [dict(n_pes=4, dtype="bfloat16", heads=32, dim=512, by_heads=True)]}
CASES = [(name, arguments) for name, variants in KERNELS.items() for arguments in variants]
# These copy nothing with a block's threads, a barrier, one thread's puts, and pushes into the queue; or add up what has
# come, small and aligned to elements only.
WITHOUT_DATA = {
    "tilescale_net.kernels.all_reduce_norm.sum_of_experts",
    "tilescale_net.kernels.p2p.meet",
    f"{PIPELINED}.barrier_peers",
    f"{PIPELINED}.await_rows",
    "tilescale_net.kernels.fused.swiglu.swiglu_rows",
    "tilescale_net.kernels.fused.swiglu.swiglu_gradient_rows",
    "tilescale_net.kernels.fused.swiglu.quantised_blocks",
    "tilescale_net.kernels.fused.swiglu.widened_rows",
    *MOE,
    "tilescale_net.kernels.proxy_write.write",
    PROBE,
    WEIGHTED,
}


# With the bulk engine too, in every run: one that a whole block runs, one whose copies are interleaved with sums.
WITH_BULK = (PUSH, "tilescale_net.kernels.reduce_scatter.reduce_scatter")


# Made like others that every run compiles: nvcc takes two seconds for each.
LIKE_OTHERS = {
    "all_gather_mapped", "all_to_all", "all_to_all_transposed", "node_all_gather",
    "node_broadcast", "push_rows", "recv", "send_and_collect",
}  # fmt: skip


def _is_long(name: str, arguments: dict) -> bool:
    """In every run, each kernel as it is first listed, unless it is like others or has the bulk engine in another case."""
    if name in WITH_BULK:
        return arguments.get("engine") != "bulk" and not (name == PUSH and arguments is KERNELS[name][0])
    return arguments is not KERNELS[name][0] or name.rpartition(".")[2] in LIKE_OTHERS


SHORT = [(name, arguments) for name, arguments in CASES if not _is_long(name, arguments)]
# What the assembler makes of them is looked at in every run, as it ships.
SMALL = [
    (factory_of(name), dict(capacity=1 << 20, threads=threads)) for name in (PUSH, PING_PONG) for threads in (128, 1024)
]


@functools.cache
def _generated(ships: bool = False) -> Generated:
    return Generated(((factory_of(name), arguments) for name, arguments in (CASES if ships else SHORT)), ships=ships)


@functools.cache
def _small() -> Generated:
    return Generated([*SMALL, *((fresh_source, dict(engine=engine, threads=128)) for engine in ("ldst", "bulk"))])


def build(name: str, **arguments) -> Code:
    return _generated().code(factory_of(name), **arguments)


@pytest.fixture(scope="module")
def tools():
    try:
        toolchain.find_nvcc()
    except ConfigurationError:
        pytest.skip("lacks nvcc (nvidia-cuda-nvcc with pip)")
    if toolchain.find_tool("nvdisasm") is None:
        pytest.skip("lacks nvdisasm (nvidia-cuda-nvdisasm with pip)")


def test_every_kernel_is_compiled():
    """A kernel that registry.SM_90 lacks fails this. kernels/moe and kernels/fused have tests like this of their own."""
    found = kernels_of(kernels)
    # This one waits for one flag and does nothing else.
    found -= {"tilescale_net.kernels.collective.wait_until_resident"}
    assert found == {
        name for name in KERNELS.keys() - FUSED.keys() - MOE.keys() if name.startswith("tilescale_net.kernels.")
    }


DEPENDENT = [(name, arguments) for name, arguments in CASES if arguments.get("dependent")]


@pytest.mark.parametrize("name, arguments", DEPENDENT, ids=[name.rpartition(".")[2] for name, _ in DEPENDENT])
def test_dependent_kernels_wait_before_they_touch_memory(name, arguments):
    """Also before they write: the kernel before may still read it. And the next kernel begins after this wait."""
    source = Traced.of(factory_of(name), arguments, inspect.SM_90, ships=False).source
    begin = re.search(r'extern "C" __global__ .*\((.*)\) \{\n', source)
    before, after = source[begin.end() :].split("cudaGridDependencySynchronize();")
    memory = re.findall(r"\* (\w+)", begin[1])
    assert {"ctx", "out", "x", "calls"} <= {*memory} and {"inbox", "data"} & {*memory}
    assert not re.search(rf"\b({'|'.join(memory)}|tsn)\b", before)
    assert after.split()[0] == "cudaTriggerProgrammaticLaunchCompletion();"


def _ids(cases: list) -> list[str]:
    return [f"{name.split('.')[-1]}-{CASES.index((name, arguments))}" for name, arguments in cases]


@pytest.mark.parametrize("name, arguments", SHORT, ids=_ids(SHORT))
def test_code_for_sm_90(tools, name, arguments):
    check(build(name, **arguments), name, arguments)


@pytest.mark.nightly
@pytest.mark.parametrize("name, arguments", CASES, ids=_ids(CASES))
def test_code_that_ships(tools, name, arguments):
    check(_generated(ships=True).code(factory_of(name), **arguments), name, arguments)


def check(code: Code, name: str, arguments: dict) -> None:
    assert "__restrict__" not in code.source
    assert not read_only_loads(code.ptx)
    assert not loads_behind_loads(code.ptx)
    instructions = code.instructions
    assert len(instructions) > 50
    if name in WITHOUT_DATA:
        return
    stores = [i for i in instructions if i.startswith("ST") and ".128" in i]
    bulk = [i for i in instructions if i.startswith("UBLKCP")]
    assert stores, "16-byte stores"
    engine = arguments.get("engine", "auto")
    # `auto` may take the bulk engine for large counts, known only at run time.
    assert engine == "auto" or bool(bulk) == (engine == "bulk"), bulk
    polls = [i for i in instructions if i.startswith("LD") and i.endswith("STRONG.SYS")]
    assert polls or arguments.get("shots") == 0, "system-scope polls"


def test_a_single_push_fences_while_its_atomic_is_in_flight(tools):
    """The assembler turns an atomic that adds a constant into one of the whole warp, whose shuffles wait for the answer."""
    instructions = build(PROBE).instructions
    starts = [i for i, name in enumerate(instructions) if name.startswith("ATOMG") and ".ADD" in name]
    ways = [instructions[i : i + 25] for i in starts]
    ways = [
        way[: next(i for i, name in enumerate(way) if name.startswith("MEMBAR"))]
        for way in ways
        if "MEMBAR" in str(way)
    ]
    assert len(ways) >= 2, "one lane's pushes, and many lanes'"
    assert not [way for way in ways if any(name.startswith("SHFL") for name in way)]


@variants(0, "threads", [128, nightly(512), 1024])
def test_small_pushes_do_not_wait_for_local_memory(tools, threads):
    """Registers for large copies once made small pushes by 1024 threads 0.2 us slower."""
    instructions = _small().code(factory_of(PUSH), capacity=1 << 20, threads=threads).instructions
    before = instructions[: next(i for i, name in enumerate(instructions) if re.match(r"STG.*\.128", name))]
    assert any(re.match(r"LDG.*\.128", name) for name in before)
    assert not [name for name in before if name.startswith(("STL", "LDL"))]


def _look_up(code: list[sass.Instruction]) -> tuple[int, int]:
    """First and last load of the first look-up of a PE: the heap's place, its size, the abort, the PE's heap."""
    places = []
    for offset in ("+0x20]", "+0x28]", "+0x80]", "+0x100]"):
        start = places[-1] if places else 0
        places.append(next(i for i in range(start, len(code)) if code[i].is_load and code[i].text.endswith(offset)))
    return places[0], places[-1]


@pytest.mark.parametrize("threads", [128, 1024])
@pytest.mark.parametrize("kernel", [PUSH, PING_PONG], ids=["push", "ping_pong"])
def test_loads_of_small_messages_wait_for_no_other(tools, kernel, threads):
    """The data and all that is to be known of the PE are on their way at once, which the assembler must not spoil.

    It did, by computing with one of them before it loaded the next, and by making one wait for the data, with which it
    shared a counter: 0.2 us each.
    """
    code = _small().code(factory_of(kernel), capacity=1 << 20, threads=threads).schedule
    first, last = _look_up(code)
    assert last - first < 10, "the loads follow one another"
    start = max(i for i in range(first) if code[i].text.startswith("BAR.SYNC"))
    assert any(".128" in instruction.text for instruction in code[start:first] if instruction.is_load), "data first"
    way = code[start : last + 1]
    assert not sass.held_up(way, [instruction for instruction in way if instruction.is_load])


def test_polls_of_a_ticket_load_nothing_else(tools):
    """A wait reads its queue's view once: a poll of host memory takes long enough."""
    ptx = build(PROBE).ptx
    assert polling_loops(ptx)
    assert not [loop for loop in polling_loops(ptx) if "ld.global.nc" in loop]


@pytest.mark.parametrize("engine", ["ldst", "bulk"])
def test_nothing_is_read_of_queues_before_it_is_known_that_there_are_some(tools, engine):
    """This kernel once read address 0 before its loop began, in jobs without a proxy."""
    assert not loads_behind_loads(_small().code(fresh_source, engine=engine, threads=128).ptx)


def test_ptx_says_the_same(tools):
    ptx = build("tilescale_net.kernels.all_gather.all_gather", n_pes=4).ptx
    assert not read_only_loads(ptx)
    assert re.search(r"st(\.\w+)*\.v4\.b32|st(\.\w+)*\.v2\.b64|st(\.\w+)*\.b128|st(\.\w+)*\.v4\.u32", ptx)
    assert re.search(r"st\.release\.sys|red\.release\.sys", ptx) and "ld.acquire.sys" in ptx
