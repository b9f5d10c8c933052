"""`put_vector` and `take_vectors`: every value arrives as it is, again and again, whatever is in memory meanwhile."""

import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks

VECTORS = 64
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@tsn.jit
def to_all(n_pes, dtype, at_once=0):
    """Kernel `(out, x, inbox, call)`: every PE gets the vectors of all; calls take two halves of the memory in turn.
    `at_once`: vectors that `put_vectors` is given, 1 or n_pes; 0 takes `put_vector`."""
    vector = 4 if dtype == "float32" else 8

    @T.prim_func
    def main(
        ctx: N.Context(), out: T.Tensor((n_pes, VECTORS, vector), dtype), x: T.Tensor((VECTORS, vector), dtype),
        inbox: T.Tensor((2, n_pes, VECTORS, vector), dtype), call: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=VECTORS):
            i = T.get_thread_binding()
            mine, theirs = T.alloc_local((1 + n_pes, vector), dtype), T.alloc_local((n_pes, vector), dtype)
            for copy in T.unroll(1, 1 + n_pes):
                for v in T.vectorized(vector):
                    mine[copy, v] = x[i, v]
            if at_once:
                N.put_vectors(
                    inbox[call % 2, N.my_pe(), i, 0:vector],
                    mine[1 : 1 + at_once, 0:vector],
                    n_pes,
                    (N.my_pe() + call) % n_pes,
                )
            else:
                for pe in T.serial(n_pes):
                    N.put_vector(inbox[call % 2, N.my_pe(), i, 0:vector], mine[1, 0:vector], pe)
            N.take_vectors(theirs, inbox[call % 2, 0:n_pes, i, 0:vector])
            for pe in T.unroll(n_pes):
                for v in T.vectorized(vector):
                    out[pe, i, v] = theirs[pe, v]

    return main


def _bits(dtype, *key) -> torch.Tensor:
    """Random bits of [VECTORS, vector] elements, among them what memory and messages use for themselves: -0.0 and ones."""
    chance = torch.Generator().manual_seed(sum(v * 7919**i for i, v in enumerate(key)))
    words = torch.randint(-(1 << 31), 1 << 31, (VECTORS, 4), generator=chance, dtype=torch.int64)
    special = torch.tensor([0, -(1 << 31), -1, -2, 0x7FFFFFFF, 0x8000, 1, -(1 << 31) + 1])
    drawn = torch.randint(0, 16, words.shape, generator=chance)
    return torch.where(drawn < 8, special[drawn % 8], words).to(torch.int32).view(dtype)


def _exchanged(dtype, at_once=False) -> None:
    me, n = tsn.rank(), tsn.size()
    name = str(dtype).removeprefix("torch.")
    kernel = to_all(n, name, (n if dtype == torch.float16 else 1) if at_once else 0)
    inbox = tsn.zeros((2, n, *_bits(dtype).shape), dtype)
    for call in range(5):
        x = _bits(dtype, me, call).to(tsn.device())
        out = torch.empty((n, *x.shape), dtype=dtype, device=tsn.device())
        kernel(out, x, inbox, call)
        tsn.synchronize()
        wanted = torch.stack([_bits(dtype, pe, call) for pe in range(n)]).view(torch.int32)
        found = out.cpu().view(torch.int32)
        # A word of ones, a NaN, arrives as its neighbour.
        assert torch.equal(found, torch.where(wanted == -1, -2, wanted)), (me, call)
    tsn.barrier()
    assert not inbox.view(torch.int32).any(), "memory is not left empty"
    tsn.free(inbox)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("races", ["0", "1"])
def test_all_bits_arrive(dtype, races):
    ranks.run(2, _exchanged, dtype, env={"TSN_SIM_RACES": races, "TSN_SIM_VISIBILITY": "random"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_to_all_at_once(dtype):
    """`put_vectors`, one vector for all or one for each, between a number of PEs that is no power of two."""
    ranks.run(3, _exchanged, dtype, True)


def _to_another_node(at_once) -> None:
    inbox = tsn.zeros((2, 2, VECTORS, 4))
    x = torch.ones((VECTORS, 4), device=tsn.device())
    to_all(2, "float32", at_once)(torch.empty((2, VECTORS, 4), device=tsn.device()), x, inbox, 0)
    tsn.synchronize()


@pytest.mark.parametrize("at_once", [0, 1])
def test_another_node_is_an_error(at_once):
    outcomes = ranks.launch(2, _to_another_node, at_once, env={"VIRTUAL_NODES": "2"})
    assert any(o.error and o.error[0] == "KernelError" and "not direct" in o.error[1] for o in outcomes), outcomes
