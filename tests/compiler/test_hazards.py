"""Each hazard of tilelang.jit for kernels that communicate: present without this package's fix, absent with it."""

import re
import shutil
import unittest.mock

import pytest
import tilelang
import tilelang.language as T
import torch
import tvm_ffi
from tilelang import tvm

import tilescale_net as tsn
import tilescale_net.language as N
from tests.compiler import kernels
from tests.ptx import read_only_loads
from tests.shorthand import f16, f32, i32, traced, u64
from tilescale_net.compiler import inspect, jit, lowering, toolchain
from tilescale_net.compiler.passes import hazards, prepare
from tilescale_net.errors import ConfigurationError, KernelError

SM_90A = {"kind": "cuda", "arch": "sm_90a"}


def lowered(func, target=inspect.SM_90, configs=None) -> str:
    """Source as this package lowers it, with the pass options replaced by `configs`."""
    with lowering.enabled(), tvm.transform.PassContext(opt_level=3, config=configs or {}), tvm.target.Target(target):
        return tilelang.lower(func, target=tvm.target.Target(target)).kernel_source


# -- stale reads through the non-coherent cache -------------------------------------------------------------------------


def test_without_the_fix_a_buffer_that_is_only_read_is_cached():
    prepared = prepare(kernels.reader()).func.without_attr("tl.non_restrict_params")
    source = lowered(prepared, configs={"tl.disable_warp_specialized": True})
    assert "const float* __restrict__ x" in source
    assert read_only_loads(inspect.compile_source(source, "ptx"))


@pytest.fixture(scope="module")
def reader_ptx():
    return inspect.ptx(kernels.reader())


def test_no_read_goes_through_the_non_coherent_cache(reader_ptx):
    assert "ld.global" in reader_ptx and not read_only_loads(reader_ptx)
    assert "__restrict__" not in inspect.cuda_source(kernels.reader())


def test_loads_are_neither_hoisted_above_a_wait_nor_reused_after_it(reader_ptx):
    body = reader_ptx[reader_ptx.index(".entry") :]
    loads = [m.start() for m in re.finditer(r"ld\.global\.(?:b32|f32)", body)]
    acquire = body.index("ld.acquire.sys")
    assert len(loads) == 2, "x is read once before and once after the wait"
    assert loads[0] < acquire < loads[1]


# -- warp specialisation ------------------------------------------------------------------------------------------------


def test_the_block_keeps_its_size(monkeypatch):
    """Without the fix it grows."""
    assert "__launch_bounds__(128," in inspect.cuda_source(kernels.matmul(), SM_90A)
    monkeypatch.setattr(hazards, "_without_tma", lambda copy: copy)
    grown = lowered(prepare(kernels.matmul()).func, SM_90A)
    assert int(re.search(r"__launch_bounds__\((\d+)", grown)[1]) > 128


# -- TMA ----------------------------------------------------------------------------------------------------------------


def test_copies_stay_ordinary_accesses(monkeypatch):
    """Without the fix they become TMA."""
    assert "tma" not in inspect.cuda_source(kernels.staged())
    assert "tma" not in inspect.cuda_source(kernels.matmul(), SM_90A)
    monkeypatch.setattr(hazards, "_without_tma", lambda copy: copy)
    assert "tma_store" in lowered(prepare(kernels.staged()).func, configs={"tl.disable_warp_specialized": True})


@pytest.mark.parametrize(
    "tma, named",
    [
        (lambda tile, x: T.tma_copy(tile, x), "T.tma_copy"),
        (lambda tile, x: T.atomic_add(x, tile, use_tma=True), "T.atomic_add"),
        (lambda tile, x: T.copy(x, tile, prefer_instruction="tma"), "T.copy"),
    ],
)
def test_explicit_tma_is_refused(tma, named):
    with pytest.raises(KernelError, match=rf"asks for TMA \({named}\) and uses N.wait_block: .*\n  at .*hazards.py"):
        inspect.cuda_source(_tells_of_tma(tma, "generic"))


def _tells_of_tma(tma, proxy, settle=lambda: None):
    @T.prim_func
    def kernel(ctx: N.Context(), x: f32(64, 64), flag: u64(1)):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float32")
            N.wait_block(flag[0], "ge", 1, proxy=proxy)
            tma(tile, x)
            settle()
            N.signal_block(flag[0], 1, 0)

    return kernel


@pytest.mark.parametrize(
    "tma", [lambda tile, x: T.tma_copy(tile, x), lambda tile, x: T.atomic_add(x, tile, use_tma=True)]
)
def test_a_signal_does_not_cover_a_tma_write_in_flight(tma):
    # The second waits for reads of the tile only, the third leaves a write in flight.
    for settle in (lambda: None, lambda: T.tma_store_wait(0), lambda: T.tma_store_wait(1, read=False)):
        with pytest.raises(KernelError, match="tsn.signal after it orders only ordinary writes.*\n  at .*hazards.py"):
            inspect.cuda_source(_tells_of_tma(tma, "async", settle), SM_90A)
    source = inspect.cuda_source(_tells_of_tma(tma, "async", lambda: T.tma_store_wait(0, read=False)), SM_90A)
    assert in_order(kernel_body(source), "tma_store_wait<0, false>", "tsn::signal<")


SPECIALISED = {"tl.disable_warp_specialized": False}


def test_a_wait_that_orders_the_async_proxy_lets_reads_use_tma():
    func = kernels.matmul(proxy="async", first=lambda flag: N.wait_block(flag[0], "ge", 0))
    source = inspect.cuda_source(func, SM_90A, SPECIALISED)
    assert "tl::tma_load(A_desc" in source.replace("a_desc", "A_desc") and "tma_store" not in source
    # One such wait makes all so; they come before the block is split, and all its threads take part.
    assert source.count("tsn::wait_async<tsn::Scope::block") == 2 and "tsn::wait<" not in source
    assert in_order(kernel_body(source), "tsn::wait_async", "warpgroup_reg_dealloc", "tl::tma_load")
    assert "__launch_bounds__(256," in source and "wgmma" in source


def test_the_fence_stands_between_the_acquire_and_tma():
    if toolchain.find_tool("nvcc") is None:
        pytest.skip("lacks nvcc (nvidia-cuda-nvcc with pip)")
    ptx = inspect.ptx(kernels.matmul(proxy="async"), SM_90A, SPECIALISED)
    entry = ptx[ptx.index(".entry") :]
    fence, copies = entry.index("fence.proxy.async.global"), entry.index("cp.async.bulk.tensor")
    assert entry.index("ld.acquire.sys") < fence < copies
    assert re.search(r"\bbar(rier)?\.", entry[fence:copies])
    assert "%ntid" in entry or "%tid.y" in entry  # the block is larger than its author wrote
    assert "fence.proxy.async.global" not in inspect.ptx(kernels.matmul(), SM_90A)


@pytest.mark.parametrize("call", [lambda flag: N.barrier_all(), lambda flag: N.ld(flag[0], sem="acquire", scope="sys")])
def test_waits_that_do_not_order_tma_are_refused_beside_it(call):
    with pytest.raises(
        KernelError, match=r'has a wait with proxy="async".*does not order TMA.*\n  at .*test_hazards.py'
    ):
        inspect.cuda_source(kernels.matmul(proxy="async", first=call), SM_90A)


def test_part_of_a_block_makes_no_call_of_the_whole_block():
    func = kernels.matmul(proxy="async", last=lambda flag: N.signal_block(flag[0], 1, 0))
    with pytest.raises(
        KernelError, match="tsn.signal is called at block scope by one part of a warp-specialised block"
    ):
        inspect.cuda_source(func, SM_90A, SPECIALISED)
    assert "tsn::signal<tsn::Scope::block" in inspect.cuda_source(func, SM_90A)


@pytest.mark.parametrize("key", jit.REQUIRED_CONFIGS)
def test_the_fixes_cannot_be_switched_off(key):
    value, _ = jit.REQUIRED_CONFIGS[key]
    with pytest.raises(KernelError, match=f"kernel push: pass option {key} must be {value}: "):
        tsn.compile(kernels.pusher(), target=inspect.SM_90, pass_configs={key: not value})


# -- reads that move, or happen twice ------------------------------------------------------------------------------------


def pipelined(waits_inside=True):
    @T.prim_func
    def kernel(ctx: N.Context(), x: f16(256, 64), y: f16(64), flags: u64(4)):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float16")
            total = T.alloc_fragment((64,), "float16")
            T.clear(total)
            for k in T.Pipelined(4, num_stages=2 if waits_inside else 0):
                N.wait_block(flags[k], "ge", 1)
                T.copy(x[k * 64 : k * 64 + 64, 0:64], tile)
                T.reduce_sum(tile, total, dim=0, clear=False)
            T.copy(total, y)

    return kernel


def in_order(body: str, *parts: str) -> bool:
    at = [body.find(part) for part in parts]
    return -1 not in at and at == sorted(at)


def kernel_body(source: str) -> str:
    return source[source.index("{", source.index("__launch_bounds__")) :]


def test_primitives_in_a_pipelined_loop_are_refused(monkeypatch):
    """Without the check copies pass the wait."""
    with pytest.raises(
        KernelError, match=r"N.wait_block is called inside T.Pipelined, which moves.*\n  at .*test_hazards.py:"
    ):
        inspect.cuda_source(pipelined())
    assert in_order(kernel_body(inspect.cuda_source(pipelined(waits_inside=False))), "tsn::wait", "x +")
    monkeypatch.setattr(hazards, "check", lambda func: None)
    assert in_order(kernel_body(inspect.cuda_source(pipelined())), "cp_async_gs", "tsn::wait")


@traced
def rereader(ctx: N.Context(), x: i32(16), y: i32(16), flags: u64(8)):
    """Reads memory that peers write in conditions, in trip counts and into names, with waits in between."""
    with T.Kernel(2, threads=64) as bx:
        if x[1] > 0:  # evaluated once, not before each statement
            N.wait_block(flags[1], "ge", 1)
            N.wait_block(flags[2], "ge", 1)
        for i in T.serial(4):  # evaluated in each round, not once before the loop
            if x[2] > 0:
                N.wait_block(flags[3], "ge", 1)
        for i in T.serial(x[3]):  # evaluated once, not in each round
            N.wait_block(flags[4], "ge", 1)
        if bx == 0:  # read where the name is bound, not where it is used
            value = x[4]
            N.wait_block(flags[5], "ge", 1)
            y[0] = value


def test_without_the_fix_reads_are_repeated_and_moved(monkeypatch):
    monkeypatch.setattr(hazards, "_evaluate_once", lambda node: None)
    monkeypatch.setattr(jit, "REQUIRED_CONFIGS", {"tl.disable_warp_specialized": (True, "")})
    body = kernel_body(inspect.cuda_source(rereader()))
    assert body.count("x[1]") == (1 if tilelang.__version__.startswith("0.1.12") else 2)
    assert in_order(body, "x[2]", "for (int i = 0; i < 4;")
    assert re.search(r"i\w* < x\[3\]", body)
    assert in_order(body, "flags[(int64_t)5]", "y[0] = x[4]")


def test_reads_happen_once_and_where_they_stand():
    body = kernel_body(inspect.cuda_source(rereader()))
    assert body.count("x[1]") == 1
    assert in_order(body, "for (int i = 0; i < 4;", "x[2]", "flags[(int64_t)3]")
    assert re.search(r"int extent = x\[3\];\s+for \(int \w+ = 0; \w+ < extent;", body)
    assert in_order(body, "int value = x[4]", "flags[(int64_t)5]", "y[0] = value")


# -- cache keys that miss headers ---------------------------------------------------------------------------------------


@pytest.fixture
def headers(tmp_path, monkeypatch):
    """A private copy of the device headers, and a private kernel cache."""
    copy = tmp_path / "device"
    shutil.copytree(toolchain.DEVICE_DIR, copy)
    monkeypatch.setattr(toolchain, "DEVICE_DIR", copy)
    monkeypatch.setattr(tilelang.env, "TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    return copy


def compiled_library(func) -> bytes:
    made = []

    def compile(*args, **kwargs):
        made.append(compiled_by_tilelang(*args, **kwargs))
        return made[0]

    compiled_by_tilelang = tilelang.compile
    with unittest.mock.patch.object(tilelang, "compile", compile):
        tsn.compile(func, target=inspect.SM_90)
    with open(f"{made[0]._tilelang_cache_path}/executable.so", "rb") as f:
        return f.read()


def test_an_edited_header_gives_another_kernel(headers, monkeypatch):
    func = kernels.reader(n=256)
    first = compiled_library(func)
    header = headers / "wait.h"
    text = header.read_text()
    edited = text.replace("  uint64_t seen;", "  uint64_t seen = 12345678;", 1)
    assert edited != text
    header.write_text(edited)
    fresh = toolchain.sources_hash()
    monkeypatch.setattr(toolchain, "sources_hash", lambda: "0")
    stale = compiled_library(func)
    monkeypatch.setattr(toolchain, "sources_hash", lambda: fresh)
    assert compiled_library(func) != first
    # The hash is what makes the difference: a constant in its place finds the kernel of the old header again.
    header.write_text(text)
    monkeypatch.setattr(toolchain, "sources_hash", lambda: "0")
    assert compiled_library(func) == stale


def test_the_hash_covers_every_header_and_the_rules(headers, tmp_path, monkeypatch):
    before = toolchain.sources_hash()
    assert before == toolchain.sources_hash()
    (headers / "types.h").write_text((headers / "types.h").read_text() + "\n// changed")
    assert toolchain.sources_hash() != before
    compiler = shutil.copytree(toolchain.COMPILER_DIR, tmp_path / "compiler")
    monkeypatch.setattr(toolchain, "COMPILER_DIR", compiler)
    for name in ("passes/__init__.py", "simulator/lowering.py"):
        before = toolchain.sources_hash()
        (compiler / name).write_text((compiler / name).read_text() + "\n# changed")
        assert toolchain.sources_hash() != before, name


# -- versions, compilers, targets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.1.11", "0.1.16", "0.2.0", "0.1.15.post1"])
def test_other_versions_of_tilelang_are_refused(version):
    with pytest.raises(
        ConfigurationError, match=f"tilelang {re.escape(version)} is installed.*supports 0.1.12 to 0.1.15; run"
    ):
        toolchain.check_tilelang(version)


@pytest.mark.parametrize("version", [*toolchain.TILELANG_VERSIONS, "0.1.15+cu130.gitabc"])
def test_supported_versions_and_local_builds_pass(version):
    toolchain.check_tilelang(version)


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "find_tool", lambda name: None)
    with pytest.raises(ConfigurationError, match="no CUDA compiler was found.*TSN_DEVICE=simulator"):
        tsn.compile(kernels.pusher(), target=inspect.SM_90)


def test_no_disassembler(monkeypatch):
    monkeypatch.setattr(toolchain, "find_tool", lambda name: None)
    with pytest.raises(ConfigurationError, match="nvdisasm was not found"):
        inspect.disassemble(b"")


@pytest.mark.parametrize("target", ["cuda -arch=sm_90", "auto", "hip", {"kind": "cuda"}, {"kind": "c"}, 90])
def test_targets_without_an_architecture_are_refused(target):
    with pytest.raises(ConfigurationError, match="is not supported; use None, 'cuda', 'simulator', or a dict"):
        tsn.compile(kernels.pusher(), target=target)


def test_cuda_without_a_gpu():
    if torch.cuda.is_available():
        assert toolchain.gpu_arch().startswith("sm_")
        return
    with pytest.raises(ConfigurationError, match="needs a GPU to know its architecture"):
        tsn.compile(kernels.pusher(), target="cuda")


# -- tilelang alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [kernels.reader, kernels.pusher])
def test_tilelang_alone_refuses_our_kernels(make):
    with pytest.raises(KernelError, match="was compiled by tilelang alone; decorate it with @tilescale_net.jit"):
        tilelang.compile(make(), target=tvm.target.Target(inspect.SM_90))


def test_tilelang_alone_refuses_loads_and_stores():
    @T.prim_func
    def kernel(x: f32(64)):
        with T.Kernel(1, threads=64):
            N.st(x[0], N.ld(x[1]))

    with pytest.raises(KernelError, match="N.(ld|st) was compiled by tilelang alone"):
        tilelang.compile(kernel, target=tvm.target.Target(inspect.SM_90))
    assert "tsn::ld" in inspect.cuda_source(kernel)


def test_no_process_global_callbacks():
    inspect.cuda_source(kernels.pusher())
    names = tvm_ffi.registry.list_global_func_names()
    assert not [n for n in names if n.startswith("tilelang_callback") and n.endswith("_postproc")]
