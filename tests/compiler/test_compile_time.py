"""nvcc's processor time for a kernel, against the same kernel without its primitives."""

import re
import resource

import pytest
import tilelang.language as T

import tilescale_net as tsn
import tilescale_net.language as N
from tests.generated import Traced, factory_of
from tests.kernels.moe import test_generated_code as moe
from tests.kernels.test_generated_code import KERNELS, tools  # noqa: F401 (a fixture)
from tests.shorthand import f32, u64
from tilescale_net.compiler import inspect

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800), pytest.mark.usefixtures("tools")]
# Without the probe of a benchmark, whose C++ is its own.
CASES = {name: (factory_of(name), v[0]) for name, v in KERNELS.items() if name.startswith("tilescale_net.")}
CASES |= {f"moe.{name}": (moe._factory(name), variants[0]) for name, variants in moe.KERNELS.items()}
# Times as much as without; and what each copy after the first adds, whose code is inlined where it is called.
MOST, EACH_COPY = 2.0, 0.4


def _closing(text: str, at: int) -> int:
    """Where the bracket that opens at `at` has been closed."""
    opening, closing = text[at], {"(": ")", "<": ">"}[text[at]]
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i + 1
    raise ValueError(f"nothing closes {text[at : at + 80]!r}")


def without_primitives(source: str) -> str:
    """The kernel with each call of a primitive taken out: a statement is gone, a value is 1."""
    found, at = [], 0
    while call := re.compile(r"tsn::\w+").search(source, at):
        end = call.end()
        for opening in "<(":
            if source[end] == opening:
                end = _closing(source, end)
        found.append(source[at : call.start()])
        statement = source[end] == ";" and source[: call.start()].rstrip()[-1] in "{};"
        found.append("" if statement else "1")
        at = end
    return re.sub(r"(\*\s*\w+ = )1;", r"\1nullptr;", "".join([*found, source[at:]]))


def seconds(source: str, traced: Traced) -> float:
    """Processor time of nvcc and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    inspect.compile_source(source, "cubin", extra=traced.flags, threads=traced.threads)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(name: str) -> tuple[float, float, float]:
    """Seconds of a kernel with its primitives and without, and how many times as much it may take.

    The seconds are the least of two to five turns, as other work allows.
    """
    traced = Traced.of(*CASES[name], inspect.SM_90)
    bare = without_primitives(traced.source)
    assert "tsn::" in traced.source and "tsn::" not in bare
    copies = len(re.findall(r"tsn::(?:put|get)(?:_signal|_rows|_signal_rows)?<", traced.source))
    most = MOST + EACH_COPY * max(0, copies - 1)
    whole, rest = [], []
    for turn in range(5):
        whole.append(seconds(traced.source, traced))
        rest.append(seconds(bare, traced))
        if turn and min(whole) <= most * min(rest):
            break
    return min(whole), min(rest), most


@pytest.mark.parametrize("name", CASES)
def test_primitives_at_most_double_the_compile_time_of_a_kernel(name):
    whole, rest, most = measured(name)
    print(f"{name}: {whole:.2f} / {rest:.2f} s = {whole / rest:.2f}, at most {most:.1f}", flush=True)
    assert whole <= most * rest, (name, whole, rest)


@tsn.jit
def ten_copies(threads=256):
    """One of each way to copy: by threads, warps and blocks, by loads and stores and in bulk, and rows of boxes."""

    @T.prim_func
    def main(ctx: N.Context(), x: f32(1 << 20), y: f32(1 << 20), signal: u64(4), n: T.int32):
        with T.Kernel(1, threads=threads):
            pe = (N.my_pe() + 1) % N.n_pes()
            N.put_block(y[0], x[0], pe, count=n, engine="ldst")
            N.put_block(y[4096], x[4096], pe, count=n, engine="bulk")
            N.put_block(y[8192], x[8192], pe, count=n)
            N.put_warp(y[12288], x[12288], pe, count=n)
            N.put_thread(y[16384], x[16384], pe, count=n)
            N.get_block(y[20480], x[20480], pe, count=n)
            N.get_warp(y[24576], x[24576], pe, count=n)
            N.get_thread(y[28672], x[28672], pe, count=n)
            N.put_signal_block(y[32768], x[32768], pe, signal[0], 1, count=n)
            N.put_signal_warp(y[36864], x[36864], pe, signal[1], 1, count=n)

    return main


def test_ten_different_copies():
    traced = Traced.of(ten_copies, {}, inspect.SM_90)
    spent = seconds(traced.source, traced)
    print(f"ten copies: {spent:.1f} s")
    assert spent <= 20, spent
