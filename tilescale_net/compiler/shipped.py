"""Compiles this package's kernels for GPUs: the same machine code as tilelang's, in half the time.

tilelang takes 7.2 s for a dispatch of the latency mode. Omitted steps, and their time:

- Simplifying: tilelang asks Z3 about every condition six times, 0.5 s each. The first and the last pass give the same
  source as all six, for every kernel of this package (a nightly test compares); another author's kernel might be
  simplified further, so tilelang compiles it unchanged.
- Headers: tilelang's take nvcc 1.3 s, most of it in CUTLASS and libcu++. A kernel that only moves and adds data needs a
  few of their types, which are in `device/tilelang_types.h`. If nvcc rejects a kernel with it, the kernel gets all
  headers.
- Linking: tilelang writes machine code as text for a C compiler, 0.6 s, and again at the first launch. The assembler
  reads it directly.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tilelang
from tilelang import tvm
from tvm.contrib import cc
from tvm.ir.instrument import pass_instrument
from tvm.runtime import _ffi_api
from tvm.target import Target
from tvm.tirx import PrimFunc

from tilescale_net.compiler.versions import CompiledArtifact, nvcc

# -- simplifying ------------------------------------------------------------------------------------------------------


@pass_instrument
class SimplifyTwice:
    """A pass instrument for one lowering: tl.Simplify runs first and behind tl.MakePackedAPI."""

    def __init__(self) -> None:
        self._previous = ""
        self._simplified = False

    def should_run(self, module: Any, info: Any) -> bool:
        name, previous = str(info.name), self._previous
        self._previous = name
        if name != "tl.Simplify":
            return True
        runs = not self._simplified or previous == "tl.MakePackedAPI"
        self._simplified = True
        return runs


# -- headers ----------------------------------------------------------------------------------------------------------

_TEMPLATES = (
    "atomic.h", "cuda_bf16_fallbacks.cuh", "cuda_fp8.h", "debug.h", "ldsm.h", "reduce.h", "scan.h", "threadblock_swizzle.h",
)  # fmt: skip
_LEFT_OUT = {"cuda.h", *(f"tl_templates/cuda/{name}" for name in _TEMPLATES)}
_KEPT = {"math_constants.h"}
# Functions with the same meaning under all headers and under few; tilelang may overload others.
_CALLS = frozenset(
    """
    AtomicAdd AtomicAddRet __align__ __ballot_sync __bfloat1622float2 __ffs __float22bfloat162_rn __launch_bounds__
    __match_any_sync __nv_cvt_float2_to_fp8x2 __pack_nv_bfloat162 __popc __shfl_down_sync __shfl_sync __shfl_up_sync __shfl_xor_sync
    __syncthreads __syncthreads_or __syncwarp __tl_cvt_fp8x2_to_float2 bfloat16_t cudaGridDependencySynchronize
    cudaTriggerProgrammaticLaunchCompletion exp2f expf fabsf fmaxf fminf log2f logf make_float2 make_float4 make_int2
    make_int4 make_uint2 make_uint4 max min reinterpret_cast rsqrtf sqrtf static_cast
    """.split()
)
_INCLUDE = re.compile(r"^#include <([^>]*)>$", re.MULTILINE)
_CALL = re.compile(r"(?<![\w:])(\w+)(?:<[\w \*:]*>)?\(")
# Types with their own operators, and names in tilelang's namespaces.
_OTHERS = re.compile(r"\b(?:half_t|fp8_e[58]\w*|fp[46]_\w*|tfloat32_t|(?:tl|cute|cutlass|cuda)::)")


def with_few_headers(source: str) -> str | None:
    """Generated CUDA source with `device/tilelang_types.h` instead of tilelang's headers; None if it may need these."""
    begin = source.find('extern "C" __global__')
    head, body = source[:begin], source[begin:]
    headers = set(_INCLUDE.findall(head))
    if begin < 0 or "#include" in body or not (_LEFT_OUT | _KEPT).issuperset(headers) or _OTHERS.search(body):
        return None
    mine = set(re.findall(r"\b(\w+)\((?:const )?\w+\*", body.split("{", 1)[0]))
    if not (_CALLS | mine).issuperset(_CALL.findall(body)):
        return None
    uses = {"BFLOAT16": "bfloat16_t", "FP8": "fp8_e4"}
    lines = [f"#define TSN_HAS_{what}" for what, name in uses.items() if name in body]
    lines += [f"#include <{header}>" for header in sorted(headers & _KEPT | {"tilelang_types.h"})]
    return "\n".join([*lines, "", body])


_state = threading.local()


@contextlib.contextmanager
def _few_headers() -> Iterator[None]:
    """Compile this thread's kernels with few headers if possible."""
    _state.few_headers = True
    try:
        yield
    finally:
        _state.few_headers = False


def compile_with_few_headers(code: str, *args: Any, **kwargs: Any) -> Any:
    """tilelang's `compile_cuda`, within `_few_headers` with few of them."""
    less = with_few_headers(code) if getattr(_state, "few_headers", False) else None
    if less is not None:
        with contextlib.suppress(RuntimeError):  # nvcc rejects it
            return compile_cuda(less, *args, **kwargs)
    return compile_cuda(code, *args, **kwargs)


compile_cuda, nvcc.compile_cuda = nvcc.compile_cuda, compile_with_few_headers

# -- a whole kernel ---------------------------------------------------------------------------------------------------


def lower(func: PrimFunc, target: Target, configs: dict[str, Any], flags: list[str]) -> CompiledArtifact:
    """Lower a prepared kernel and compile its device code, within `lowering.enabled`.

    Args:
        configs: of tilelang's passes. flags: of the device compiler.
    """
    options = configs | {"tl.device_compile_flags": [*configs.get("tl.device_compile_flags", ()), *flags]}
    context = tvm.transform.PassContext(opt_level=3, config=options, instruments=[SimplifyTwice()])
    with context, target, _few_headers():
        return tilelang.lower(
            func, target=target, target_host="c", enable_host_codegen=True, enable_device_compile=True
        )


def link(artifact: CompiledArtifact, library: Path) -> None:
    """Write the library of a kernel, with optimised launch code, unlike tilelang."""
    artifact.rt_mod.export_library(str(library), fcompile=_link, fpack_imports=_packed)


_BYTES = re.compile(r"const unsigned char (\w+)\[(\d+)\] = \{([^}]*)\};")


def _packed(module: Any, is_system_lib: bool, prefix: str, folder: str) -> str:
    """The imported modules of a module, as assembler; TVM writes a C array."""
    text = _ffi_api.ModulePackImportsToC(module, is_system_lib, prefix)
    found = _BYTES.findall(text)
    path = Path(folder) / f"{prefix}devc.c"
    if len(found) != 1:
        path.write_text(text)
        return str(path)
    name, size, numbers = found[0]
    content = bytes.fromhex(numbers.replace("0x", "").replace(",", ""))
    assert len(content) == int(size)
    path.with_suffix(".bin").write_bytes(content)
    path = path.with_suffix(".s")
    path.write_text(
        f".section .rodata\n.balign 16\n.globl {name}\n.type {name}, %object\n.size {name}, {size}\n{name}:\n"
        f'.incbin "{path.with_suffix(".bin")}"\n.section .note.GNU-stack,"",%progbits\n'
    )
    return str(path)


def _link(output: str, files: Sequence[str], options: Sequence[str] = (), **_: Any) -> None:
    # The generated C accesses one piece of memory as several types.
    command = [cc.get_cc(), "-shared", "-fPIC", "-O2", "-fno-strict-aliasing", "-o", output, *options]
    for path in files:
        command += ["-x", "assembler" if path.endswith(".s") else "c", path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} cannot link a kernel's library:\n{done.stderr}")
