"""The products compiled for sm_90a at full size: tensor cores that are never idle for a copy, and peers' rows read by TMA."""

import functools
import importlib
import pkgutil
import re

import pytest

import tilescale_net.kernels.fused
from tests.generated import Code, Generated
from tests.kernels.test_generated_code import FUSED, tools  # noqa: F401 (a fixture)
from tests.ptx import read_only_loads
from tests.variants import nightly, variants
from tilescale_net.compiler.jit import KernelFactory
from tilescale_net.compiler.versions import CLUSTERS
from tilescale_net.kernels.fused.all_gather_matmul import matmul_arriving
from tilescale_net.kernels.fused.choice import GEOMETRIES, GemmProblem, best_tiling
from tilescale_net.kernels.fused.expert_gradient import expert_gradient
from tilescale_net.kernels.fused.expert_matmul import matmul_experts
from tilescale_net.kernels.fused.gemm import SCALED
from tilescale_net.kernels.fused.matmul_reduce_scatter import matmul_reducing
from tilescale_net.kernels.fused.scaled_gemm import TELLING, ScaledTiling, scaled_gemm


def _geometry(kind: str) -> dict:
    """The tiling of large products of eight bits."""
    return vars(best_tiling(GemmProblem(kind, 4, 4096, 8192, 8192, SCALED)))


WIDE = dict(dtype="bfloat16", out_dtype="bfloat16", **vars(GEOMETRIES[0][0]))
GATHERED = dict(WIDE, n_pes=4, rows=1024, n=14336, k=8192)
SCATTERED = dict(WIDE, n_pes=4, rows=1024, n=8192, k=7168)
EXPERTS = dict(WIDE, ranks=4, experts=64, capacity=65536, n=4096, k=7168)
# In every run one of each: they cost seconds.
CASES = {
    "arriving": (matmul_arriving, GATHERED),
    "reducing": (matmul_reducing, dict(SCATTERED, shares=True, slices=2, transposed=True)),
    "experts-waiting": (matmul_experts, dict(EXPERTS, waits=True, transposed=True)),
    "gradient-alone": (expert_gradient, dict(experts=64, m=7168, n=4096, dtype="bfloat16")),
}
LONG = {
    f"alone-{geometry.tile[1]}": (matmul_arriving, dict(GATHERED, n_pes=1, peers=False, **vars(geometry)))
    for geometry, _ in GEOMETRIES
}
# Of eight bits: twice the depth, and K-major both.
EIGHT = dict(dtype="float8_e4m3fn", out_dtype="bfloat16", transposed=True, scaled=True)
LONG |= {
    "arriving-8": (matmul_arriving, GATHERED | EIGHT | _geometry("all_gather_matmul")),
    "reducing-8": (matmul_reducing, SCATTERED | EIGHT | _geometry("matmul_reduce_scatter") | dict(shares=True)),
}
LONG |= {
    "experts-telling": (matmul_experts, dict(EXPERTS, tells=True)),
    "experts-8": (matmul_experts, EXPERTS | EIGHT | _geometry("all_gather_matmul") | dict(waits=True)),
    "experts-alone": (matmul_experts, dict(EXPERTS, transposed=True)),
}
# With scales of blocks: parts of 128 columns, two of which a warpgroup multiplies one after the other.
DEEP = dict(experts=64, n=4096, k=7168)
SCALES = {
    "scales": DEEP | vars(ScaledTiling(cluster=2 if CLUSTERS else 1)),  # tilelang 0.1.12 and 0.1.13 know none
    "scales-alone": DEEP | vars(ScaledTiling()),
    "scales-in-turn": DEEP | vars(ScaledTiling(in_turn=True, steps=1)),
    "scales-unrolled": DEEP | vars(ScaledTiling(in_turn=True, steps=4)),
    "scales-narrow": DEEP | vars(ScaledTiling((128, 128, 128), stages=6)),
    "scales-low": DEEP | vars(ScaledTiling(low_tiles=True)),
    "scales-of-rows": dict(DEEP, form="row"),
    "scales-waiting": dict(DEEP, tiles=512, waits=True),
    "scales-telling": DEEP | vars(TELLING) | dict(tiles=512),
}
ALL = [*CASES, *(nightly(name) for name in LONG)]


@functools.cache
def _generated() -> Generated:
    return Generated([*CASES.values(), (scaled_gemm, SCALES["scales"])], {"kind": "cuda", "arch": "sm_90a"})


def _code(name: str) -> Code:
    factory, arguments = (CASES | LONG | {name: (scaled_gemm, options) for name, options in SCALES.items()})[name]
    return _generated().code(factory, **arguments)


def test_every_kernel_is_compiled():
    found = set()
    for module in pkgutil.iter_modules(
        tilescale_net.kernels.fused.__path__, tilescale_net.kernels.fused.__name__ + "."
    ):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, KernelFactory) and value.__module__ == module.name:
                found.add(f"{module.name}.{name}")
    here = {f"{factory.__module__}.{factory.__wrapped__.__name__}" for factory, _ in CASES.values()}
    assert found == here | FUSED.keys() | {f"{scaled_gemm.__module__}.scaled_gemm"}


@variants(0, "name", ALL)
def test_tensor_cores_have_registers_and_run_on(tools, name):  # noqa: F811
    code = _code(name)
    assert not read_only_loads(code.ptx)
    of_dtype = "QGMMA.64x256x32.F32.E4M3.E4M3" if name.endswith("-8") else "HGMMA"
    steps = [i for i, instruction in enumerate(code.instructions) if instruction.startswith(of_dtype)]
    each, copies = (
        (2, 6) if name == "gradient-alone" else (4, 4)
    )  # the gradient's depth is 32; nvcc peels a second step
    assert len(steps) == each * copies, "for each step of two warpgroups, the first of a tile on its own"
    for of_step in zip(*[iter(steps)] * each):
        together = code.instructions[of_step[0] : of_step[-1]]
        assert not [i for i in together if i.startswith(("STL", "LDL", "WARPGROUP.DEPBAR"))]
    assert sum(i.startswith("USETMAXREG") for i in code.instructions) == 3
    assert sum(i.startswith("UTMASTG") for i in code.instructions) >= 2, "results leave by TMA"


@variants(0, "name", ["scales", *(nightly(n) for n in [*SCALES][1:])])
def test_scaled_sums_stay_in_registers(tools, name):  # noqa: F811
    """Two sums of a warpgroup's rows: the tensor cores' sum, and the promoted one."""
    code, parts = _code(name), 2 - (SCALES[name].get("tile", (0, 256))[1] == 128)
    steps = [
        i for i, instruction in enumerate(code.instructions) if instruction.startswith("QGMMA.64x128x32.F32.E4M3.E4M3")
    ]
    # Signals are calls, around which a few numbers are kept in memory; between steps there are none.
    looked_at = slice(steps[0], steps[-1]) if "tiles" in SCALES[name] else slice(None)
    assert not [i for i in code.instructions[looked_at] if i.startswith(("STL", "LDL"))]
    gemms = 2 * parts + 2 * SCALES[name].get("low_tiles", False)
    assert len(steps) == gemms * 4 * SCALES[name].get("steps", 1), "steps of two warpgroups"
    promoted = sum(i.startswith(("FFMA", "FADD")) for i in code.instructions[steps[0] : steps[-1]])
    assert promoted >= (2 * parts - 1) * 64
    multicast = re.findall(r"cp\.async\.bulk\.tensor\.\S*multicast", code.ptx)
    assert bool(multicast) == (SCALES[name].get("cluster", 1) > 1)


@pytest.mark.parametrize("name", [name for name in ALL if "alone" not in str(name)])
def test_writes_of_peers_are_ordered_for_tma(tools, name):  # noqa: F811
    """An acquire orders ordinary reads alone. Between a look at a flag and the next TMA load stands the proxies' fence."""
    ptx = _code(name).ptx
    ptx = ptx[: ptx.index(".func")] if ".func" in ptx else ptx
    events = re.findall(r"ld\.acquire\.sys|fence\.proxy\.async(?:\.global)?;|cp\.async\.bulk\.tensor\.\w+\.shared", ptx)
    assert "ld.acquire.sys" in events
    fenced = True
    for event in events:
        if event.startswith("cp"):
            assert fenced, events
        fenced = event.startswith("fence") or (fenced and not event.startswith("ld"))


@pytest.mark.parametrize("name", [*ALL, "scales"])
def test_threads_overwrite_tiles_after_their_tma_stores(tools, name):  # noqa: F811
    """One thread of a warpgroup waits for the stores it has begun; the others learn of it by the barrier behind the wait.

    tilelang places that barrier. Before a branch that holds both wait and writes it came too early: an eighth of a GEMM was
    wrong on GPUs. The simulator, where stores end at once, cannot show it.
    """
    pattern = r"tl::tma_store_wait<0, true>|tl::__sync_thread_partial\(\d, 128\)|tl::tma_store\("
    steps = [
        ("wait" if "wait" in m[0] else "store" if "store" in m[0] else "barrier")
        for m in re.finditer(pattern, _code(name).source)
    ]
    # A tile of 256 columns is four stores, a loop in the source of newer tilelang.
    stores = [i for i, step in enumerate(steps) if step == "store" and steps[i - 1] != "store"]
    assert len(stores) >= 2
    for i in stores:
        assert steps[i - 3 : i] == ["wait", "barrier", "barrier"], steps
