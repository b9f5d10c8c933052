"""Kernels of the package are compiled with less work than tilelang does, and become the same."""

import functools
import re

import pytest
from tilelang import tvm
from tvm.target import Target

from tests import sass
from tests.generated import factory_of
from tests.kernels import test_generated_code
from tests.kernels.fused import test_generated_code as fused
from tests.kernels.moe import test_generated_code as moe
from tilescale_net.compiler import jit, lowering, shipped, toolchain
from tilescale_net.compiler.passes import prepare
from tilescale_net.errors import ConfigurationError
from tilescale_net.kernels import p2p

SM_90A = {"kind": "cuda", "arch": "sm_90a"}
pytestmark = pytest.mark.skipif(toolchain.find_tool("nvdisasm") is None, reason="lacks nvdisasm")
ALL = [
    *((factory_of(name), arguments) for name, arguments in test_generated_code.CASES),
    *((factory_of(f"{moe.PACKAGE}.{name}"), arguments) for name, arguments in moe.CASES),
    *fused.CASES.values(),
    *fused.LONG.values(),
]


@functools.cache
def lowered(number: int) -> tuple[str, str, int | None]:
    """Source of a kernel of ALL as tilelang lowers it and as it ships, and threads of a block."""
    factory, arguments = ALL[number]
    func = factory.trace(**arguments)
    configs = jit.required_pass_configs(func, factory.pass_configs)
    ready = prepare(func).func
    sources = [jit.lower(ready, SM_90A, configs, i).kernel_source for i in ((), [shipped.SimplifyTwice()])]
    return *sources, jit.known_threads(ready, configs)


def _number(name: str) -> int:
    return next(i for i, (factory, _) in enumerate(ALL) if factory.__name__ == name)


def _ids(numbers) -> list[str]:
    return [f"{ALL[i][0].__name__}-{i}" for i in numbers]


QUICK = [_number(name) for name in ("all_gather_mapped", "push", "exchange_weights")]


def check_source(number: int) -> None:
    as_tilelang, as_it_ships, _ = lowered(number)
    assert as_it_ships == as_tilelang


@pytest.mark.parametrize("number", QUICK, ids=_ids(QUICK))
def test_the_source_of_a_kernel_is_the_same(number):
    check_source(number)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(ALL)), ids=_ids(range(len(ALL))))
def test_the_source_of_every_kernel_is_the_same(number):
    check_source(number)


def instructions(source: str, threads: int | None) -> list[str]:
    cubin = toolchain.compile_source(source, "cubin", SM_90A, threads=threads)
    return sass.names(cubin, re.search(r"void (?:__launch_bounds__\([^)]*\) )?(\w+)\(", source)[1])


def check_instructions(number: int) -> None:
    source, _, threads = lowered(number)
    few = shipped.with_few_headers(source)
    if few is None:
        pytest.skip("needs tilelang's headers")
    before, after = instructions(source, threads), instructions(few, threads)
    # tilelang's AtomicAddRet asks at run time in which memory its address is; atomicAdd is told.
    if "AtomicAddRet" not in source and "fp8_e4" not in source:
        assert after == before
    local = [sum(name.startswith(("LDL", "STL")) for name in names) for names in (before, after)]
    assert len(after) <= len(before) and local[1] <= local[0]


def test_few_headers_give_the_same_machine_code():
    check_instructions(_number("meet"))


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(ALL)), ids=_ids(range(len(ALL))))
def test_few_headers_give_every_kernel_its_machine_code(number):
    check_instructions(number)


HEAD = """#include <tl_templates/cuda/reduce.h>
#include <tl_templates/cuda/debug.h>

extern "C" __global__ void k_kernel(int* p, int n);
extern "C" __global__ void k_kernel(int* p, int n) {
  %s
}
"""


@pytest.mark.parametrize(
    "statement",
    [
        "half_t a = half_t(p[0]);",
        "p[0] = tl::AllReduce<tl::SumOp>::run(p[0]);",
        "p[0] = __habs(p[0]);",
        "fp8_e5_t b;",
        "cutlass::bfloat16_t b;",
    ],
)
def test_code_that_may_need_tilelangs_headers_has_them(statement):
    assert shipped.with_few_headers(HEAD % "p[0] = min(p[1], n);") is not None
    assert shipped.with_few_headers(HEAD % statement) is None
    assert shipped.with_few_headers((HEAD % "").replace("reduce.h", "copy_sm90.h")) is None


def test_a_kernel_that_few_headers_reject_is_compiled_with_all(monkeypatch):
    """An atomic with an order is another function, which nvcc does not find."""
    compiled = []
    monkeypatch.setattr(shipped, "compile_cuda", lambda code, *_, **__: compiled.append(code) or _rejecting(code))
    source = HEAD % "AtomicAdd(p, n, 2);"
    with shipped._few_headers():
        assert shipped.compile_with_few_headers(source) == b"code"
    assert [("tilelang_types.h" in code) for code in compiled] == [True, False]


def _rejecting(code: str) -> bytes:
    """As tilelang's, whose errors are RuntimeError."""
    if "tilelang_types.h" in code:
        try:
            toolchain.compile_source(code, "cubin", SM_90A)
        except ConfigurationError as error:
            raise RuntimeError(str(error)) from None
    return b"code"


def test_a_library_is_as_tvm_writes_it(tmp_path):
    """The launches and, byte for byte, the machine code."""
    func = prepare(p2p.push.trace(64, threads=32)).func
    with lowering.enabled():
        artifact = shipped.lower(func, Target(SM_90A), jit.required_pass_configs(func, None), toolchain.compile_flags())
    shipped.link(artifact, tmp_path / "ours.so")
    artifact.rt_mod.export_library(str(tmp_path / "theirs.so"))
    ours, theirs = ((tmp_path / f"{name}.so").read_bytes() for name in ("ours", "theirs"))
    start = theirs.index(b"\x7fELF", 1)  # of the cubin
    assert theirs[start : start + 4096] in ours
    assert tvm.runtime.load_module(str(tmp_path / "ours.so"))["main"] is not None
