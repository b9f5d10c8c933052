"""Arguments of launches, launches with next to no Python, and the order of calls on several CUDA streams."""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.utils._device import DeviceContext

# -- quick calls ---------------------------------------------------------------------------------------------------------

# Launches and looks at tensors with next to no Python, where what they take is there; see csrc/launch.
#
# All of it may be missing: a tvm_ffi or a torch that exchanges tensors otherwise, a tensor of an unusual kind. Every
# function then reports it, and callers go the way through Python, which does the same.

_EXCHANGE = "__dlpack_c_exchange_api__"
_INT64 = -(2**63), 2**63 - 1
_CALLS = ("TVMFFIFunctionCall", "TVMFFIEnvSetStream", "TVMFFIErrorMoveFromRaised", "TVMFFIObjectDecRef")


@functools.cache
def _native() -> tuple[Any, int, list[Any]] | None:
    """The native part with what it needs of torch and of tvm_ffi: `(module, exchange, calls)`; None where that is missing."""
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
    """Whether launches and checks are made here."""
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
        fixed: places among the function's arguments, and what stands there in every call: tensors, numbers. `otherwise`
            must hold them. Launches go to the current stream of the GPU on which the tensors are.
        given: place of each argument of a call; the shape as which the function takes a tensor, with -1 for one extent
            as in `torch.Tensor.view` (empty: as it is), and the dtype, or None for the tensor's own; what stands in
            for None and for a tensor without elements, or None; and whether that is the shape of the tensor with its last two
            axes exchanged.
        function: called at the first call: a tvm_ffi.Function that the caller holds, or None without one. otherwise:
        called where something is unusual, or where a call fails, to report the reason.
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
    """A function `(tensor, first extent)`: whether it is a contiguous tensor as wanted; False also where that is
    unknown. `shape`: its extents; None: any. The first may be given in each call. `alignment`: bytes of which the
    tensor begins at a multiple."""
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
    """A function of several tensors: how many rows each of them has, where all are as wanted; -1 for others, also where
    that is unknown. Others than the first may be None.

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
    """A function that makes contiguous tensors like `sample`, by what torch's compiled code calls, where that is there: half
    of what `torch.empty_like` costs. `by_column`: contiguous with the last two axes exchanged."""
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

# torch.set_default_device puts a mode around every function and attribute of torch, for 2 to 5 us each. Calls here name the
# device of all that they make, so they run without it.

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
    """Where `has_function_mode()`: end the mode of torch.set_default_device and return it for `put_default_device`; None where
    another mode is there, which sees what a call does."""
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

# Arguments of launches in the form that is passed quickest.


def constant(value: Any) -> Any:
    """An argument of many launches: tensors of a GPU are converted once, others stay what they are. A launch takes its
    stream from the torch tensors among its arguments, so one of a GPU must stay one."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    import tvm_ffi

    try:
        return tvm_ffi.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):  # a dtype that this torch does not exchange
        return value


def dense(tensor: torch.Tensor, in_either_order: bool = False) -> torch.Tensor:
    """The tensor, or a copy where it is not contiguous or does not begin at a multiple of 16 bytes, as kernels that move vectors
    want it. `in_either_order`: with its last two axes exchanged it may be contiguous, too."""
    fits = tensor.is_contiguous() or (in_either_order and tensor.transpose(-1, -2).is_contiguous())
    if fits and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone() if fits else tensor.clone(memory_format=torch.contiguous_format)


def unresolved(tensor: torch.Tensor) -> str | None:
    """What is wrong with a view of torch whose bytes are not its values (`x.conj()`, `x.conj().imag`), and what to do;
    None for other tensors."""
    if tensor.is_neg():
        return "is a view of the negative of its memory; pass its resolve_neg()"
    if tensor.is_conj():
        return "is a view of the conjugate of its memory; pass its resolve_conj()"
    return None


def launch_argument(value: Any) -> Any:
    """As `constant`, for what a call gives: native launches take tensors as they are."""
    return value if native_available() else constant(value)


# -- stream order --------------------------------------------------------------------------------------------------------

# The order of calls that share buffers and signals, where a program makes them on several CUDA streams.


class StreamOrder:
    """Lets calls that are made on different streams run one after the other: they share buffers and signals.

    The first of them comes after what the stream that is current here holds, which may fill those.

    Args:
        device: of the streams.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._index = device.index if device.type == "cuda" else None  # asked for in every call
        # Whose calls no later stream has waited for; the last one at the end.
        self._earlier: list[torch.cuda.Stream] = []
        self._key: int | None = None  # of the last stream, which costs little to ask for
        self.follow()

    def follow(self) -> None:
        """What is launched next on the current stream comes after the calls so far.

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
