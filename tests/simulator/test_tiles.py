"""Kernels of tiles give torch's results: T.gemm, T.Pipelined, T.Persistent, T.copy through shared memory, reductions."""

import math
import time

import pytest
import torch

import tilescale_net as tsn
from tests.kernels.support import assert_close
from tests.simulator import tiles
from tilescale_net.runtime import simulator

TORCH = {"float8_e4m3": torch.float8_e4m3fn}


def operand(dtype, *shape):
    """Small whole numbers, whose products and sums are exact in any order."""
    values = torch.randint(-4, 5, shape)
    return values.to(TORCH.get(dtype) or getattr(torch, dtype))


# Tiles that do not divide the sizes, each combination of operands, and every dtype.
CASES = {
    "fp16": dict(dtype="float16", tile=(64, 32, 32), transposed=(False, True)),
    "bf16": dict(dtype="bfloat16", tile=(32, 64, 32), transposed=(True, False), out="bfloat16", stages=3),
    "fp8 from registers": dict(dtype="float8_e4m3", tile=(64, 64, 32), kind="rs", stages=0),
    "fp32 to registers": dict(dtype="float32", tile=(32, 32, 32), kind="sr"),
    "int8": dict(dtype="int8", tile=(64, 64, 64), total="int32", out="int32"),
}


@pytest.mark.parametrize("case", CASES)
def test_matrix_product(case):
    options = CASES[case]
    m, n, k = 72, 80, 96
    ta, tb = options.get("transposed", (False, False))
    a = operand(options["dtype"], *((k, m) if ta else (m, k)))
    b = operand(options["dtype"], *((n, k) if tb else (k, n)))
    out = torch.full((m, n), 77, dtype=getattr(torch, options.get("out", "float32")))
    tsn.compile(tiles.matmul(m, n, k, **options), name=case.replace(" ", "_"))(a, b, out)
    want = (a.float().T if ta else a.float()) @ (b.float().T if tb else b.float())
    assert torch.equal(out, want.to(out.dtype))


def test_few_blocks_do_all_tiles():
    m, n, k, blocks = 136, 72, 64, 4
    a, b, out = operand("bfloat16", m, k), operand("bfloat16", k, n), torch.empty(m, n, dtype=torch.bfloat16)
    kernel = tsn.compile(tiles.persistent(m, n, k, (32, 32, 32), blocks, "bfloat16"))
    for seed in range(3):
        with simulator.schedule(seed):
            kernel(a, b, out.fill_(math.nan))
        assert torch.equal(out, (a.float() @ b.float()).bfloat16())


def test_attention_with_reductions():
    q, k, v = (torch.randn(96, 64).half() for _ in range(3))
    out = torch.empty_like(q)
    tsn.compile(tiles.attention(96, 64, 32, 32, "float16"))(q, k, v, out)
    want = torch.softmax(q.float() @ k.float().T * math.log(2), 1) @ v.float()
    assert_close(out.float(), want, atol=4e-3, rtol=4e-3)


def test_a_product_of_some_size_takes_no_time_to_speak_of():
    a, b, out = operand("bfloat16", 256, 256), operand("bfloat16", 256, 256), torch.empty(256, 256)
    kernel = tsn.compile(tiles.matmul(256, 256, 256, (128, 128, 64), "bfloat16", stages=3))
    before = time.process_time()
    kernel(a, b, out)
    assert torch.equal(out, a.float() @ b.float())
    assert time.process_time() - before < 3
