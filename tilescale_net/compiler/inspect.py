"""Generated code for a GPU that need not be there: CUDA source, PTX and SASS, for tests and for curious authors."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path

from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH
from tvm.tirx import PrimFunc

from tilescale_net.compiler import jit, toolchain
from tilescale_net.compiler.ir import block_threads
from tilescale_net.compiler.passes import prepare
from tilescale_net.errors import ConfigurationError

SM_90 = {"kind": "cuda", "arch": "sm_90"}


def cuda_source(func: PrimFunc, target: dict = SM_90, pass_configs: dict | None = None) -> str:
    """CUDA source that `tsn.jit` would compile for `target`; needs neither GPU nor nvcc. Raises KernelError."""
    return jit.lower(prepare(func).func, target, jit._pass_configs(func, pass_configs)).kernel_source


def compile_source(
    source: str, kind: str, target: dict = SM_90, extra: tuple[str, ...] = (), threads: int | None = None
) -> bytes | str:
    """Compile generated source with the flags of `tsn.jit`.

    Args:
        source: CUDA source.
        kind: "ptx" (returns str) or "cubin" (returns bytes).
        target: tilelang target with an architecture.
        extra: further flags.
        threads: of a block, where it has one dimension; tsn.jit knows it from the kernel.

    Raises:
        ConfigurationError: no nvcc, or nvcc refuses the source; carries its messages.
    """
    ours = [token for flag in toolchain.compile_flags(threads=threads) for token in shlex.split(flag)]
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "kernel.cu", Path(folder) / f"kernel.{kind}"
        path.write_text(source)
        command = [
            toolchain.find_nvcc(), f"--{kind}", "-O3", "-std=c++20", f"-arch={target['arch']}",
            f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}", *ours, *extra, "-o", str(out), str(path),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigurationError(f"nvcc failed:\n{done.stderr or done.stdout}")
        return out.read_text() if kind == "ptx" else out.read_bytes()


def disassemble(cubin: bytes, *options: str) -> str:
    """SASS of a cubin; `options` are nvdisasm's. Raises ConfigurationError when nvdisasm is missing."""
    tool = toolchain.find_tool("nvdisasm")
    if tool is None:
        raise ConfigurationError("nvdisasm was not found; install it with `pip install nvidia-cuda-nvdisasm`")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def ptx(func: PrimFunc, target: dict = SM_90, pass_configs: dict | None = None) -> str:
    """PTX of a kernel for `target`. Raises KernelError, ConfigurationError."""
    return compile_source(cuda_source(func, target, pass_configs), "ptx", target, threads=block_threads(func))


def sass(func: PrimFunc, target: dict = SM_90, pass_configs: dict | None = None) -> str:
    """Machine code of a kernel for `target`. Raises KernelError, ConfigurationError."""
    source = cuda_source(func, target, pass_configs)
    return disassemble(compile_source(source, "cubin", target, threads=block_threads(func)))
