"""Generated source through nvcc and nvdisasm, with the flags of `tsn.jit`; needs no GPU."""

import shlex
import subprocess
import tempfile
from pathlib import Path

from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

from tilescale_net.compiler import cuda_tools, toolchain
from tilescale_net.errors import ConfigurationError

SM_90 = {"kind": "cuda", "arch": "sm_90"}


def compile_source(
    source: str, kind: str, target: dict = SM_90, extra: tuple[str, ...] = (), threads: int | None = None
) -> bytes | str:
    """Compile generated source with the flags of `tsn.jit`.

    Args:
        source: CUDA source.
        kind: "ptx" (returns str) or "cubin" (returns bytes).
        target: tilelang target with an architecture.
        extra: further flags.
        threads: of a block, where it has one dimension; tsn.jit takes it from the kernel.

    Raises:
        ConfigurationError: no nvcc, or nvcc refuses the source; carries its messages.
    """
    ours = [token for flag in toolchain.compile_flags(threads=threads) for token in shlex.split(flag)]
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "kernel.cu", Path(folder) / f"kernel.{kind}"
        path.write_text(source)
        command = [
            cuda_tools.find_nvcc(), f"--{kind}", "-O3", "-std=c++20", f"-arch={target['arch']}",
            f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}", *ours, *extra, "-o", str(out), str(path),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigurationError(f"nvcc failed:\n{done.stderr or done.stdout}")
        return out.read_text() if kind == "ptx" else out.read_bytes()


def disassemble(cubin: bytes, *options: str) -> str:
    """SASS of a cubin; `options` are nvdisasm's. Raises ConfigurationError when nvdisasm is missing."""
    tool = cuda_tools.find_tool("nvdisasm")
    if tool is None:
        raise ConfigurationError("nvdisasm was not found; install it with `pip install nvidia-cuda-nvdisasm`")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout
