"""tsn.jit and compiled kernels: caching, names, arguments, and how the context reaches the kernel."""

import ctypes
import dataclasses
import enum
import os
import pickle
import re
import struct
import threading
import types
from copy import deepcopy

import numpy as np
import pytest
import tilelang
import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N
from tests import ranks
from tests.compiler import kernels
from tilescale_net.compiler import inspect, jit, toolchain, versions
from tilescale_net.compiler.ir import block_threads, kernel_name
from tilescale_net.compiler.kernel import CudaKernel, Kernel
from tilescale_net.compiler.passes import prepare
from tilescale_net.errors import KernelError, TileScaleError
from tilescale_net.runtime import worlds
from tilescale_net.runtime.context import HEADER_WORDS
from tilescale_net.runtime.fabric import RunningProxy

MINE = torch.zeros(HEADER_WORDS, dtype=torch.int64)  # a context that a caller passes


class Recorder(Kernel):
    """A kernel that notes the arguments of its function."""

    def __init__(self, func):
        prepared = prepare(func)
        super().__init__(kernel_name(prepared.func), prepared, "", "none")
        self.prim_func = prepared.func
        self.calls = []

    def _function(self):
        return lambda *args: self.calls.append(args)


def _pretend(monkeypatch, world):
    """Pretend that init() has made `world`, or None."""
    monkeypatch.setattr(worlds, "_alive", [] if world is None else [world])
    monkeypatch.setattr(worlds, "launch_generation", world)


@pytest.fixture
def world(monkeypatch):
    """Pretend that init() was called; the context tensor is the word in `context_tensor`."""
    fake = types.SimpleNamespace(context_tensor="context", device_kind="cuda")
    _pretend(monkeypatch, fake)
    return fake


def test_the_context_comes_first_in_any_signature(world):
    kernel = Recorder(kernels.pusher())  # x, y, ctx, flag, pe
    assert kernel.parameters == ("x", "y", "flag", "pe")
    assert kernel.prim_func.buffer_map[kernel.prim_func.params[0]].name == "ctx"
    kernel(1, 2, 3, 4)
    kernel(5, 6, 7, 8)
    assert kernel.calls == [("context", 1, 2, 3, 4), ("context", 5, 6, 7, 8)]


def test_an_explicit_context_stands_where_the_author_put_it(world):
    kernel = Recorder(kernels.pusher())
    kernel(1, 2, MINE, 3, 4)
    kernel(1, 2, 3, 4)
    assert kernel.calls == [(MINE, 1, 2, 3, 4), ("context", 1, 2, 3, 4)]


def test_a_new_world_brings_its_own_context(world, monkeypatch):
    kernel = Recorder(kernels.pusher())
    kernel(1, 2, 3, 4)
    _pretend(monkeypatch, types.SimpleNamespace(context_tensor="new", device_kind="cuda"))
    kernel(1, 2, 3, 4)
    assert [call[0] for call in kernel.calls] == ["context", "new"]


def test_a_kernel_for_another_device_is_not_launched(world):
    kernel = Recorder(kernels.pusher())
    world.device_kind = "simulator"
    with pytest.raises(
        KernelError, match="was compiled for a GPU, but init has taken the simulator; compile kernels after"
    ):
        kernel(1, 2, 3, 4)
    kernel.target, world.device_kind = "simulator", "cuda"
    with pytest.raises(KernelError, match="was compiled for the simulator, but init has taken a GPU"):
        kernel(1, 2, 3, 4)
    kernel(1, 2, MINE, 3, 4)  # a caller that brings a context knows its world
    assert kernel.calls == [(MINE, 1, 2, 3, 4)]


def test_without_a_world(monkeypatch):
    _pretend(monkeypatch, None)
    kernel = Recorder(kernels.pusher())
    with pytest.raises(TileScaleError, match="not initialised"):
        kernel(1, 2, 3, 4)
    kernel(1, 2, MINE, 3, 4)
    assert kernel.calls == [(MINE, 1, 2, 3, 4)]


NARROW = {
    "bool": (0, 1),
    "int8": (-(2**7), 2**7 - 1),
    "uint8": (0, 2**8 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "uint32": (0, 2**32 - 1),
    "int32": (-(2**31), 2**31 - 1),
}


@pytest.mark.parametrize("context", [True, False])
def test_integers_that_do_not_fit_are_refused(world, context):
    @T.prim_func
    def take(
        ctx: N.Context() if context else None, a: T.bool, b: T.int8, c: T.uint8, d: T.int16, e: T.uint32, f: T.int32,
        g: T.int64, h: T.float32,
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            T.evaluate(a & (b + c + d + e + f + g > T.cast(h, "int64")))

    kernel = Recorder(take)
    first = ("context",) if context else ()
    for end in (0, 1):
        good = [limits[end] for limits in NARROW.values()] + [(-(2**63), 2**63 - 1)[end], 2**70]
        kernel(*good)
        kernel(*map(np.int64, good[:6]), *good[6:])
        assert kernel.calls[-2:] == [(*first, *good)] * 2
        for place, (dtype, (low, high)) in enumerate(NARROW.items()):
            for kind in (int, np.int64):
                values = [*good]
                values[place] = kind((low - 1, high + 1)[end])
                with pytest.raises(KernelError) as caught:
                    kernel(*values)
                text = f"argument {'abcdef'[place]}: expected {dtype}; got {values[place]}, and {dtype} is from {low} to {high}"
                assert text in str(caught.value)
    assert len(kernel.calls) == 4


def test_wrong_number_of_arguments(world):
    kernel = Recorder(kernels.pusher())
    for args in ((), (1, 2, 3), (1, 2, 3, 4, 5, 6)):
        with pytest.raises(TypeError, match=rf"kernel push takes 4 arguments \(x, y, flag, pe\), got {len(args)}"):
            kernel(*args)


def test_a_kernel_without_primitives_needs_no_context(monkeypatch):
    _pretend(monkeypatch, None)

    @T.prim_func
    def fill(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                x[i] = 1.0

    kernel = Recorder(fill)
    kernel(7)
    assert kernel.calls == [(7,)]


def test_factories_compile_once_per_arguments(monkeypatch):
    made = []
    monkeypatch.setattr(jit, "compile", lambda func, **options: made.append((func, options)) or len(made))
    factory = tsn.jit(target=inspect.SM_90, name="other")(kernels.pusher)
    assert factory.__name__ == "pusher"
    assert factory(64) == factory(64) == 1
    assert factory(n=64) == factory(n=64) == 2
    assert factory(64, threads=64) == 3
    assert len(made) == 3 and made[0][1]["name"] == "other"


class Side(enum.IntEnum):
    LEFT = 1


@dataclasses.dataclass(frozen=True)
class Tile:
    scale: float | tuple


def test_arguments_that_are_equal_and_differ_make_kernels_of_their_own(monkeypatch):
    monkeypatch.setattr(jit, "compile", lambda func, **options: object())
    factory = tsn.jit(target=inspect.SM_90)(lambda value: kernels.pusher())
    nan, other_nan = (struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | bits))[0] for bits in (0, 1))
    values: list = [1, 1.0, True, np.int64(1), np.float64(1), np.float32(1), Side.LEFT, 1 + 0j, (1,), (1.0,), ((1,),)]
    values += [((True,),), 0.0, -0.0, (0.0,), (-0.0,), nan, other_nan, Tile(1), Tile(1.0), Tile((0.0,)), Tile((-0.0,))]
    values += [frozenset({1}), frozenset({1.0}), torch.float32, torch.float16, torch.Size((1,)), "1", None]
    made = [factory(value) for value in values]
    assert len(set(map(id, made))) == len(values)
    assert [factory(deepcopy(value)) for value in values] == made
    assert factory(1) is made[0] and factory(value=1) is factory(value=1) and factory(value=1) is not factory(value=1.0)


@tsn.jit
def copy(n):
    return kernels.pusher()


def test_kernels_belong_to_their_process_and_factories_travel_by_name(world):
    kernel = Recorder(kernels.pusher())
    assert deepcopy({"layer": kernel})["layer"] is kernel
    with pytest.raises(TypeError, match=f"kernel {kernel.name} cannot be pickled.* factory"):
        pickle.dumps(kernel)
    assert pickle.loads(pickle.dumps(copy)) is copy and deepcopy(copy) is copy


@tsn.jit
def numbers(n):
    @T.prim_func
    def main(x: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=n):
            for i in T.Parallel(n):
                x[i] = T.cast(i, "float32")

    return main


@pytest.mark.parametrize("device", ["simulator", "auto"])
def test_kernels_are_for_the_device_that_init_has_taken(device):
    """With any environment by then: the tensors are there, and nowhere else."""
    ranks.run(1, _after_another_choice, env={"TSN_DEVICE": device})


def _after_another_choice():
    there = tsn.world().device_kind
    os.environ["TSN_DEVICE"] = "cuda" if there == "simulator" else "simulator"
    x = tsn.zeros(64)
    numbers(64)(x)
    tsn.compile(numbers.trace(64))(x)
    tsn.barrier()
    assert torch.equal(x.cpu(), torch.arange(64.0))


def test_factories_name_mistakes():
    with pytest.raises(KernelError, match="arguments of a kernel factory must be hashable"):
        tsn.jit(kernels.pusher)([1])
    with pytest.raises(KernelError, match="<lambda> must return a T.prim_func, but returned int"):
        tsn.jit(lambda: 3, target="simulator")()
    with pytest.raises(KernelError, match="decorates functions, not 3"):
        tsn.jit(3)
    with pytest.raises(KernelError, match="takes a T.prim_func, not 3"):
        tsn.compile(3)
    with pytest.raises(KernelError, match="'a b' is not an identifier"):
        tsn.compile(kernels.pusher(), target="simulator", name="a b")


def test_kernels_that_return_tensors_are_refused():
    @T.prim_func
    def maker(ctx: N.Context(), x: T.Tensor((64,), "float32")):
        y = T.empty((64,), "float32")
        with T.Kernel(1, threads=64):
            N.put_block(x, x, 1)
        return y

    with pytest.raises(KernelError, match="kernel maker returns T.empty tensors; pass every output as an argument"):
        tsn.compile(maker, target=inspect.SM_90)


@pytest.fixture(scope="module")
def compiled():
    return tsn.compile(kernels.pusher(engine="bulk", ring=(4, 1024)), target=inspect.SM_90, name="tests::renamed")


def test_compiled_without_a_gpu(compiled):
    assert isinstance(compiled, CudaKernel)
    assert (compiled.name, compiled.target, compiled.ring_bytes) == ("tests_renamed", inspect.SM_90, 4096)
    assert repr(compiled).startswith("<kernel tests_renamed(x, y, flag, pe) for")


def test_arguments_are_checked_before_anything_runs(compiled):
    x, flag = torch.zeros(1024), torch.zeros(1, dtype=torch.int64)
    context = torch.zeros(HEADER_WORDS, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="expected cuda|device_type|runs on a GPU"):
        compiled(x, x, context, flag, 1)


def test_ptx_and_sass(compiled):
    ptx = compiled.ptx()
    symbol = re.search(r"\.entry (\w+)", ptx).group(1)
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_char_p
    assert demangle(symbol.encode(), None, None, None) == b"tests::renamed(_kernel)"  # what profilers show
    assert "cp.async.bulk.shared" in ptx and "cp.async.bulk.global" in ptx
    assert "UBLKCP" in compiled.sass()


def test_ranks_of_a_host_compile_a_kernel_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(tilelang.env, "TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    order = []

    def second():
        with toolchain.once_per_host("same"):
            order.append("second")

    thread = threading.Thread(target=second)
    with toolchain.once_per_host("same"):
        thread.start()
        with toolchain.once_per_host("another"):
            order.append("another kernel")
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["another kernel", "first", "second"]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(tilelang.env, "TILELANG_CACHE_DIR", str(blocked))
    with toolchain.once_per_host("kernel"):
        pass


def test_kernel_level_options_are_kept_and_overridden():
    @T.prim_func
    def annotated(ctx: N.Context(), x: T.Tensor((64,), "float32")):
        T.annotate_pass_configs({"tl.enable_fast_math": True, "tl.disable_vectorize_256": True})
        with T.Kernel(1, threads=64):
            N.put_block(x, x, 1)

    configs = jit.required_pass_configs(annotated, {"tl.enable_fast_math": False})
    assert configs["tl.enable_fast_math"] is False and configs["tl.disable_vectorize_256"]
    assert configs["tl.disable_warp_specialized"] is True


def test_uint64_parameters_are_refused_before_they_reach_a_gpu():
    @T.prim_func
    def main(ctx: N.Context(), n: T.uint64):
        with T.Kernel(1, threads=32):
            N.barrier_all()

    with pytest.raises(KernelError, match="parameter n is uint64.*T.int64"):
        tsn.compile(main, target="simulator")


@pytest.mark.parametrize("staged", [None, False, True])
def test_launches_keep_out_of_the_way_of_a_proxy(monkeypatch, staged):
    """The first launch waits for the device, as do launches on the default stream where data are staged."""
    events, stream = [], ["default"]
    proxy = None
    if staged is not None:
        proxy = RunningProxy.__new__(RunningProxy)
        proxy.properties = {"staged": staged}
    there = types.SimpleNamespace(
        proxy=proxy,
        device=torch.device("cuda", 1),
        device_kind="cuda",
        context_tensor=torch.zeros(4, dtype=torch.int64),
    )
    _pretend(monkeypatch, there)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: events.append("wait"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream[0])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    adapter = types.SimpleNamespace(get_exportable_executable=lambda: {"main": lambda *args: events.append("launch")})
    compiled = types.SimpleNamespace(get_kernel_source=lambda: "", adapter=adapter)
    kernel = CudaKernel.compiled(prepare(kernels.pusher()), compiled, {})
    kernel(1, 2, 3, 4)
    kernel(1, 2, 3, 4)
    stream[0] = "another"
    kernel(1, 2, 3, 4)
    first, after = ["wait"] * (staged is not None), ["wait"] * (staged is True)
    assert events == [*first, "launch", *after, "launch", *after, "launch"]


def _launches(first, second=None):
    """A kernel with one or two launches, whose blocks are that large."""

    @T.prim_func
    def main(ctx: N.Context(), x: T.Tensor((1024,), "float32"), pe: T.int32):
        with T.Kernel(1, threads=first):
            N.put_block(x, x, pe)
        if second is not None:
            with T.Kernel(1, threads=second):
                N.put_block(x, x, pe)

    return main


@pytest.mark.parametrize(
    "threads, known", [((256,), 256), ((256, 256), 256), ((256, 128), None), (((32, 4),), None), (((64, 1, 1),), 64)]
)
def test_the_size_of_blocks_is_known_where_all_launches_agree(threads, known):
    func = _launches(*threads)
    assert block_threads(prepare(func).func) == known
    flags = toolchain.compile_flags(threads=known)
    assert (f"-DTSN_BLOCK_THREADS={known}" in flags) == (known is not None)


def test_a_block_of_known_size_computes_with_no_other_dimension():
    assert "%tid.y" not in inspect.ptx(_launches(256)) and "%ntid.x" not in inspect.ptx(_launches(256))
    assert "%tid.y" in inspect.ptx(_launches((32, 4)))


def test_a_long_chain_of_elif_names_a_remedy(tmp_path, monkeypatch):
    chain = [f"            {'elif' if i else 'if'} which == {i}:\n                out[{i}] = {i}" for i in range(24)]
    text = f"""
import tilelang.language as T
import tilescale_net as tsn, tilescale_net.language as N

@tsn.jit
def long_chain(which):
    @T.prim_func
    def main(ctx: N.Context(), out: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
{chr(10).join(chain)}
    return main
"""
    (tmp_path / "chain_of_elif.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import chain_of_elif

    with pytest.raises(KernelError) as caught:
        chain_of_elif.long_chain.trace(20)
    said = re.fullmatch(
        r"kernel long_chain: blocks .*write cases .* as `if` after `if`,.*\n  at (.*):(\d+)", str(caught.value)
    )
    assert said[1] == str(tmp_path / "chain_of_elif.py")
    assert text.splitlines()[int(said[2]) - 1].lstrip().startswith(("elif", "out["))


def test_errors_of_nvcc_name_the_kernel():
    @tsn.jit(target={"kind": "cuda", "arch": "sm_90"})
    def unknown_function(dtype):
        @T.prim_func
        def main(x: T.Tensor((4,), dtype)):
            with T.Kernel(1, threads=32):
                T.evaluate(T.call_extern("int32", "no_such_function", T.address_of(x[0])))

        return main

    with pytest.raises(KernelError, match='nvcc rejects its CUDA source\n.*"no_such_function" is undefined'):
        unknown_function("float32")


def test_kernels_with_pdl_sync_are_launched_dependent():
    """tilelang's runtime goes by the launch parameters of the device function."""

    def parameters(dependent: bool) -> list[str]:
        @T.prim_func
        def kernel(x: T.Tensor((128,), "float32")):
            with T.Kernel(1, threads=128):
                if dependent:
                    T.pdl_sync()
                x[T.get_thread_binding()] = 1

        with versions.dependent_launches():
            artifact = jit.lower(prepare(kernel).func, inspect.SM_90, {})
        (func,) = artifact.device_mod.functions.values()
        return [str(name) for name in func.attrs["tirx.kernel_launch_params"]]

    plain = parameters(False)
    assert parameters(True) == ["tirx.use_programtic_dependent_launch", *plain] and "blockIdx.x" in plain[0]
