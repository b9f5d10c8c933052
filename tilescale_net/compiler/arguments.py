"""What is wrong with the arguments of a launch, in the terms of the kernel's author.

The host functions that tilelang generates check every argument, but report errors in terms of their own conventions.
They run first, because they cost nothing; when one of them refuses, this module finds the reason.
"""

import numbers
from collections.abc import Callable, Sequence

import torch
import tvm_ffi
from tvm import tirx

from tilescale_net.errors import KernelError
from tilescale_net.runtime.launch_args import unresolved


class BadArguments(KernelError):
    """Arguments that a simulated kernel's host function refuses; `mismatch` gives the details."""


_NAMES = {"float8_e4m3": "float8_e4m3fn"}  # as torch calls them


def mismatch(func: tirx.PrimFunc, names: Sequence[str], arguments: Sequence, on_gpu: bool) -> str | None:
    """What is wrong with the first argument that does not fit, or None.

    Args:
        func: a prepared kernel; its last parameters are the arguments.
        names: of the arguments.
        arguments: as given, without the context.
        on_gpu: where the kernel's tensors have to be.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for name, param, given in zip(names, func.params[len(func.params) - len(names) :], arguments):
        if isinstance(given, tvm_ffi.Tensor):
            continue  # of `launch_arguments.constant`, whose maker has chosen it
        if param in func.buffer_map:
            buffer = func.buffer_map[param]
            problem = _tensor(buffer, given, on_gpu) or _extents(name, buffer, given, sizes)
            if problem:
                return f"argument {name}: expected {_expected(buffer)}; {problem}"
        elif problem := _scalar(str(param.dtype), given):
            return f"argument {name}: expected {param.dtype}; {problem}"
    return None


def integers(func: tirx.PrimFunc, names: Sequence[str]) -> list[tuple[int, int, int]]:
    """Place, lowest and highest value of each argument that is an integer of fewer than 64 bits, which host functions cut
    to its width. Arguments as for `mismatch`."""
    dtypes = [str(param.dtype) for param in func.params[len(func.params) - len(names) :]]
    limits = [(place, integer_limits(dtype)) for place, dtype in enumerate(dtypes)]
    return [(place, *known) for place, known in limits if known is not None and known[1] < 2**63 - 1]


def integer_limits(dtype: str) -> tuple[int, int] | None:
    """The lowest and the highest value of an integer type or bool; None for other types."""
    if dtype == "bool":
        return 0, 1
    kind, digits = dtype.rstrip("0123456789"), dtype.lstrip("uint")
    if kind not in ("int", "uint") or not digits:
        return None
    bits = int(digits) - (kind == "int")
    return -(1 << bits) if kind == "int" else 0, (1 << bits) - 1


def look_closer(function: Callable[..., None], ranges: Sequence[tuple[int, int, int]], *args) -> None:
    """Call a host function with integers that may be beyond their ranges, as `integers` has them. Raises BadArguments."""
    for place, low, high in ranges:
        if place < len(args) and isinstance(args[place], numbers.Integral) and not low <= args[place] <= high:
            raise BadArguments(f"argument {place} is {args[place]}; its range is {low} to {high}")
    function(*args)


def _constant(value) -> int | None:
    return int(value.value) if isinstance(value, tirx.IntImm) else None


def _dtype(buffer: tirx.Buffer) -> str:
    return _NAMES.get(str(buffer.dtype), str(buffer.dtype))


def _is_contiguous(buffer: tirx.Buffer) -> bool:
    """Whether the kernel requires a contiguous tensor, as it does unless it names strides."""
    run = 1
    for extent, stride in reversed(list(zip(buffer.shape, buffer.strides))):
        if _constant(stride) != run:
            return False
        run = run * _constant(extent) if run is not None and _constant(extent) is not None else None
    return True


def _strides(buffer: tirx.Buffer) -> list[int | None]:
    """The strides that the kernel requires; None where it requires none or only the run determines them."""
    if len(buffer.strides):
        return [_constant(stride) for stride in buffer.strides]
    strides, run = [], 1
    for extent in reversed(buffer.shape):
        strides.insert(0, run)
        run = run * _constant(extent) if run is not None and _constant(extent) is not None else None
    return strides


def _expected(buffer: tirx.Buffer) -> str:
    contiguous = ", contiguous" if not len(buffer.strides) or _is_contiguous(buffer) else ""
    return f"{_dtype(buffer)}[{', '.join(map(str, buffer.shape))}]{contiguous}"


def describe(value) -> str:
    """A value as an argument error shows it: tensors by dtype and shape, never by their elements."""
    if isinstance(value, torch.Tensor):
        contiguous = "" if value.is_contiguous() else f" with strides {tuple(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{contiguous}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__module__}.{type(value).__qualname__} of {value.dtype}{list(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _tensor(buffer: tirx.Buffer, given, on_gpu: bool) -> str | None:
    if given is None:
        return "got None"
    if not isinstance(given, torch.Tensor):
        advice = ", which torch.from_numpy makes a tensor of" if type(given).__module__ == "numpy" else ""
        return f"got {describe(given)}{advice}"
    got = f"got {describe(given)}"
    if str(given.dtype).removeprefix("torch.") != _dtype(buffer) or given.dim() != len(buffer.shape):
        return got
    if given.is_cuda != on_gpu:
        return f"got a tensor on {given.device}, and the kernel runs {'on a GPU' if on_gpu else 'in the simulator'}"
    if any(_constant(extent) not in (None, size) for extent, size in zip(buffer.shape, given.shape)):
        return got
    if lazy := unresolved(given):
        return f"{got}, which {lazy}"
    for size, wanted, stride in zip(given.shape, _strides(buffer), given.stride()):
        if wanted is not None and size > 1 and stride != wanted:
            return f"{got}; .contiguous() makes a copy that fits"
    return None


def _extents(name: str, buffer: tirx.Buffer, given: torch.Tensor, sizes: dict) -> str | None:
    """Whether the same name stands for the same size everywhere."""
    for extent, size in zip(buffer.shape, given.shape):
        if isinstance(extent, tirx.Var):
            known, where = sizes.setdefault(extent.name, (size, name))
            if known != size:
                return f"got {describe(given)}, but {extent.name} is {known} in argument {where}"
    return None


def _scalar(dtype: str, given) -> str | None:
    number = numbers.Real if dtype.startswith(("float", "bfloat")) else numbers.Integral
    if not isinstance(given, number):
        is_one = getattr(given, "shape", None) == () and hasattr(given, "item")
        return f"got {describe(given)}{'; give its .item()' if is_one else ''}"
    limits = integer_limits(dtype)
    if limits is not None and not limits[0] <= given <= limits[1]:
        return f"got {given}, and {dtype} is from {limits[0]} to {limits[1]}"
    return None
