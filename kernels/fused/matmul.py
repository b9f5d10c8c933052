"""What the fused products share on the host: shapes and dtypes, the geometry of tiles, and streams beside the caller's."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from tilescale_net.kernels.collective import Collective

NAMES = {torch.float8_e4m3fn: "float8_e4m3"}  # as tilelang calls them
DTYPES = (torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as tilelang calls it."""
    return NAMES.get(dtype) or str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Tiling:
    """Geometry of a product.

    Attributes:
        tile: rows, columns and depth of a tile.
        stages: of tilelang's pipeline.
        threads: that multiply.
        panel: rows of tiles that are walked together, for the sake of the L2 cache.
        staged: results leave through shared memory.
    """

    tile: tuple[int, int, int] = (128, 256, 64)
    stages: int = 3
    threads: int = 256
    panel: int = 10
    staged: bool = False


DEFAULT = Tiling()


class Sides:
    """Streams that work beside the caller's, which waits for them at the end; in the simulator, one after the other."""

    def __init__(self, device: torch.device, priorities: tuple[int, ...]):
        on_gpu = device.type == "cuda"
        self._streams = (
            [torch.cuda.Stream(device, priority=p) for p in priorities] if on_gpu else [None] * len(priorities)
        )

    def fork(self) -> None:
        """The streams go on from where the caller's is now."""
        for stream in self._streams:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())

    def __getitem__(self, i: int):
        """A context in which work goes to stream `i`."""
        stream = self._streams[i]
        return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()

    def join(self) -> None:
        """The caller's stream goes on when these are done."""
        for stream in self._streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)


class FusedMatmul(Collective):
    """Base of the fused products: a product `x @ w` of fixed shapes, of which ranks hold parts."""

    def __init__(self, name, configuration, dtype, out_dtype, tiling, threads, blocks, group):
        if dtype not in DTYPES:
            raise TypeError(f"{name}: dtype {dtype} is not one of {', '.join(map(str, DTYPES))}")
        self.dtype, self.out_dtype = dtype, dtype if out_dtype is None else out_dtype
        self.tiling = tiling
        configuration = f"{configuration}, dtype={dtype}, out_dtype={self.out_dtype}, {tiling}"
        super().__init__(name, configuration, threads, blocks, group)
        # int64: torch's operators do not know uint64 on GPUs.
        with torch.inference_mode(False):
            self._calls = torch.zeros(1, dtype=torch.int64, device=self.device)

    def _weight(self, w, k: int, n: int) -> tuple[torch.Tensor, bool]:
        """`w` as a contiguous tensor, and whether that is [n, k]. TypeError or ValueError for what does not fit."""
        transposed = isinstance(w, torch.Tensor) and w.dim() == 2 and not w.is_contiguous()
        held = w.t() if transposed else w
        self._check("w", held, self.dtype)
        if tuple(w.shape) != (k, n):
            raise ValueError(f"{self.name}: w has shape {list(w.shape)}; it must be [{k}, {n}]")
        return held, transposed

    def _result(self, out, shape: tuple[int, ...], *apart) -> torch.Tensor:
        """`out`, checked, or a new tensor."""
        if out is None:
            return torch.empty(shape, dtype=self.out_dtype, device=self.device)
        self._check("out", out, self.out_dtype)
        if tuple(out.shape) != shape:
            raise ValueError(f"{self.name}: out has shape {list(out.shape)}; it must be {list(shape)}")
        for name, tensor in apart:
            self._check_apart("out", out, name, tensor)
        return out

    def _rows(self, x, shape: tuple[int, int], symmetric: bool = False) -> None:
        self._check("x", x, self.dtype, symmetric=symmetric)
        if tuple(x.shape) != shape:
            raise ValueError(f"{self.name}: x has shape {list(x.shape)}; it must be {list(shape)}")


def check_extents(name: str, dtype: torch.dtype, **extents: int) -> None:
    """Raise TypeError or ValueError unless `dtype` is a torch.dtype, every extent is a positive integer, and rows of
    `k` and `n` elements are multiples of 16 bytes, which TMA asks for.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: dtype is {dtype!r}; it must be a torch.dtype")
    for what, value in extents.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {what} is {value!r}; it must be a positive integer")
        if what != "rows" and value * dtype.itemsize % 16:
            raise ValueError(f"{name}: {what} is {value}; it must be a multiple of {16 // dtype.itemsize} for {dtype}")
