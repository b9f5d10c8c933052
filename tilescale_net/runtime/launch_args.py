"""Native launches and checks of their arguments, and the order of calls on several CUDA streams."""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.utils._device import DeviceContext

# -- quick calls ---------------------------------------------------------------------------------------------------------

# Launches and tensor checks with next to no Python, where csrc/launch supports the installed torch and tvm_ffi. Without
# that, or for an unusual tensor, each function reports it, and callers take the slower path through Python, which does
# the same.

_EXCHANGE = "__dlpack_c_exchange_api__"
_INT64 = -(2**63), 2**63 - 1
_CALLS = ("TVMFFIFunctionCall", "TVMFFIEnvSetStream", "TVMFFIErrorMoveFromRaised", "TVMFFIObjectDecRef")


@functools.cache
def _native() -> tuple[Any, int, list[Any]] | None:
    """The native part and its hooks into torch and tvm_ffi: `(module, exchange, calls)`; None if they are missing."""
    try:
        import tvm_ffi

        from tilescale_net import _native

        if not tvm_ffi.__version__.startswith("0.1."):
            return None
        table = getattr(torch.Tensor, _EXCHANGE)
        if not isinstance(table, int):
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            table = pointer(table, b"dlpack_exchange_api")
        library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
        calls = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _CALLS]
        return _native.launch, table, calls
    except (AttributeError, ImportError, OSError, ValueError):
        return None


def native_available() -> bool:
    """Whether native launches and checks are available."""
    return _native() is not None


def native_launch(
    fixed: Sequence[tuple[int, object]],
    given: Sequence[tuple[int, Sequence[int], torch.dtype | None, torch.Tensor | None, bool]],
    function: Callable[[], Any],
    otherwise: Callable[..., None],
    integers: Mapping[int, tuple[int, int]] | None = None,
) -> Callable[..., None]:
    """A launch that takes the arguments of `given` in their order; or `otherwise`, which takes the same.

    Args:
        fixed: positions among the function's arguments, and their constant values: tensors, numbers. `otherwise` must
            hold them. Launches go to the current stream of the tensors' GPU.
        given: for each argument of a call its position; the shape as which the function takes a tensor, with -1 for one
            extent as in `torch.Tensor.view` (empty: unchanged), and the dtype, or None for the tensor's own; the
            placeholder for None and for an empty tensor, or None; and whether that shape has the last two axes
            exchanged.
        function: called at the first call: a tvm_ffi.Function that the caller holds, or None without one. otherwise:
        called for unusual arguments, or after a failed call, to report the reason.
        integers: lowest and highest value of integers, by place.
    """
    native = _native()
    if native is None:
        return otherwise
    module, exchange, calls = native
    ranges = integers or {}
    if any(isinstance(value, int) and not _holds(ranges.get(place, _INT64), value) for place, value in fixed):
        return otherwise
    limited = [
        (
            place,
            shape,
            None if dtype is None else torch.empty(0, dtype=dtype, device="cpu"),
            stand_in,
            turned,
            *ranges.get(place, _INT64),
        )
        for place, shape, dtype, stand_in, turned in given
    ]

    def address() -> int:
        found = function()
        return 0 if found is None else found.__chandle__()

    try:
        packed: Callable[..., None] = module.pack(
            exchange, torch.Tensor, calls, list(fixed), limited, address, otherwise
        )
        return packed
    except (TypeError, ValueError):  # TypeError: a native part that was built before the arguments here
        return otherwise


def _holds(limits: tuple[int, int], value: int) -> bool:
    return limits[0] <= value <= limits[1]


def tensor_check(
    dtypes: Sequence[torch.dtype], device: torch.device, shape: Sequence[int | None], alignment: int
) -> Callable[..., bool]:
    """A function `(tensor, first extent)`: whether it is a contiguous tensor as wanted; False if unknown. `shape`: its
    extents; None: any. Each call may give the first extent. `alignment`: in bytes, of the address."""
    native = _native()
    if native is None:
        return lambda tensor, first=-1: False
    module, exchange, _ = native
    place = torch.empty(0, dtype=torch.float32, device=device)
    try:
        checks: Callable[..., bool] = module.check(exchange, torch.Tensor, place, _described(dtypes, shape, alignment))
        return checks
    except ValueError:
        return lambda tensor, first=-1: False


def rows_check(
    wanted: Sequence[tuple[Sequence[torch.dtype], Sequence[int | None], int]], device: torch.device, most: int
) -> Callable[..., int]:
    """A function of several tensors: their number of rows if all are as wanted; -1 for others, and if unknown. All but
    the first may be None.

    Args:
        wanted: dtypes, shape (whose first extent is None) and alignment of each, as in `tensor_check`.
        most: rows.
    """
    native = _native()
    if native is None:
        return lambda *tensors: -1
    module, exchange, _ = native
    place = torch.empty(0, dtype=torch.float32, device=device)
    try:
        rows: Callable[..., int] = module.rows(
            exchange, torch.Tensor, place, [_described(*each) for each in wanted], most
        )
        return rows
    except ValueError:
        return lambda *tensors: -1


def _described(dtypes: Sequence[torch.dtype], shape: Sequence[int | None], alignment: int) -> tuple[Any, ...]:
    samples = [torch.empty(0, dtype=d, device="cpu") for d in dtypes]
    return samples, [-1 if extent is None else extent for extent in shape], alignment


def empty_factory(sample: torch.Tensor, by_column: bool = False) -> Callable[[], torch.Tensor]:
    """A function that makes contiguous tensors like `sample`, by the call of torch's compiled code if available: half
    the cost of `torch.empty_like`. `by_column`: contiguous with the last two axes exchanged."""
    placed = torch.empty_like(sample, device="meta", memory_format=torch.contiguous_format)
    if by_column:
        placed = placed.transpose(-1, -2).contiguous().transpose(-1, -2)
    shape, strides, dtype = tuple(sample.shape), placed.stride(), sample.dtype
    usual = functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=sample.device)
    make = getattr(torch._C._dynamo.guards, f"_empty_strided_{sample.device.type}", None)
    if make is None:
        return usual
    if sample.device.type == "cpu":
        return functools.partial(make, shape, strides, dtype)
    index = sample.device.index

    def made() -> torch.Tensor:
        tensor: torch.Tensor = make(shape, strides, dtype)
        return tensor if tensor.get_device() == index else usual()  # it takes the current device

    return made


# -- default device ------------------------------------------------------------------------------------------------------

# torch.set_default_device puts a mode around every function and attribute of torch, for 2 to 5 us each. Calls here name
# the device of all new tensors, so they run without it.

F = TypeVar("F", bound=Callable[..., Any])

try:
    from torch._C import (
        _get_function_stack_at,
        _is_torch_function_mode_enabled,
        _len_torch_function_stack,
        _pop_torch_function_stack,
        _push_on_torch_function_stack,
    )
except ImportError:  # another torch: calls run with the mode

    def _is_torch_function_mode_enabled() -> bool:
        return False


has_function_mode = _is_torch_function_mode_enabled


def take_default_device() -> Any:
    """If `has_function_mode()`: end the mode of torch.set_default_device and return it for `put_default_device`; None
    if another mode is there, which must see the call."""
    if _len_torch_function_stack() != 1 or type(_get_function_stack_at(0)) is not DeviceContext:
        return None
    return _pop_torch_function_stack()


def put_default_device(mode: Any) -> None:
    """Begin the mode that `take_default_device` has returned again."""
    _push_on_torch_function_stack(mode)


def without_default_device(function: F) -> F:
    """A decorator: calls run without the mode of torch.set_default_device."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not has_function_mode() or (mode := take_default_device()) is None:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            put_default_device(mode)

    return cast(F, call)


# -- launch arguments ----------------------------------------------------------------------------------------------------

# Launch arguments in the form that is fastest to pass.


def constant(value: Any) -> Any:
    """An argument of many launches: a GPU's tensors are converted once, others stay unchanged. A launch takes its
    stream from the torch tensors among its arguments, so one GPU tensor must stay a torch tensor."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    import tvm_ffi

    try:
        return tvm_ffi.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):  # a dtype that this torch does not exchange
        return value


def dense(tensor: torch.Tensor, in_either_order: bool = False) -> torch.Tensor:
    """The tensor, or a copy if it is not contiguous or not aligned to 16 bytes, for kernels that move vectors.
    `in_either_order`: it may also be contiguous with its last two axes exchanged."""
    fits = tensor.is_contiguous() or (in_either_order and tensor.transpose(-1, -2).is_contiguous())
    if fits and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone() if fits else tensor.clone(memory_format=torch.contiguous_format)


def unresolved(tensor: torch.Tensor) -> str | None:
    """The fault of a torch view whose bytes are not its values (`x.conj()`, `x.conj().imag`), and the remedy; None for
    other tensors."""
    if tensor.is_neg():
        return "is a view of the negative of its memory; pass its resolve_neg()"
    if tensor.is_conj():
        return "is a view of the conjugate of its memory; pass its resolve_conj()"
    return None


def launch_argument(value: Any) -> Any:
    """As `constant`, for arguments of one call: native launches take tensors unchanged."""
    return value if native_available() else constant(value)


# -- stream order --------------------------------------------------------------------------------------------------------

# Orders calls that share buffers and signals but run on several CUDA streams.


class StreamOrder:
    """Serialises calls on different streams that share buffers and signals.

    The first call waits for the stream that is current at construction, which may fill these.

    Args:
        device: of the streams.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._index = device.index if device.type == "cuda" else None  # asked for in every call
        # Streams whose calls no later stream has waited for, the last one at the end.
        self._earlier: list[torch.cuda.Stream] = []
        self._key: int | None = None  # handle of the last stream, which is cheap to get
        self.follow()

    def follow(self) -> None:
        """Make the current stream wait for the calls so far.

        A stream that is captured into a CUDA graph, and one that is not, cannot wait for each other: the caller that
        replays the graph orders it.
        """
        if self._index is None:
            return
        key = torch._C._cuda_getCurrentRawStream(self._index)
        if key == self._key:
            return
        stream = torch.cuda.current_stream(self._device)
        captured, kept = _is_captured(stream), []
        for earlier in self._earlier:
            if earlier == stream:
                continue
            if _is_captured(earlier) == captured:
                stream.wait_stream(earlier)
            else:
                kept.append(earlier)
        self._earlier, self._key = [*kept, stream], key


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
