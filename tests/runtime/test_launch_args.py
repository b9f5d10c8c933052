"""Launches through C and looks at tensors, against what Python does; the order of calls on different streams."""

import contextlib
import ctypes
import gc
import weakref

import pytest
import torch
import torch.overrides
import tvm_ffi

from tilescale_net import _native
from tilescale_net.kernels.moe import checks
from tilescale_net.kernels.moe.checks import ArgumentError
from tilescale_net.kernels.moe.handle import POOL_SIZE, LikeFactory, TensorPool
from tilescale_net.runtime import launch_args, profiling
from tilescale_net.runtime.launch_args import StreamOrder

FP8 = torch.float8_e4m3fn


def _seen(value):
    if not hasattr(value, "shape"):
        return value
    # Host functions of kernels look at strides, which must be there.
    assert tuple(value.strides) == torch.empty(tuple(value.shape)).stride()
    return tuple(value.shape), str(value.dtype)


def test_arguments_of_a_call_join_the_constant_ones():
    seen: list = []
    function = tvm_ffi.convert(lambda *arguments: seen.append([*map(_seen, arguments)]))
    x, few = torch.arange(6).reshape(2, 3), torch.zeros((1, 4), dtype=torch.int32)
    slow: list = []
    rules = [
        (1, (), None, None, False), (3, (-1, 4), torch.int32, few, False), (4, (-1, 2), None, None, False)
    ]  # fmt: skip
    launch = launch_args.native_launch([(0, x), (2, 5)], rules, lambda: function, lambda *args: slow.append(args))
    rows, pairs = torch.zeros((2, 2, 4), dtype=torch.bfloat16), torch.zeros((3, 4))
    for value in (rows, None, rows[:0]):
        launch(7, value, pairs)
    first = [((2, 3), "int64"), 7, 5, ((2, 4), "int32"), ((6, 2), "float32")]
    none = [*first[:3], ((1, 4), "int32"), first[-1]]
    assert seen == [first, none, none] and not slow
    unusual = [(7, rows), ("a", rows, pairs), (7, rows.transpose(0, 1), pairs), (7, rows, None), (1 << 70, rows, pairs)]
    unusual.append((7, torch.zeros((3, 1), dtype=torch.bfloat16), pairs))  # 6 bytes are no words
    for arguments in unusual:
        launch(*arguments)
    assert slow == unusual and len(seen) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8, torch.int8, torch.uint64, torch.float64])
def test_a_tensor_is_taken_as_the_dtype_that_the_kernel_has(dtype):
    """Another dtype of as many bits would fail in the kernel's host function, and each call be made again by the slow way."""
    seen, slow = [], []
    function = tvm_ffi.convert(lambda *arguments: seen.extend(map(_seen, arguments)))
    rules = [(0, (2, -1), dtype, None, False)]
    with torch.device("meta"):  # a caller's default device is none of the launch's business
        launch = launch_args.native_launch([], rules, lambda: function, lambda *args: slow.append(args))
    for value in (torch.zeros((4, 8), dtype=dtype), torch.zeros(32 * dtype.itemsize, dtype=torch.uint8)):
        launch(value)
    assert seen == 2 * [((2, 16), str(dtype).removeprefix("torch."))] and not slow


def test_a_tensor_whose_last_two_axes_are_exchanged():
    seen, slow = [], []
    function = tvm_ffi.convert(lambda *arguments: seen.extend(map(_seen, arguments)))
    few = torch.zeros((1, 3), dtype=torch.int32)
    rules = [(0, (-1, 3), torch.int32, few, True)]
    launch = launch_args.native_launch([], rules, lambda: function, lambda *args: slow.append(args))
    by_column = torch.zeros((2, 2, 3)).transpose(1, 2)
    for value in (by_column, None, by_column[:0]):
        launch(value)
    assert seen == [((4, 3), "int32"), ((1, 3), "int32"), ((1, 3), "int32")] and not slow
    for value in (by_column.contiguous(), torch.zeros(6)):
        launch(value)
    assert len(seen) == 3 and [value.dim() for (value,) in slow] == [3, 1]


def test_integers_beyond_their_range_go_the_other_way():
    seen: list = []
    function, slow = tvm_ffi.convert(lambda *arguments: seen.append(arguments)), []
    rules, ranges = [(0, (), None, None, False), (1, (), None, None, False)], {0: (-(2**31), 2**31 - 1)}
    launch = launch_args.native_launch([(2, 1)], rules, lambda: function, lambda *args: slow.append(args), ranges)
    for value in (-(2**31), 2**31 - 1, 2**31, -(2**31) - 1, 2**32 + 7):
        launch(value, 2**40)
    assert [value for value, *_ in seen] == [-(2**31), 2**31 - 1]
    assert slow == [(2**31, 2**40), (-(2**31) - 1, 2**40), (2**32 + 7, 2**40)]
    assert launch_args.native_launch([(0, 2**31)], [], lambda: function, launch, ranges) is launch


def test_the_default_device_of_a_user_changes_nothing():
    x = torch.zeros((3, 4))
    torch.set_default_device("meta")
    try:
        found = launch_args.tensor_check([torch.float32], torch.device("cpu"), [None, 4], 4)
    finally:
        torch.set_default_device(None)
    assert found(x, 3) and not found(x, 2) and not found(x.half(), 3)


@pytest.mark.parametrize(
    "decorate", [launch_args.without_default_device, profiling.named("tilescale_net.test")], ids=["plain", "named"]
)
def test_calls_run_without_the_mode_of_the_default_device(decorate):
    """The mode is there again behind them, also where they fail; another mode still sees its operators."""

    @decorate
    def made(fails: bool = False) -> str:
        if fails:
            raise ValueError("no")
        return torch.empty(1).device.type

    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            functions.append(function)
            return function(*args, **(kwargs or {}))

    functions: list = []
    assert made() == "cpu"
    torch.set_default_device("meta")
    try:
        assert made() == "cpu" and torch.empty(1).device.type == "meta"
        with pytest.raises(ValueError, match="no"):
            made(fails=True)
        assert torch.empty(1).device.type == "meta"
        with Other():
            assert made() == "meta" and functions
    finally:
        torch.set_default_device(None)
    assert made() == torch.empty(1).device.type == "cpu"


def test_a_function_that_fails_or_is_missing():
    def fails(*arguments):
        raise ValueError("no")

    def otherwise(*arguments):
        raise RuntimeError(f"because of {arguments}")

    function = tvm_ffi.convert(fails)
    for found in (lambda: function, lambda: None):
        launch = launch_args.native_launch([], [(0, (), None, None, False)], found, otherwise)
        with pytest.raises(RuntimeError, match="because of"):
            launch(3)

    def asked():
        raise KeyError("wrong device")

    with pytest.raises(KeyError):
        launch_args.native_launch([], [], asked, otherwise)()
    assert launch_args.native_launch([(i, i) for i in range(100)], [], asked, otherwise) is otherwise
    assert launch_args.native_launch([(0, "text")], [], asked, otherwise) is otherwise


def test_a_launch_ends_with_its_owner():
    class Owner:
        def __call__(self):
            pass

    owner = Owner()
    launch, gone = launch_args.native_launch([(0, torch.zeros(3))], [], lambda: None, owner), weakref.ref(owner)
    launch()
    del owner, launch
    gc.collect()
    assert gone() is None


def test_checks_agree_with_python():
    device = torch.device("cpu")
    wide = torch.zeros((4, 16), dtype=torch.bfloat16)
    tensors = [
        wide, wide[:, :8], wide[1:, :], wide[:0], wide.t(), wide.float(), wide.to(FP8), wide[0], wide.view(4, 1, 16),
        torch.zeros((4, 17), dtype=torch.bfloat16)[:, 1:], torch.zeros(65, dtype=torch.bfloat16)[1:].view(4, 16),
        wide[::2], wide[:1, :], None, 3, torch.nn.Parameter(wide), torch.zeros((4, 16), device="meta", dtype=torch.bfloat16),
    ]  # fmt: skip
    for dtypes in ((torch.bfloat16,), (torch.float32, FP8), ()):
        for shape in ((None, 16), (4, 16), (None, 8)):
            for alignment in (1, 16):
                check = launch_args.tensor_check(dtypes, device, shape, alignment)
                for tensor in tensors:
                    try:
                        checks.check_tensor("x", tensor, device, dtypes, shape, alignment)
                        right = True
                    except ArgumentError:
                        right = False
                    # A kind of its own is left to Python.
                    wanted = right and type(tensor) is torch.Tensor
                    assert check(tensor) == wanted, (tensor, dtypes, shape, alignment)
    check = launch_args.tensor_check((torch.bfloat16,), device, (None, 16), 16)
    assert check(wide, 4) and not check(wide, 3)


def test_rows_of_tensors_that_fit_together():
    device = torch.device("cpu")
    wanted = [((torch.bfloat16,), (None, 16), 16), ((torch.int64,), (None, 4), 1), ((torch.float32,), (None, 4), 1)]
    rows_of = launch_args.rows_check(wanted, device, 6)
    x = torch.zeros((8, 16), dtype=torch.bfloat16)
    ids = torch.zeros((8, 4), dtype=torch.int64)
    weights = torch.zeros((8, 4))
    for n in (0, 1, 6):
        assert rows_of(x[:n], ids[:n], weights[:n]) == rows_of(x[:n], ids[:n], None) == n
    wrong = [
        (x[:7], ids[:7], weights[:7]), (x[:5], ids[:4], weights[:5]), (x[:5], ids[:5], weights[:4]), (x[:5], ids[:5].int(), None),
        (None, ids, weights), (x[:5], ids[:5]), (x[:5], ids[:5], torch._neg_view(weights[:5])), (x[::2], ids[::2], None), (5, 5, 5),
    ]  # fmt: skip
    for tensors in wrong:
        assert rows_of(*tensors) == -1, tensors
    assert launch_args.rows_check(wanted, device, -1)(x, ids, weights) == -1  # none is usual


def test_words_that_are_set():
    any_set, watch = _native.launch.words()
    words = (ctypes.c_uint32 * 4)()
    assert not any_set()
    watch([ctypes.addressof(words), ctypes.addressof(words) + 8])
    for place, seen in ((1, False), (3, False), (2, True)):
        assert not any_set()
        words[place] = 1 << 31
        assert any_set() == seen
        words[place] = 0
    words[0] = 1
    watch([])
    assert not any_set()


def test_new_tensors():
    rows = LikeFactory((3, 8), torch.float16, torch.device("cpu"))
    for count in (0, 1, 5, 5):
        made = rows(count)
        assert made.shape == (count, 3, 8) and made.is_contiguous() and made.dtype == torch.float16
    with torch.inference_mode():
        assert LikeFactory((2,), torch.int32, torch.device("cpu"))(2).is_inference()
    for length in (8, 3):
        vectors = TensorPool(length, torch.device("cpu"))
        tensors = [vectors.next(stream) for stream in ("a", "b", None) for _ in range(POOL_SIZE + 1)]
        for number, vector in enumerate(tensors):
            assert vector.shape == (length,) and vector.is_contiguous()
            vector.fill_(number)
        assert [int(v[0]) for v in tensors] == [*range(len(tensors))]


class _Stream:
    """A fake stream of a GPU that records which streams it waits for."""

    def __init__(self, key: int):
        self.key, self.captured, self.waited = key, False, []

    def wait_stream(self, other) -> None:
        self.waited.append(other.key)


def test_calls_on_different_streams(monkeypatch):
    streams, current = [_Stream(key) for key in range(3)], [0]

    @contextlib.contextmanager
    def inside(stream):
        before, current[0] = current[0], stream.key
        yield
        current[0] = before

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[current[0]])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: streams[current[0]].captured)
    order = StreamOrder(torch.device("cuda", 0))  # made on stream 0, whose work the first call waits for
    for key in (1, 1, 0, 0):
        current[0] = key
        order.follow()
    assert [s.waited for s in streams] == [[1], [0], []]
    streams[2].captured = True  # neither waits for streams that are not captured, nor is waited for
    for key in (2, 2, 1):
        current[0] = key
        order.follow()
    assert [s.waited for s in streams] == [[1], [0, 0], []]  # the last that was not captured is not forgotten
    streams[0].captured = True
    for key in (2, 0):  # two streams of one capture
        current[0] = key
        order.follow()
    assert streams[0].waited == [1, 2]
    StreamOrder(torch.device("cpu")).follow()
