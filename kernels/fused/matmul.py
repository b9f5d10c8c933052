"""What the fused products share on the host: shapes and dtypes, the geometry of tiles, and streams beside the caller's."""

import contextlib
from dataclasses import dataclass

import tilelang.language as T
import torch

import tilescale_net as tsn
import tilescale_net.language as N

from ..collective import Collective

DTYPES = (torch.bfloat16, torch.float16)
SCALED = torch.float8_e4m3fn  # with a scale for each row of `x` and each column of `w`
TAKEN = (*DTYPES, SCALED)


@dataclass(frozen=True)
class Tiling:
    """Geometry of a product, see `product.Shape`.

    Attributes:
        tile: rows, columns and depth of a tile.
        stages: of the ring of operands in shared memory.
        panel: rows of tiles that are walked together, for the sake of the L2 cache.
        columns: that leave at once; they divide those of the tile.
    """

    tile: tuple[int, int, int] = (128, 256, 64)
    stages: int = 4
    panel: int = 8
    columns: int = 128

    def __post_init__(self) -> None:
        numbers = (*self.tile, self.stages, self.panel, self.columns) if isinstance(self.tile, tuple) else ()
        if len(numbers) != 6 or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in numbers):
            raise ValueError(f"{self}: tile must be three positive integers, the others one each")
        rows, columns, depth = self.tile
        if rows % 32 or depth % 16 or columns % self.columns or self.columns % 8:
            raise ValueError(
                f"{self}: a tile must have a multiple of 32 rows and a depth that is a multiple of 16; columns, a multiple of "
                "8, must divide those of the tile"
            )

    def workers(self, device: torch.device, parts: int, rows: int, n: int, less: int = 0) -> int:
        """Blocks of a product of `parts` times `rows` rows and `n` columns: one a multiprocessor but for `less` of them."""
        tiles = parts * -(-rows // self.tile[0]) * -(-n // self.tile[1])
        if device.type != "cuda":
            return min(tiles, SIMULATED_WORKERS)
        return max(1, min(tiles, torch.cuda.get_device_properties(device).multi_processor_count - less))


DEFAULT = Tiling()
SIMULATED_WORKERS = 3


@tsn.jit(name="fused_gate")
def gate():
    """Kernel `(calls, begun, growth, begins)`: ends when `begun[0]` has grown by `begins` in this call.

    What follows on the stream then leaves the multiprocessors to the blocks that have begun.

    Args of the kernel:
        calls: int64 [1], the number of this call. begun: uint64 [1], symmetric; grows by `growth` in every call.
    """

    @T.prim_func
    def main(
        ctx: N.Context(), calls: T.Tensor((1,), "int64"), begun: T.Tensor((1,), "uint64"), growth: T.int32, begins: T.int32
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                N.wait(begun[0], "ge", (calls[0] - 1) * growth + begins)

    return main


class Sides:
    """Streams that work beside the caller's, which waits for them at the end; in the simulator, one after the other.

    The caller's is the current one of `device`, which need not be the device that is current in this thread.
    """

    def __init__(self, device: torch.device, priorities: tuple[int, ...]):
        self._device, on_gpu = device, device.type == "cuda"
        self._streams = (
            [torch.cuda.Stream(device, priority=p) for p in priorities] if on_gpu else [None] * len(priorities)
        )
        self._forked = False

    def fork(self) -> None:
        """The streams go on from where the caller's is now."""
        self._forked = True
        for stream in self._streams:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self._device))

    def __getitem__(self, i: int):
        """A context in which work goes to stream `i`."""
        stream = self._streams[i]
        return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()

    def mark(self) -> torch.cuda.Event | None:
        """Where the current stream is now, for `wait`; None in the simulator."""
        return torch.cuda.current_stream(self._device).record_event() if self._streams[0] is not None else None

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """The current stream goes on when another one has come to the mark."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def join(self) -> None:
        """The caller's stream goes on when these are done; nothing to wait for unless they were forked."""
        forked, self._forked = self._forked, False
        for stream in self._streams:
            if stream is not None and forked:
                torch.cuda.current_stream(self._device).wait_stream(stream)


def device_obstacle(device: torch.device) -> str | None:
    """Why the fused kernels do not run on a device; None where they do."""
    if device.type != "cuda" or (capability := torch.cuda.get_device_capability(device))[0] == 9:
        return None
    return (
        f"fused kernels are written for GPUs of compute capability 9.0 (H100, H200), and {device} is of "
        f"{capability[0]}.{capability[1]}; take the operators of tilescale_net.ops with fused=None, which then compute and "
        "communicate one after the other"
    )


# Shared memory of a block of compute capability 9.0, bytes (CUDA C++ Programming Guide 13.0, table of technical
# specifications); barriers take a few bytes of it.
MOST_SHARED = 227 * 1024


def check_tensor_cores(name: str, tiling: Tiling, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Refuse tiles that GPUs cannot multiply: each of two warpgroups takes rows of a tile by 64. ValueError."""
    rows, columns, depth = tiling.tile
    if rows % 128 or columns % 16:
        raise ValueError(
            f"{name}: {tiling}: a tile on a GPU must have a multiple of 128 rows and of 16 columns, as tensor cores take them"
        )
    operands = tiling.stages * (rows + columns) * depth * dtype.itemsize
    result = rows * tiling.columns * out_dtype.itemsize
    if operands + result >= MOST_SHARED:
        raise ValueError(
            f"{name}: {tiling}: {operands} bytes for operands of {dtype} and {result} for what leaves do not fit the {MOST_SHARED} "
            "bytes of shared memory of a block; take fewer stages, less depth or fewer columns"
        )


class DistributedMatmul(Collective):
    """Base of products `x @ w` of fixed shapes, of which ranks hold parts.

    With torch.float8_e4m3fn, sums in float32 are multiplied by the scale of their row of `x` and that of their column of
    `w` when a tile is done, as torch._scaled_mm does with scales of rows; `out_dtype` is torch.bfloat16 (default) or
    torch.float16, which summands that travel have too, and `w` the transpose of a contiguous tensor. The tensor cores of
    Hopper keep about 14 bits of such sums' mantissas; all steps of a tile's depth are added up there, and none are moved to
    exact registers in between (the fast accumulation of torch._scaled_mm), so that long sums are less exact than those of
    bfloat16.

    Attributes:
        memory: the symmetric buffers by name, for measurements of a call without its peers.
    """

    memory: dict[str, torch.Tensor]
    k: int
    n: int

    def __init__(
        self, name: str, configuration: str, dtype: torch.dtype, out_dtype: torch.dtype | None, threads: int, blocks: int,
        group: "tsn.Group",
    ):  # fmt: skip
        self.out_dtype = result_dtype(name, dtype, out_dtype)
        self.dtype, self.scaled = dtype, dtype == SCALED
        configuration = f"{configuration}, dtype={dtype}, out_dtype={self.out_dtype}"
        super().__init__(name, configuration, threads, blocks, group)
        # int64: torch's operators do not know uint64 on GPUs.
        with torch.inference_mode(False):
            self._calls = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._no_scales = torch.zeros(1, dtype=torch.float32, device=self.device)

    def _arguments(
        self, x, w, out, x_scales, w_scales, rows: int, rows_of_result: int, travel: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, bool, tuple[torch.Tensor, torch.Tensor]]:
        """A call's result, weight as `_weight` gives it, and scales as `_scales` does; all arguments are checked.

        Args:
            rows: of `x`. travel: `x` and its scales must lie in symmetric memory.
        """
        self._begin()
        self._rows(x, (rows, self.k), symmetric=travel)
        held, transposed = self._weight(w, self.k, self.n)
        scales = self._scales(x_scales, w_scales, rows, self.n, travel=travel)
        out = self._result(out, (rows_of_result, self.n), ("x", x), ("w", held), *self._apart(scales))
        self._made.note("x of shape {} and w of shape {}", x.shape, w.shape)
        return out, held, transposed, scales

    def _weight(self, w, k: int, n: int) -> tuple[torch.Tensor, bool]:
        """`w` as a contiguous tensor, and whether that is [n, k]. TypeError or ValueError for what does not fit."""
        transposed = isinstance(w, torch.Tensor) and w.dim() == 2 and not w.is_contiguous()
        held = w.t() if transposed else w
        self._check("w", held, self.dtype)
        if tuple(w.shape) != (k, n):
            raise ValueError(f"{self.name}: w has shape {list(w.shape)}; it must be [{k}, {n}]")
        check_columns(self.name, w)
        return held, transposed

    def _scales(self, x_scales, w_scales, rows: int, n: int, travel: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales as [rows] and [n], or what kernels of other dtypes take in their place. TypeError or ValueError.

        Args:
            travel: those of `x` must lie in symmetric memory.
        """
        check_scales(self.name, self.dtype, x_scales, w_scales, rows, n)
        if not self.scaled:
            return self._no_scales, self._no_scales
        self._check("x_scales", x_scales, torch.float32, symmetric=travel)
        self._check("w_scales", w_scales, torch.float32)
        return x_scales.view(-1), w_scales.view(-1)

    def _apart(self, scales) -> tuple[tuple[str, torch.Tensor], ...]:
        """What `_scales` gave, for `_result`."""
        return tuple(zip(("x_scales", "w_scales"), scales)) if self.scaled else ()

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


class FusedMatmul(DistributedMatmul):
    """Base of the products whose kernels compute tiles of a `Tiling` and communicate meanwhile."""

    def __init__(
        self, name: str, configuration: str, dtype: torch.dtype, out_dtype: torch.dtype | None, tiling: Tiling,
        threads: int, blocks: int, group: "tsn.Group",
    ):  # fmt: skip
        if obstacle := device_obstacle(tsn.world(group).device):
            raise tsn.ConfigurationError(f"{name}: {obstacle}")
        out_dtype = result_dtype(name, dtype, out_dtype)
        if not isinstance(tiling, Tiling):
            raise TypeError(f"{name}: tiling is {tiling!r}; it must be a Tiling")
        if dtype == SCALED and tiling.tile[2] % 32:
            raise ValueError(f"{name}: {tiling}: a tile of {dtype} must have a depth that is a multiple of 32")
        if tsn.world(group).device.type == "cuda":
            check_tensor_cores(name, tiling, dtype, out_dtype)
        self.tiling = tiling
        super().__init__(name, f"{configuration}, {tiling}", dtype, out_dtype, threads, blocks, group)
        self._carried = self.out_dtype if self.scaled else dtype  # of summands


def result_dtype(name: str, dtype: torch.dtype, out_dtype: torch.dtype | None) -> torch.dtype:
    """`out_dtype` or its default. TypeError for a dtype that products or results do not have."""
    if dtype not in TAKEN:
        raise TypeError(f"{name}: dtype {dtype} is not one of {', '.join(map(str, TAKEN))}")
    if dtype == SCALED and out_dtype not in (None, *DTYPES):
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {', '.join(map(str, DTYPES))}")
    return out_dtype or (torch.bfloat16 if dtype == SCALED else dtype)


def torch_product(x: torch.Tensor, w: torch.Tensor, x_scales=None, w_scales=None, out: torch.Tensor | None = None):
    """The product `x @ w` by torch alone, in `out` if that is given; of 8 bits with scales, as bfloat16 or as `out`."""
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):  # the dtypes are chosen
            return torch_product(x, w, x_scales, w_scales, out)
    if x.dtype != SCALED:
        return torch.mm(x, w, out=out)
    dtype = torch.bfloat16 if out is None else out.dtype
    of_rows, of_columns = x_scales.view(-1, 1), w_scales.view(1, -1)
    if x.device.type == "cuda":
        where = {} if out is None else {"out": out}
        return torch._scaled_mm(x, w, of_rows, of_columns, out_dtype=dtype, use_fast_accum=True, **where)
    product = (x.float() @ w.float() * of_rows * of_columns).to(dtype)
    return product if out is None else out.copy_(product)


def check_columns(name: str, w: torch.Tensor) -> None:
    """Raise ValueError for a `w` [k, n] that tensor cores do not take: of 8 bits, its columns must be contiguous."""
    if w.dtype == SCALED and not w.t().is_contiguous():
        raise ValueError(
            f"{name}: w of {w.dtype} has strides {list(w.stride())}, but tensor cores take contiguous columns of it; pass the "
            "transpose of a contiguous [n, k]: w.t().contiguous().t()"
        )


def check_scales(name: str, dtype: torch.dtype, x_scales, w_scales, rows: int, n: int) -> None:
    """Raise TypeError or ValueError unless there are scales as a product of `dtype` takes them."""
    given = {"x_scales": (x_scales, rows, (rows, 1)), "w_scales": (w_scales, n, (1, n))}
    for what, (scales, extent, shape) in given.items():
        if dtype != SCALED:
            if scales is not None:
                raise TypeError(f"{name}: {what} goes with {SCALED}; x and w are {dtype}")
        elif not isinstance(scales, torch.Tensor):
            raise TypeError(f"{name}: {what} is {scales!r}; {SCALED} takes a float32 tensor [{extent}]")
        elif scales.dtype != torch.float32:
            raise TypeError(f"{name}: {what} has dtype {scales.dtype}; it must be torch.float32")
        elif tuple(scales.shape) not in ((extent,), shape):
            raise ValueError(f"{name}: {what} has shape {list(scales.shape)}; it must be [{extent}] or {list(shape)}")


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
