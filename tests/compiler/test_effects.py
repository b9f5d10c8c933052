"""Calls with an effect are carried out exactly once, wherever they stand in an expression, as Python would."""

import re

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.compiler import expressions
from tilescale_net.compiler import inspect
from tilescale_net.errors import KernelError


def _results(statements, path):
    """The simulator's results: counters of N's atomics, of tilelang's, and outputs, a row for each statement."""
    count = len(statements)
    func = expressions.kernel(statements, path)
    c, d, out = (tsn.zeros((count, 8), dtype=torch.int32) for _ in range(3))
    out.fill_(-9)
    tsn.compile(func)(c, d, torch.tensor(expressions.X, dtype=torch.int32), out, 2)
    return [[row.tolist() for row in rows] for rows in (c, d, out)]


def _compare(statements, path):
    (found,) = ranks.run(1, _results, statements, path, env={"TSN_DEVICE": "simulator"})
    wrong = []
    for index, statement in enumerate(statements):
        reference = expressions.Reference()
        reference.run(statement)
        mine = tuple(rows[index] for rows in found)
        if mine != (reference.c, reference.d, reference.out):
            wrong.append(f"{statement}\n  is {mine}\n  not {(reference.c, reference.d, reference.out)}")
    assert not wrong, "\n".join(wrong)


_ATOMIC = r"N\.atomic_add|N\.ld|T\.atomic_add|tsn::atomic<|tsn::ld<|AtomicAddRet\(|AtomicAdd\("
_OF_WARP = r"\b(?:T\.|tl::|__)(?:shfl_|any_sync|all_sync|ballot|activemask|match_|warp_reduce_)"


def calls(text: str) -> int:
    return len(re.findall(f"{_ATOMIC}|{_OF_WARP}", text))


def _in_source(statements, path) -> int:
    """How many calls the code for a GPU holds."""
    source = inspect.cuda_source(expressions.kernel(statements, path))
    return calls(source[source.index("__launch_bounds__") :])


def test_each_call_is_carried_out_once(tmp_path):
    _compare(expressions.FIXED + expressions.random_statements(0, 12), tmp_path / "fixed_expressions.py")
    fixed = [s for s in expressions.FIXED if "unroll" not in s] + expressions.OF_A_WARP
    assert _in_source(fixed, tmp_path / "expressions_of_a_gpu.py") == sum(map(calls, fixed))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 31))
def test_random_expressions(tmp_path, seed):
    statements = expressions.random_statements(seed, 80)
    _compare(statements, tmp_path / f"random_expressions_{seed}.py")
    # Conditions that are known when the kernel is traced leave calls out.
    assert _in_source(statements, tmp_path / f"expressions_of_a_gpu_{seed}.py") <= sum(map(calls, statements))


@T.prim_func
def _loops(ctx: N.Context(), c: T.Tensor((6, 256), "int32"), out: T.Tensor((6, 256), "int32")):
    with T.Kernel(1, threads=32):
        me = N.my_pe()
        tx = T.get_thread_binding()
        for i in T.Parallel(256):
            out[0, i] = N.atomic_add(c[0, i], 2, me) % 3 + i
        for i in T.Parallel(256):
            out[1, i] = N.atomic_add(c[1, i], 2, me) // 2 if i % 4 == 1 else N.ld(c[0, i])
        for i in T.Parallel(256):
            out[2, i] = T.atomic_add(c[2, i], 2, return_prev=True) % 3 + i
        if tx == 0:
            for i in T.vectorized(256):
                out[3, i] = N.atomic_add(c[3, i], 2, me) % 3
            for i in T.vectorized(256):
                out[4, i] = N.atomic_add(c[4, i], 2, me) if i % 2 == 0 and N.ld(c[3, i]) == 2 else 9
            for i in T.vectorized(64):  # some columns are negative: cut off at the row's edge, as on a GPU
                out[5, i % 4 + N.atomic_add(c[5, i], 2, me)] = N.atomic_add(c[5, i % 8 + 8], 1, me) % 5


@ranks.on(1, TSN_DEVICE="simulator")
def test_loops_over_threads_and_vectors():
    c, out = tsn.zeros((6, 256), dtype=torch.int32), tsn.zeros((6, 256), dtype=torch.int32)
    c[5, 8:16] = -8
    tsn.compile(_loops)(c, out)
    i = torch.arange(256, dtype=torch.int32)
    assert c[0].eq(2).all() and c[2].eq(2).all() and c[3].eq(2).all()
    assert torch.equal(out[0], i) and torch.equal(out[2], i) and out[3].eq(0).all()
    assert torch.equal(c[1], 2 * (i % 4 == 1).int()) and torch.equal(out[1], 2 * (i % 4 != 1).int())
    assert torch.equal(c[4], 2 * (i % 2 == 0).int()) and torch.equal(out[4], 9 * (i % 2).int())
    assert c[5, :8].eq(2).all() and c[5, 8:16].eq(2).all() and c[5, 16:64].eq(2).all()


REFUSED = {
    "arm of a choice": (
        "out[0] = T.if_then_else(run > 5, N.atomic_add(c[0], 1, me), 0)",
        r"N.atomic_add stands in an arm of a choice such as T.if_then_else, .*bind it to a name first",
    ),
    "kept beyond its condition": (
        "v = [0]|if run > 5 and keep(v, N.ld(c[0])) > 1:|    out[0] = v[0]",
        r"N.ld is used a second time outside of the condition that contains it; bind it to a name first",
    ),
    "lost": (
        "if run > 5 and N.atomic_add(c[0], 1, me) * 0 < run:|    out[0] = 1",
        r"N.atomic_add has a result that the condition that contains it does not use; bind it to a name first",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_effects_that_would_be_repeated_are_refused(tmp_path, name):
    statement, expected = REFUSED[name]
    path = tmp_path / "refused.py"
    with pytest.raises(KernelError, match=rf"kernel kernel: {expected}.*\n  at {re.escape(str(path))}:\d+$"):
        tsn.compile(expressions.kernel([statement], path), target="simulator")


def test_bound_names_stand_in_arms_of_choices(tmp_path):
    statements = ["v = N.atomic_add(c[0], 1, me)|out[0] = T.if_then_else(run > 5, v, 7)", "out[0] = T.abs(N.ld(c[0]))"]
    assert _in_source(statements, tmp_path / "named.py") == 2


def test_a_result_that_nobody_uses_is_a_plain_call(tmp_path):
    path = tmp_path / "unused.py"
    source = inspect.cuda_source(expressions.kernel(["N.atomic_add(c[0], 1, me)", "N.ld(x[run])"], path))
    assert not re.search(r"= tsn::(atomic|ld)", source) and len(re.findall(r"^ +tsn::(?:atomic|ld)", source, re.M)) == 2
