"""What stands around a framework's published modules when they run here: CUDA on a machine without a GPU, and the
framework's other modules.

`torch_cuda` makes "cuda" the CPU, nccl gloo, and streams and events nothing; on a GPU it does nothing. `install_modules` gives
the modules that a test names as they are published, and a stand-in for every other module of the framework.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import threading
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

GPU = torch.cuda.is_available()
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if GPU:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
DEVICE = torch.device("cuda" if GPU else "cpu")


# -- torch's CUDA -----------------------------------------------------------------------------------------------------


def _on_cpu(value):
    """A device as it is without a GPU."""
    named = value.type if isinstance(value, torch.device) else value if isinstance(value, str) else ""
    return torch.device("cpu") if named.split(":")[0] == "cuda" else value


class _OnCpu(TorchFunctionMode):
    """Factories and conversions that name a GPU make tensors of the CPU."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            numbered = isinstance(kwargs["device"], int)
            kwargs["device"] = torch.device("cpu") if numbered else _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if getattr(function, "__name__", "") in ("to", "new_empty", "new_zeros", "as_tensor"):
            args = tuple(map(_on_cpu, args))
        return function(*args, **kwargs)


class _Stream:
    device, cuda_stream, stream_id, device_index, device_type = torch.device("cpu"), 0, 0, 0, 1

    def __init__(self, *rest, **named): ...
    def wait_stream(self, other): ...
    def wait_event(self, event): ...
    def synchronize(self): ...
    def record_event(self, event=None):
        return event or _Event()


class _Event:
    def __init__(self, *rest, **named): ...
    def record(self, stream=None): ...
    def wait(self, stream=None): ...
    def synchronize(self): ...
    def query(self):
        return True

    def elapsed_time(self, other):
        return 1.0


class _StreamContext(contextlib.AbstractContextManager):
    def __init__(self, stream=None): ...
    def __exit__(self, *error): ...


def torch_cuda() -> None:
    """Once per process, before the framework is imported."""
    if GPU:
        return
    cuda, stream = torch.cuda, _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = cuda.StreamContext = _StreamContext
    answers = dict(
        is_initialized=False, init=None, device_count=SIZE, set_device=None, synchronize=None, empty_cache=None, set_stream=None,
        current_device=torch.device("cpu"), current_stream=stream, default_stream=stream, is_current_stream_capturing=False,
        memory_allocated=0, get_device_capability=(9, 0), get_device_name="NVIDIA H100", manual_seed=None, manual_seed_all=None,
        get_device_properties=types.SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132,
                                                    gcnArchName="", total_memory=80 << 30),
    )  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, lambda *rest, answer=answer, **named: answer)
    cuda.get_rng_state = lambda *rest: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *rest: torch.set_rng_state(state)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *rest, **named: 0
    for kind in ("Float", "Half", "BFloat16", "Int", "Long", "Byte"):
        of_cpu = getattr(torch, f"{kind}Tensor")
        setattr(cuda, f"{kind}Tensor", lambda *rest, of_cpu=of_cpu: of_cpu(*rest))
    same = lambda self, *rest, **named: self  # noqa: E731
    torch.Tensor.cuda = torch.Tensor.pin_memory = torch.nn.Module.cuda = same
    torch.Tensor.record_stream = lambda self, stream: None
    torch.set_default_device = lambda device: None
    # A mode is off while it handles a call, and backward runs functions that name a GPU.
    torch.Tensor.backward = lambda self, gradient=None, **named: torch.autograd.backward(self, gradient, **named)
    to = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *rest, **named: to(self, *map(_on_cpu, rest), **named)
    run = threading.Thread.run

    def run_on_cpu(self):  # a mode is of one thread
        with _OnCpu():
            run(self)

    threading.Thread.run = run_on_cpu
    _gloo()
    _OnCpu().__enter__()


def _gloo() -> None:
    """Groups of nccl are groups of gloo, whose collectives take fewer shapes and dtypes."""
    init, new, gather, barrier = dist.init_process_group, dist.new_group, dist.all_gather_into_tensor, dist.barrier
    exchange = dist.all_to_all_single

    def init_process_group(backend=None, *rest, **named):
        return init("gloo", *rest, **{k: v for k, v in named.items() if k not in ("device_id", "pg_options")})

    init_process_group.__signature__ = inspect.signature(init)

    def new_group(ranks=None, timeout=None, backend=None, pg_options=None, **named):
        return new(ranks, timeout=timeout, backend="gloo", **{k: v for k, v in named.items() if k != "device_id"})

    def all_gather_into_tensor(out, x, group=None, async_op=False):
        return gather(out.view(-1, *x.shape[1:]) if x.dim() else out, x, group, async_op)

    def all_to_all_single(out, x, *rest, **named):
        if x.dtype in (torch.bfloat16, torch.float8_e4m3fn) and x.dim() > 1:  # bytes; splits count rows
            out, x = out.view(torch.uint8), x.contiguous().view(torch.uint8)
        return exchange(out, x, *rest, **named)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group, module.new_group = init_process_group, new_group
        module.all_gather_into_tensor, module.all_to_all_single = all_gather_into_tensor, all_to_all_single
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group=group, async_op=async_op)


# -- a framework's other modules --------------------------------------------------------------------------------------


class _Class(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Module(types.ModuleType):
    """Its capitalised names are classes, its others mocks."""

    finder: "_Finder"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in self.finder.real:
            return importlib.import_module(full)
        is_class = name[:1].isupper() and not name.isupper()
        value = _Class(name, (), {"__init__": lambda self, *a, **k: None}) if is_class else MagicMock(name=full)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: str, folder: Path, real: list[str]) -> None:
        self.root, self.folder, self.real = root, folder, set(real)

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != self.root:
            return None
        if name in self.real:
            file = self.folder.joinpath(*name.split("."))
            inside = None if file.with_suffix(".py").is_file() else [str(file)]
            path = file / "__init__.py" if inside else file.with_suffix(".py")
            return importlib.util.spec_from_file_location(name, path, submodule_search_locations=inside)
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec):
        module = _Module(spec.name)
        module.finder = self
        return module

    def exec_module(self, module): ...


def install_modules(root: str, folder: str, real: list[str]) -> None:
    """Modules `real` of a framework from `folder`; all its others are stand-ins."""
    import sys

    sys.meta_path.insert(0, _Finder(root, Path(folder), real))


# -- shared by the programs -------------------------------------------------------------------------------------------


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest element that is wanted."""
    assert found.shape == wanted.shape, f"{tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if not wanted.numel():
        return 0.0
    found, wanted = found.detach().float(), wanted.detach().float()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


def values(*shape: int, seed: int) -> torch.Tensor:
    """Normal numbers of this rank, bfloat16."""
    generator = torch.Generator().manual_seed(100 * seed + RANK)
    return torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)


def summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' `x` in float32, by torch."""
    rows = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(rows, x, group=group)
    return torch.stack(rows).float().sum(0)


def quantised(x: torch.Tensor, group: int = 128, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in FP8 and the scales of their blocks."""
    blocks = x.float().view(x.shape[0], x.shape[1] // group, group)
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return (blocks / scales).to(torch.float8_e4m3fn).view(x.shape), scales.squeeze(-1)


def plain(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Rows in float32, whatever they came as; int32 scales are four exponents each (UE8M0)."""
    if scales is None:
        return x.float()
    if scales.dtype == torch.int32:
        scales = (scales.contiguous().view(torch.uint8).int() << 23).view(torch.float32)
    return (x.float().view(*x.shape[:-1], -1, 128) * scales.float().unsqueeze(-1)).view(x.shape)


class Experts:
    """Experts that multiply by a number each, and tokens for them."""

    def __init__(self, hidden: int, top_k: int = 3, of_rank: int = 4) -> None:
        self.hidden, self.top_k, self.of_rank, self.number = hidden, top_k, of_rank, of_rank * SIZE
        self.first = RANK * of_rank
        self.factor = (torch.rand(self.number, generator=torch.Generator().manual_seed(7)) + 0.5).to(DEVICE)

    def tokens(self, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[count, hidden] bfloat16, weights and choices."""
        generator = torch.Generator().manual_seed(100 * seed + RANK)
        x = torch.randn((count, self.hidden), generator=generator).to(torch.bfloat16)
        scores = torch.rand((count, self.number), generator=generator)
        weights, choices = scores.softmax(-1).topk(self.top_k, -1)
        return x.to(DEVICE), (weights / weights.sum(-1, keepdim=True)).to(DEVICE), choices.to(DEVICE)

    def check(
        self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor, most: float
    ) -> None:
        """Compare a layer's result with plain torch's."""
        found = difference(out, x.float() * (weights * self.factor[choices]).sum(1, keepdim=True))
        assert found < most, f"the largest difference is {found} of the largest element"


def run(cases: dict) -> None:
    """Run the cases named in CASES, between semicolons, all by default, each on all ranks; rank 0 prints each that is right."""
    chosen = os.environ.get("CASES", "").split(";") if os.environ.get("CASES") else list(cases)
    for name in chosen:
        cases[name]()
        dist.barrier()
        if RANK == 0:
            print("right:", name, flush=True)
