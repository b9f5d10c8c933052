"""Generated code for any GPU, without one: CUDA source, PTX and SASS, for tests and curious authors."""

from typing import Any

from tvm.tirx import PrimFunc

from tilescale_net.compiler import jit
from tilescale_net.compiler.passes import prepare
from tilescale_net.compiler.toolchain import SM_90, compile_source, disassemble

__all__ = ["SM_90", "compile_source", "cuda_source", "disassemble", "ptx", "sass"]


def cuda_source(func: PrimFunc, target: dict[str, Any] = SM_90, pass_configs: dict[str, Any] | None = None) -> str:
    """CUDA source that `tsn.jit` would compile for `target`; needs neither GPU nor nvcc. Raises KernelError.

    Args:
        func, pass_configs: as in `jit.compile`.
        target: tilelang's, with an architecture; default sm_90.
    """
    return jit.lower(prepare(func).func, target, jit.required_pass_configs(func, pass_configs)).kernel_source


def ptx(func: PrimFunc, target: dict[str, Any] = SM_90, pass_configs: dict[str, Any] | None = None) -> str:
    """PTX of a kernel; arguments as in `cuda_source`. Raises KernelError, ConfigurationError."""
    return compile_source(cuda_source(func, target, pass_configs), "ptx", target, threads=_threads(func, pass_configs))


def sass(func: PrimFunc, target: dict[str, Any] = SM_90, pass_configs: dict[str, Any] | None = None) -> str:
    """Machine code of a kernel; arguments as in `cuda_source`. Raises KernelError, ConfigurationError."""
    source = cuda_source(func, target, pass_configs)
    return disassemble(compile_source(source, "cubin", target, threads=_threads(func, pass_configs)))


def _threads(func: PrimFunc, pass_configs: dict[str, Any] | None) -> int | None:
    return jit.known_threads(func, jit.required_pass_configs(func, pass_configs))
