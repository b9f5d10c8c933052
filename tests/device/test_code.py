"""Code of the device headers for sm_90: wide accesses that overlap, the right order, no spills, no stale reads."""

import re
import subprocess
from pathlib import Path

import pytest

import tilescale_net
from tests.ptx import read_only_loads
from tests.variants import nightly
from tilescale_net.compiler import inspect, toolchain
from tilescale_net.language.copies import default_unroll

DEVICE = Path(tilescale_net.__file__).parent / "device"
BLOCKS = (32, 128, 256, 512, 1024)
FEW = (128, 1024)  # in every run
block_sizes = pytest.mark.parametrize("threads", [nightly(n, when=n not in FEW) for n in BLOCKS])
ARGUMENTS = "const Context* c, char* d, const char* s, int64_t n, int pe, uint64_t* sig, uint64_t value"


def block_kernels(sizes):
    """put, get and put_signal of a block, with all engines, at the unroll that each block size gets."""
    for threads in sizes:
        choices = f"Scope::block, Engine::automatic, {default_unroll(threads)}, 8, 16384"
        for name, call in (
            ("put", f"put<{choices}>(c, d, s, n, pe, ring)"),
            ("get", f"get<{choices}>(c, d, s, n, pe, ring)"),
            ("put_signal", f"put_signal<{choices}, SignalOp::set>(c, d, s, n, pe, sig, value, ring)"),
        ):
            yield f"{name}_{threads}", threads, f"extern __shared__ __align__(128) char ring[]; {call};"
        calls = f"put<{choices}>(c, d, s, n, pe, ring); get<{choices}>(c, d + n, s, n + i, pe, ring); d += n;"
        yield (
            f"loop_{threads}",
            threads,
            f"extern __shared__ char ring[]; for (int i = 0; i < value; i++) {{ {calls} }}",
        )


SMALL = {
    "put_thread": "put<Scope::thread, Engine::ldst, 4, 0, 0>(c, d, s, n, pe, nullptr);",
    "put_warp": "put<Scope::warp, Engine::ldst, 16, 0, 0>(c, d, s, n, pe, nullptr);",
    "bulk": "extern __shared__ __align__(128) char ring[];"
    "put_signal<Scope::block, Engine::bulk, 8, 4, 8192, SignalOp::add>(c, d, s, n, pe, sig, value, ring);",
    "signal_set": "signal<SignalOp::set>(c, sig, value, pe);",
    "signal_add": "signal<SignalOp::add>(c, sig, value, pe);",
    "wait": "*(uint64_t*)d = wait<Scope::block, Compare::ge>(c, sig, value);",
    "fence": "fence(c, pe);",
    "quiet": "quiet(c, -1);",
    "value": "put_value(c, (float*)d, 1.0f, pe);",
    "atomic": "*sig = atomic<AtomicOp::add>(c, (uint64_t*)d, value, pe);",
    "barrier": "barrier_all(c);",
    "loads": "*(uint64_t*)d = ld<Order::acquire, MemScope::gpu>(sig) + ld<Order::volatile_, MemScope::cta>((uint8_t*)s);"
    "st<Order::release, MemScope::cta>((uint16_t*)d, 3);",
}


def small_kernels(*names):
    for name in names:
        yield name, 128, SMALL[name]


def source(kernels):
    return '#include "tilescale_net.h"\nusing namespace tsn;\n' + "\n".join(
        f'extern "C" __global__ void __launch_bounds__({threads}) {name}({ARGUMENTS}) {{ {body} }}'
        for name, threads, body in kernels
    )


def nvcc(folder, kernels, arch, *flags):
    path = folder / "kernels.cu"
    path.write_text(source(kernels))
    command = [toolchain.find_nvcc(), f"-arch={arch}", "-std=c++17", f"-I{DEVICE}", *flags, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr


class Instructions(dict):
    """By kernel; block sizes that are not in every run are compiled when the first is requested."""

    def __init__(self, folder, known):
        super().__init__(known)
        self._folder = folder

    def __missing__(self, name):
        others = [n for n in BLOCKS if n not in FEW]
        self.update(build(self._folder, block_kernels(others))[1])
        return self[name]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(PTX by kernel, instructions by kernel, PTX by function)."""
    ptx, code, functions = build(tmp_path_factory.mktemp("code"), [*block_kernels(FEW), *small_kernels(*SMALL)])
    return ptx, code and Instructions(tmp_path_factory.mktemp("others"), code), functions


def build(folder, kernels):
    nvcc(folder, kernels, "sm_90", "-cubin", "--keep", "-o", "kernels.cubin")
    ptx = (folder / "kernels.ptx").read_text()
    functions = {m[1]: m[2] for m in re.finditer(r"\.func\s+(?:\([^)]*\)\s*)?([\w$]+)\((.*?)\n}", ptx, re.S)}
    ptx = {m[1]: m[2] for m in re.finditer(r"\.entry (\w+)\((.*?)\n}", ptx, re.S)}
    try:
        text = inspect.disassemble((folder / "kernels.cubin").read_bytes())
    except tilescale_net.ConfigurationError:
        text = ""
    code = {}
    for section in re.split(r"\.section\s+\.text\.", text)[1:]:
        # "@P0 LDG.E.128 R4, …" becomes ("@P0", "LDG.E.128")
        code[section.split(",")[0]] = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d)?\s*([A-Z][\w.]*)", section)
    return ptx, code, functions


def runs(code, opcode):
    """Lengths of the runs of unconditional `opcode`, other arithmetic between them aside."""
    lengths, now = [], 0
    for guard, name in code:
        if name.startswith(opcode) and not guard:
            now += 1
        elif name.startswith(("LDG", "STG", "BRA", "BAR")):
            lengths, now = [*lengths, now], 0
    return [length for length in [*lengths, now] if length]


@pytest.fixture(scope="module")
def ptx(built):
    return built[0]


@pytest.fixture(scope="module")
def sass(built):
    if not built[1]:
        pytest.skip("lacks nvdisasm (nvidia-cuda-nvdisasm with pip)")
    return built[1]


def test_all_kernels_are_there(built):
    ptx, code, _ = built
    assert len(ptx) == len(FEW) * 4 + len(SMALL)
    assert not code or set(code) == set(ptx)


@block_sizes
@pytest.mark.parametrize("name", ["put", "get", "put_signal", "loop"])
def test_copies_do_not_spill_their_rows(sass, name, threads):
    """The assembler may put a few scalars into local memory to let more blocks run; rows in flight stay in registers.

    Errors and the proxy, whose code comes after the kernel's own, do not count.
    """
    names = [n for _, n in sass[f"{name}_{threads}"]]
    own = names[: max(i for i, n in enumerate(names) if n == "EXIT")]
    assert sum(n.startswith("STL") for n in own) <= 8
    assert not [n for n in own if n.startswith(("STL.128", "LDL.128"))]


def test_loads_of_the_headers_differ_from_the_compilers():
    inside = "// begin inline asm\nld.global.nc.b64 %rd1, [%rd2];\n// end inline asm\n"
    assert read_only_loads(inside) == []
    assert read_only_loads(inside + "ld.global.nc.f32 %f1, [%rd3];\n" + inside) == ["ld.global.nc.f32"]


def test_nothing_is_read_through_the_read_only_cache(built):
    ptx, code, _ = built
    for name, text in ptx.items():
        assert not read_only_loads(text), name
    # What the headers read like that are single words of the context and of a queue's view.
    for name, instructions in code.items():
        assert {i for _, i in instructions if "CONSTANT" in i} <= {"LDG.E.CONSTANT", "LDG.E.64.CONSTANT"}, name


@block_sizes
@pytest.mark.parametrize("name", ["put", "get"])
def test_a_tile_is_loaded_whole_before_it_is_stored(sass, name, threads):
    code = sass[f"{name}_{threads}"]
    unroll = default_unroll(threads)
    assert unroll in runs(code, "LDG.E.NA.128.STRONG.SYS")
    assert unroll in runs(code, "STG.E.128.STRONG.SYS")


@block_sizes
def test_rests_are_loaded_without_branches(sass, threads):
    """The predicated loads of a rest of up to `unroll` rows follow one another without a branch or a store between."""
    longest = now = 0
    for guard, name in sass[f"get_{threads}"]:
        if name.startswith("LDG.E.NA.128") and guard:
            now += 1
            longest = max(longest, now)
        elif name.startswith(("BRA", "STG", "BSSY", "BSYNC")):
            now = 0
    assert longest >= default_unroll(threads) - 1


def test_bulk_copies(sass, ptx, built):
    names = [name for _, name in sass["bulk"]]
    assert any(n.startswith("UBLKCP.S.G") for n in names) and any(n.startswith("UBLKCP.G.S") for n in names)
    # The data are complete, not only read from shared memory, when the function that copies returns; then the signal goes.
    copies = [text for name, text in built[2].items() if "push_bulk" in name]
    assert copies
    for text in copies:
        assert "fence.proxy.async" in text
        wait = text.rindex("cp.async.bulk.wait_group 0")
        assert "cp.async.bulk.wait_group.read 1" in text[:wait]
    assert "push_bulk" in ptx["bulk"] and "red.release.sys.global.add.u64" in ptx["bulk"]


@pytest.mark.parametrize(
    ("kernel", "instruction"),
    [
        ("put_signal_128", "st.release.sys.global.b64"),
        ("put_signal_128", "st.relaxed.sys.global.b128"),
        ("bulk", "red.release.sys.global.add.u64"),
        ("signal_set", "st.relaxed.sys.global.b64"),
        ("signal_add", "red.relaxed.sys.global.add.u64"),
        ("wait", "ld.acquire.sys.global.b64"),
        ("barrier", "fence.acq_rel.sys"),
        ("barrier", "ld.acquire.sys.global.b64"),
        ("fence", "fence.acq_rel.sys"),
        ("quiet", "fence.acq_rel.sys"),
        ("value", "st.relaxed.sys.global.b32"),
        ("atomic", "atom.relaxed.sys.global.add.u64"),
        ("loads", "ld.acquire.gpu.b64"),
        ("loads", "ld.volatile.b8"),
        ("loads", "st.release.cta.b16"),
        ("put_thread", "st.relaxed.sys.global.v4.b32"),
        ("put_warp", "ld.relaxed.sys.global.L1::no_allocate.v4.b32"),
    ],
)
def test_order_and_width(ptx, kernel, instruction):
    assert instruction in ptx[kernel]


@pytest.mark.parametrize("name", ["signal_set", "signal_add"])
def test_a_signal_comes_after_a_fence(ptx, sass, name):
    store = "st.relaxed.sys.global.b64" if name == "signal_set" else "red.relaxed.sys.global.add.u64"
    text = ptx[name]
    assert text.index("fence.acq_rel.sys") < text.index(store)
    names = [n for _, n in sass[name]]
    assert any(n.startswith("MEMBAR") and n.endswith(".SYS") for n in names)


def test_a_small_message_loads_its_source_and_the_context_together(sass):
    """No branch, barrier or store separates the loads of a small put: they cost one latency, not one each."""
    lengths, now = [], 0
    for _, name in sass["put_128"]:
        if name.startswith("LDG"):
            now += 1
        elif name.startswith(("BRA", "BAR", "STG", "EXIT")):
            lengths, now = [*lengths, now], 0
    # The source in each of three widths; heap, its size, the abort word, the peer's base.
    assert 7 in lengths, lengths


def test_older_gpus_get_no_bulk_copies(tmp_path):
    nvcc(tmp_path, small_kernels("put_thread", "bulk"), "sm_80", "-ptx", "-o", "kernels.ptx")
    text = (tmp_path / "kernels.ptx").read_text()
    assert "cp.async.bulk" not in text and "mbarrier" not in text
    assert "st.relaxed.sys.global.v4.b32" in text


def test_only_the_platform_knows_the_machine():
    for path in DEVICE.glob("*.h"):
        text = re.sub(r"//.*", "", path.read_text())
        if not path.name.startswith("platform_cuda"):
            assert not re.search(r"\basm\b|__sync|__shfl|__nanosleep|threadIdx|blockIdx", text), path.name
        if not path.name.startswith("platform_host"):
            assert "__atomic" not in text and "std::atomic" not in text, path.name
