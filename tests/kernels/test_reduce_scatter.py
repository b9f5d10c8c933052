"""reduce-scatter against plain torch, bit by bit: the order of additions is part of the contract."""

import random

import pytest
import torch

import tilescale_net as tsn
from tests import ranks
from tests.kernels.declared import Mutant
from tests.kernels.support import Guarded, assert_same, unsettle
from tilescale_net.kernels.reduce_scatter import ReduceScatter

# shape of a part, dtype, misalignment of x and of out in bytes
CASES = [
    ((1,), torch.float32, 0, 0),
    ((8, 16), torch.bfloat16, 0, 0),
    ((7, 3), torch.bfloat16, 2, 6),
    ((1000,), torch.float16, 0, 0),
    ((5001,), torch.int32, 4, 0),
    ((514,), torch.float64, 0, 0),
    ((20_000,), torch.bfloat16, 0, 0),
    ((3000,), torch.bfloat16, 0, 2),
    ((0,), torch.float32, 0, 0),
]
PUSH = dict(algorithm="push")  # also of what could be pulled


def values(shape, dtype, *key) -> torch.Tensor:
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(60))
    if not dtype.is_floating_point:
        return torch.randint(-(2**30), 2**30, shape, dtype=dtype, generator=generator)
    scale = torch.randint(-8, 9, shape, generator=generator).to(torch.float64)
    return (torch.randn(shape, dtype=torch.float64, generator=generator) * 2.0**scale).to(dtype)


def reference(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of the PEs, in float32 for narrow types, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = torch.zeros(parts[0].shape, dtype=wide)
    for part in parts:
        total += part.to(wide)
    return total.to(dtype)


def reference_of_nodes(parts: list[torch.Tensor], node_size: int) -> torch.Tensor:
    """The sums of the nodes, each rounded, in the order of the nodes; on one node, and where each PE is one, `reference`."""
    return reference([reference(parts[first : first + node_size]) for first in range(0, len(parts), node_size)])


def _reduce(seed, cases, options, calls=2, by_nodes=()):
    """`by_nodes`: the cases that cross the network as sums of nodes."""
    rank, n, node_size = tsn.rank(), tsn.size(), tsn.world().topology.node_size
    pace = random.Random(f"{seed} {rank}")
    op = ReduceScatter(**options)
    for number, (shape, dtype, x_offset, out_offset) in enumerate(cases):
        whole = (n * shape[0], *shape[1:]) if number % 2 else (n, *shape)
        x, out = Guarded(whole, dtype, x_offset), Guarded(shape, dtype, out_offset)
        for call in range(calls):
            data = [values((n, *shape), dtype, seed, number, call, p) for p in range(n)]
            x.tensor.copy_(data[rank].view(whole))
            unsettle(pace)
            assert op(out.tensor, x.tensor) is out.tensor
            x.tensor.zero_()  # the call is over with x
            tsn.synchronize()
            what = f"seed {seed}, case {number}, call {call}, rank {rank}"
            parts = [d[rank] for d in data]
            expected = reference_of_nodes(parts, node_size) if number in by_nodes else reference(parts)
            assert_same(out.tensor, expected, what)
        x.check()
        out.check()
        x.free()
        out.free()
    op.free()


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.nightly), 4])
@pytest.mark.sample(1)
def test_equals_sum_in_order(size):
    # The number of PEs and the dtype are compiled in: every case is tried with two. test_any_schedule has three.
    cases = CASES if size == 2 else CASES[1:3]
    ranks.run(size, _reduce, random.randrange(1 << 30), cases, dict(threads=64, blocks=2, chunk_bytes=4096, **PUSH))


@pytest.mark.parametrize("size", [1, 2])
def test_pull_equals_sum_in_order(size):
    """Some cases cannot be pulled, and are pushed."""
    cases = [CASES[1], CASES[8], ((20_000,), torch.bfloat16, 0, 0), ((8,), torch.bfloat16, 0, 16)]
    ranks.run(
        size, _reduce, random.randrange(1 << 30), cases, dict(threads=64, blocks=2, chunk_bytes=4096), timeout=400
    )


@pytest.mark.parametrize("visibility, slots", [("eager", 3), ("late", 2), ("random", 3), ("random", 2)])
@pytest.mark.sample(2)
def test_any_schedule(visibility, slots):
    seed = random.randrange(1 << 30)
    env = {"TSN_SIM_SEED": str(seed), "TSN_SIM_VISIBILITY": visibility}
    cases = [CASES[1], CASES[1], ((9_000,), torch.bfloat16, 0, 0)]
    for algorithm in ("push", "pull") if slots == 2 else ("push",):
        options = dict(threads=32, blocks=2, slots=slots, chunk_bytes=1024, algorithm=algorithm)
        ranks.run(3, _reduce, seed, cases, options, 3, env=env)


def _in_place_and_many(seed, algorithm):
    rank, n = tsn.rank(), tsn.size()
    pace = random.Random(f"{seed} {rank}")
    op = ReduceScatter(threads=32, blocks=1, chunk_bytes=512, algorithm=algorithm)
    x = tsn.empty((n, 300), torch.float32)
    for call in range(300):
        data = [values((n, 300), torch.float32, seed, call, p) for p in range(n)]
        x.copy_(data[rank])
        unsettle(pace, 0.02, 0.01)
        op(x[rank], x)
        tsn.synchronize()
        assert_same(x[rank], reference([d[rank] for d in data]), f"seed {seed}, call {call}")
        assert_same(x[(rank + 1) % n], data[rank][(rank + 1) % n])


@pytest.mark.parametrize("algorithm", ["push", "pull"])
@pytest.mark.sample(1)
def test_in_place_hundreds_of_calls(algorithm):
    ranks.run(2, _in_place_and_many, random.randrange(1 << 30), algorithm)


def _misuse(case):
    if case == "slots":
        return ReduceScatter(slots=1)
    if case == "algorithm":
        return ReduceScatter(algorithm="tree")
    if case == "chunk":
        return ReduceScatter(chunk_bytes=100)
    if case == "chunks differ":
        return ReduceScatter(blocks=1, chunk_bytes=128 * (1 + tsn.rank()))
    op = ReduceScatter(threads=32, blocks=1, chunk_bytes=1024)
    x, out = tsn.zeros((2, 8), torch.float32), tsn.zeros(8, torch.float32)
    calls = {
        "dtype": lambda: op(out.to(torch.uint8), x.to(torch.uint8)),
        "shape": lambda: op(out[:7], x),
        "mixed": lambda: op(out, x.to(torch.float64)),
        "overlap": lambda: op(x.view(-1)[4:12], x),
        "pull": lambda: ReduceScatter(blocks=1, threads=32, algorithm="pull")(out, torch.zeros_like(x)),
    }
    calls[case]()


@pytest.mark.parametrize(
    "case, error, words",
    [
        ("slots", "ValueError", ["slots", "1"]),
        ("chunk", "ValueError", ["chunk_bytes", "100"]),
        ("chunks differ", "RankMismatch", ["chunk_bytes=128", "chunk_bytes=256"]),
        ("dtype", "TypeError", ["uint8", "bfloat16"]),
        ("shape", "ValueError", ["x", "[2, 7]", "[2, 8]"]),
        ("mixed", "TypeError", ["x", "float64", "float32"]),
        ("overlap", "ValueError", ["overlap"]),
        ("algorithm", "ValueError", ["algorithm", "'tree'"]),
        ("pull", "ValueError", ["x", "symmetric", "push"]),
    ],
)
def test_misuse_is_named(case, error, words):
    for outcome in ranks.launch(2, _misuse, case):
        assert outcome.error is not None and outcome.error[0] == error, outcome
        assert all(word in outcome.error[1] for word in words), outcome.error


SM_90 = {
    "tilescale_net.kernels.reduce_scatter.reduce_scatter": [
        dict(n_pes=4, dtype="bfloat16", vector=8),
        dict(n_pes=2, dtype="float32", vector=1, engine="bulk"),
    ],
    "tilescale_net.kernels.reduce_scatter.reduce_scatter_pull": [
        dict(n_pes=4, dtype="bfloat16"),
        dict(n_pes=8, dtype="float32", threads=1024),
    ],
}


def short(seed):
    cases = [((2_000,), torch.float32, 0, 0), ((300,), torch.float32, 4, 4)]
    _reduce(seed, cases, dict(threads=32, blocks=1, slots=2, chunk_bytes=256, algorithm="push"), 24)


PUSHED = ("reduce_scatter", "reduce_scatter")
WAIT_SLOT = "N.wait_slot(arrived[thread, block], done + step - 1, slots)"
TAKE_SLOT = "N.take_slot(consumed[thread, block], done + step, slots)"
MUTANTS = {
    "reduce without wait for data": Mutant(*PUSHED, WAIT_SLOT, "short"),
    "reduce without wait for a slot": Mutant(*PUSHED, TAKE_SLOT, "short"),
    "reduce without fence": Mutant(*PUSHED, ", fence=True", "short", "", nightly=True),
    "reduce without quiet": Mutant(*PUSHED, "N.quiet(thread)", "short", nightly=True),
}
