"""Arguments that do not fit are named in the words of the kernel's author."""

import subprocess
import sys

import numpy as np
import pytest
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.shorthand import f32, i32
from tilescale_net.compiler import inspect
from tilescale_net.errors import KernelError


@T.macro
def _store(to, value, amount):
    """tilelang calls a variable by the name that a macro gives it, also where it is a parameter of the kernel."""
    to[0] = value * amount


@tsn.jit
def scaled(n):
    rows = T.dynamic("rows")

    @T.prim_func
    def main(x: f32(n), ctx: N.Context(), m: i32(rows, 4), k: i32(rows), factor: T.float32, times: T.int32):
        with T.Kernel(1, threads=32):
            N.put_value(x[0], x[1] * factor, N.my_pe())
            _store(k, m[0, 0], times)

    return main


def _good(device="cpu"):
    return {
        "x": torch.ones(64, device=device),
        "m": torch.ones(5, 4, dtype=torch.int32, device=device),
        "k": torch.ones(5, dtype=torch.int32, device=device),
        "factor": 2.0,
        "times": 3,
    }


WRONG = {
    "shape": ("x", torch.ones(32), "argument x: expected float32[64], contiguous; got float32[32]"),
    "rank": ("x", torch.ones(64, 1), "argument x: expected float32[64], contiguous; got float32[64, 1]"),
    "dtype": ("x", torch.ones(64).double(), "argument x: expected float32[64], contiguous; got float64[64]"),
    "strides": (
        "x",
        torch.ones(128)[::2],
        "argument x: expected float32[64], contiguous; got float32[64] with strides (2,); .contiguous() makes",
    ),
    "rows apart": (
        "m",
        torch.ones(5, 8, dtype=torch.int32)[:, :4],
        "argument m: expected int32[rows, 4], contiguous; got",
    ),
    "another size": (
        "k",
        torch.ones(6, dtype=torch.int32),
        "argument k: expected int32[rows], contiguous; got int32[6], but rows is 5 in argument m",
    ),
    "negative": (
        "x",
        torch._neg_view(torch.ones(64)),
        "is a view of the negative of its memory; pass its resolve_neg()",
    ),
    "nothing": ("x", None, "argument x: expected float32[64], contiguous; got None"),
    "numpy": (
        "x",
        np.ones(64, "float32"),
        "got a numpy.ndarray of float32[64], which torch.from_numpy makes a tensor of",
    ),
    "number": ("x", 3, "argument x: expected float32[64], contiguous; got 3 (int)"),
    "tensor for a number": ("times", torch.ones(64), "argument times: expected int32; got float32[64]"),
    "fraction": ("times", 1.5, "argument times: expected int32; got 1.5 (float)"),
    "too large": (
        "times",
        2**32 + 7,
        "argument times: expected int32; got 4294967303, and int32 is from -2147483648 to 2147483647",
    ),
    "too small": ("times", -(2**31) - 1, "got -2147483649, and int32 is from -2147483648 to 2147483647"),
    "numpy's": ("times", np.int64(2**31), "got 2147483648, and int32 is from -2147483648 to 2147483647"),
    "scalar tensor": (
        "times",
        torch.tensor(3, dtype=torch.int32),
        "argument times: expected int32; got int32[]; give its .item()",
    ),
    "text": ("factor", "much", "argument factor: expected float32; got 'much' (str)"),
}


@ranks.on(1, TSN_DEVICE="simulator")
def test_messages_of_the_simulator():
    kernel = scaled(64)
    good = {name: tsn.zeros(v.shape, dtype=v.dtype) if hasattr(v, "shape") else v for name, v in _good().items()}
    kernel(**good)
    kernel(good["x"], good["m"], times=3, k=good["k"], factor=1)
    kernel(**good | {"times": np.int16(5), "factor": np.float32(2)})
    assert good["k"][0] == good["m"][0, 0] * 5
    found = {}
    for case, (name, value, _) in WRONG.items():
        try:
            kernel(*{**good, name: value}.values())
            found[case] = "nothing"
        except KernelError as error:
            found[case] = str(error)
    for case, args, named in (
        ("missing", (good["x"],), {"k": good["k"]}),
        ("unknown", (good["x"],), {"y": 1}),
        ("twice", (good["x"],), {"x": 1}),
        ("too many", (*good.values(), good["x"]), {}),
        ("context and another size", (good["x"][:32], tsn.world().context_tensor, *[*good.values()][1:]), {}),
    ):
        try:
            kernel(*args, **named)
        except (TypeError, KernelError) as error:
            found[case] = str(error)
    view = good["x"][:]
    tsn.free(good["x"])
    reused = tsn.zeros(64)
    assert reused.data_ptr() == view.data_ptr()
    kernel(**good | {"x": reused})
    with pytest.raises(KernelError, match="^kernel scaled: argument x was freed by tilescale_net.free$"):
        kernel(**good | {"x": view})
    for case, (_, _, expected) in WRONG.items():
        assert found[case].startswith("kernel scaled: argument ") and expected in found[case], found[case]
        assert "int64[" not in found[case] and "ABI" not in found[case]
    assert found["missing"] == "kernel scaled takes 5 arguments (x, m, k, factor, times); m, factor, times missing"
    unknown = "kernel scaled got argument y which it does not take; its arguments are x, m, k, factor, times"
    assert found["unknown"] == unknown
    assert found["twice"].startswith("kernel scaled got argument x twice")
    assert found["too many"] == "kernel scaled takes 5 arguments (x, m, k, factor, times), got 6"
    assert found["context and another size"].startswith("kernel scaled: argument x: expected float32[64]")
    assert repr(kernel) == "<kernel scaled(x, m, k, factor, times) for simulator>"
    assert repr(scaled) == "<kernel factory scaled(n)>"


@pytest.fixture(scope="module")
def compiled():
    return tsn.compile(scaled.trace(64), target=inspect.SM_90)


@pytest.mark.parametrize("case", [name for name, (_, value, _) in WRONG.items() if name != "fraction"])
def test_messages_of_a_kernel_for_a_gpu(compiled, monkeypatch, case):
    name, value, expected = WRONG[case]
    # Without a GPU every tensor is on the wrong device; here that is left out, as if all were where they belong.
    monkeypatch.setattr(type(compiled), "_launch", None, raising=False)
    problem = compiled._problem(
        tuple({**_good(), name: value}.values()), RuntimeError("violates packed ABI constraint")
    )
    device = problem is not None and "got a tensor on cpu, and the kernel runs on a GPU" in problem
    assert device or expected in problem
    assert compiled.name == "scaled"


def test_a_kernel_typed_at_the_prompt():
    text = (
        "import tilelang.language as T, tilescale_net as tsn\n"
        "@tsn.jit(target='simulator')\ndef typed():\n  @T.prim_func\n  def main(x: T.Tensor((4,), 'float32')):\n"
        "    with T.Kernel(1):\n      x[0] = 1.0\n  return main\n\ntyped()\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode and "KernelError: typed: the source of a kernel is read from its file" in done.stderr
