"""Every kernel compiled for sm_90 at full size: wide accesses, no read-only loads, no spilled registers."""

import functools

import pytest

import tilescale_net.kernels.moe
from tests import sass
from tests.generated import Code, Generated, factory_of, kernels_of
from tests.kernels.test_generated_code import MOE, tools  # noqa: F401 (a fixture)
from tests.ptx import read_only_loads
from tests.variants import nightly, variants
from tilescale_net.compiler.jit import KernelFactory

PACKAGE = "tilescale_net.kernels.moe"
SHAPE = dict(ranks=4, experts=256, top_k=8, max_tokens=4096)
FEW = dict(ranks=4, experts=256, top_k=8, max_tokens=128)
MOVE = dict(SHAPE, proxied=False, chunk=4, proxied_chunk=16, senders=14, receivers=10, threads=512)
SUM = dict(
    SHAPE, hidden=7168, dtype="bfloat16", quantised=False, valued="", biases=0, proxied=False, chunk=4, proxied_chunk=16, senders=16,
    reducers=8, threads=384,
)  # fmt: skip
SEND = dict(FEW, row_words=1792, scale_words=56, blocks=132, threads=256, index_dtype="int64")
RETURN = dict(
    ranks=4, top_k=8, max_tokens=128, hidden=7168, dtype="bfloat16", weighted=True, quantised=False, proxied=False,
    parts=2, biases=0, blocks=132, threads=256,
)  # fmt: skip
# Arguments to compile each kernel with. A kernel that is missing here fails `test_every_kernel_is_compiled`.
KERNELS = {
    "buffers.meet": [dict(ranks=4, threads=32)],
    "routing.plan_nodes": [dict(ranks=32, experts=256, nodes=4, slots=3, max_tokens=4096, blocks=24, threads=512)],
    "routing.plan_routing": [dict(SHAPE, capacity=65536, alignment=16, blocks=24, threads=512, index_dtype="int64")],
    "dispatch.dispatch_throughput": [
        dict(MOVE, row_words=3584, scale_words=0, placement="expert"),
        dict(MOVE, row_words=1792, scale_words=56, placement="rank", senders=24, receivers=0),
        dict(MOVE, row_words=3584, scale_words=0, placement="expert", ranks=32, nodes=4, slots=3),
    ],
    "combine.combine_throughput": [
        dict(SUM, by_rank=False, weighted="choices"),
        dict(SUM, by_rank=True, weighted="", threads=512),
        dict(SUM, by_rank=True, weighted="", proxied=True, ranks=32, nodes=4, forwarder_slots=3),
    ],
    "combine.sum_combined": [
        {name: value for name, value in SUM.items() if name not in ("valued", "senders", "reducers")}
        | dict(blocks=132, weighted="choices")
    ],
    "latency_dispatch.dispatch_latency": [
        dict(SEND, source_dtype="bfloat16"),
        dict(SEND, source_dtype="bfloat16", ranks=32, nodes=4, slots=3),
    ],
    "latency_combine.combine_latency": [
        dict(RETURN),
        dict(RETURN, proxied=True, parts=1, ranks=32, nodes=4, forwarder_slots=3),
    ],
    "latency_combine.exchange_weights": [dict(ranks=4, top_k=8, max_tokens=128, threads=256)],
}
CASES = [(name, arguments) for name, variants in KERNELS.items() for arguments in variants]
# Beside products, see tiles.py.
TILES = dict(tile_rows=128, tiles=512)
# A node that has lost a GPU.
UNEVEN = (8, 8, 8, 7)
# Like others that every run compiles, or, as the sum by rank, looked at below as it ships.
LIKE_OTHERS = ("routing.plan_nodes", "combine.sum_combined")
LONG = [
    (
        "routing.plan_routing",
        dict(SHAPE, capacity=65536, alignment=128, blocks=24, threads=512, index_dtype="int64", ordered=True),
    ),
    ("dispatch.dispatch_throughput", dict(MOVE, row_words=3584, scale_words=0, placement="expert", **TILES)),
    ("combine.combine_throughput", dict(SUM, by_rank=False, weighted="choices", **TILES)),
    *(
        (name, {**arguments, "ranks": 31, "experts": 248, "nodes": UNEVEN} | slots)
        for name, arguments, slots in (
            ("routing.plan_nodes", dict(max_tokens=4096, blocks=24, threads=512), dict(slots=4)),
            (
                "dispatch.dispatch_throughput",
                dict(MOVE, row_words=3584, scale_words=0, placement="expert"),
                dict(slots=4),
            ),
            ("combine.combine_throughput", dict(SUM, by_rank=True, weighted="", proxied=True), dict(forwarder_slots=4)),
            ("latency_dispatch.dispatch_latency", dict(SEND, source_dtype="bfloat16"), dict(slots=4)),
        )
    ),
    ("latency_combine.combine_latency", dict(RETURN, proxied=True, parts=1, ranks=31, nodes=UNEVEN, forwarder_slots=4)),
]


def _factory(name: str) -> KernelFactory:
    return factory_of(f"{PACKAGE}.{name}")


SHORT = [
    (name, arguments)
    for name, arguments in CASES
    if name not in LIKE_OTHERS and (name != "combine.combine_throughput" or not arguments["by_rank"])
]
# Rows that are summed, whose loads the assembler must leave together.
SUMS = [dict(SUM, by_rank=by_rank, weighted="" if by_rank else "choices", threads=384) for by_rank in (True, False)]


@functools.cache
def _generated(ships: bool = False) -> Generated:
    return Generated(((_factory(n), arguments) for n, arguments in (CASES + LONG if ships else SHORT)), ships=ships)


@functools.cache
def _sums() -> Generated:
    return Generated((_factory("combine.combine_throughput"), arguments) for arguments in SUMS)


def test_every_kernel_is_compiled():
    assert kernels_of(tilescale_net.kernels.moe) == {f"{PACKAGE}.{name}" for name in KERNELS} | MOE.keys()


def _ids(cases: list) -> list[str]:
    return [f"{name.split('.')[-1]}-{i}" for i, (name, _) in enumerate(cases)]


@variants(0, "name, arguments", SHORT, ids=_ids(SHORT))
def test_code_for_sm_90(tools, name, arguments):  # noqa: F811
    check(_generated().code(_factory(name), **arguments), name, arguments)


@pytest.mark.nightly
@pytest.mark.parametrize("name, arguments", CASES + LONG, ids=_ids(CASES + LONG))
def test_code_that_ships(tools, name, arguments):  # noqa: F811
    check(_generated(ships=True).code(_factory(name), **arguments), name, arguments)


def check(code: Code, name: str, arguments: dict) -> None:
    module = name.rpartition(".")[0]
    assert "__restrict__" not in code.source
    assert not read_only_loads(code.ptx)
    instructions = code.instructions
    assert len(instructions) > 100
    spilled = [i for i in instructions if i.startswith(("LDL", "STL"))]
    most = 56 if "tiles" in arguments else 40  # waits and signals take local memory in any number of registers
    assert len(spilled) < most, f"{len(spilled)} accesses to spilled registers"
    if module != "buffers" and name != "latency_combine.exchange_weights":  # which move no rows
        assert [i for i in instructions if i.startswith("ST") and ".128" in i] or module == "routing", "16-byte stores"
        assert [i for i in instructions if i.startswith("LD") and ".128" in i], "16-byte loads"
    assert any(i.startswith("LD") and i.endswith("STRONG.SYS") for i in instructions), "system-scope polls"


@variants(1, "ranks, by_rank", [nightly(2, True), (4, True), (4, False)])
def test_rows_that_are_summed_are_loaded_together(tools, ranks, by_rank):  # noqa: F811
    """The reducers' loads of a batch wait for none of each other: sums took twice as long when a comparison between
    them shared a counter with them. (Only schedules that were assembled tell: the order of the instructions is fine.)"""
    shape = dict(SUM, ranks=ranks, by_rank=by_rank, weighted="" if by_rank else "choices", threads=384)
    code = _sums().code(_factory("combine.combine_throughput"), **shape).schedule
    batches = _batches(code)
    assert max(len(loads) for loads in batches) >= 4 * min(ranks, 4)
    for loads in batches:
        held_up = sass.held_up(code[loads[0] : loads[-1] + 1], [code[i] for i in loads])
        assert not held_up, f"{held_up} wait for rows that are on their way"


def _batches(code) -> list[list[int]]:
    """Indices of ordinary 16-byte loads, those together that are close together."""
    found: list[list[int]] = []
    for i, instruction in enumerate(code):
        if instruction.is_load and ".E.128 " in instruction.text:
            if not found or i - found[-1][-1] > 60:
                found.append([])
            found[-1].append(i)
    return found
