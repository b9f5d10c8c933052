"""Checks of every operator's tensors, before torch sees them."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def as_weights(x: Any) -> torch.Tensor:
    """A router's weights, of any floating dtype, as float32 for kernels; gradients have the original dtype."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16, torch.float64) else x


def check(call: str, **tensors: Any) -> None:
    """Raise TypeError, by name, unless a value is a dense tensor; ValueError for tensors on several devices: with
    "meta" among them torch would compute shapes alone.
    """
    first = None
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{call}: {name} must be a tensor, not {type(x).__name__}")
        if x.layout != torch.strided or x.is_quantized or x.is_nested:
            kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            raise TypeError(
                f"{call}: {name} is a {kind} tensor; it must be a dense one, as to_dense() or dequantize() give"
            )
        if first is None:
            first = name
        elif x.device != tensors[first].device:
            raise ValueError(f"{call}: {name} is on {x.device}, but {first} on {tensors[first].device}")


# ---------------------------------------------------------------------------------------------------------------------
# Operators: registered with torch for graphs, gradients and modes, and called past torch's dispatcher otherwise.

_library = torch.library.Library("tilescale_net", "FRAGMENT")

try:
    # Observers between a caller and an operator: modes, function transforms, tracers, the profiler, Dynamo.
    from torch._C import _get_tracing_state, _is_torch_function_mode_enabled, _len_torch_dispatch_stack
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._C._functorch import maybe_current_level
    from torch.autograd import _profiler_enabled

    _knows_modes = True
except ImportError:  # of another torch: every call goes through its dispatcher
    _knows_modes = False

_is_compiling = torch.compiler.is_compiling

# `torch.compiler.disable` for a function, without its import of Dynamo, which takes a second of processor time.
outside_graphs = torch._compile._disable_dynamo


def is_eager(x: Any) -> bool:
    """Whether only this package must see an operator's call with `x`: an ordinary dense tensor without a mode,
    transform, tracer or profiler. It costs a twentieth of a call through torch's dispatcher.
    """
    return (
        not _is_compiling()
        and type(x) is torch.Tensor
        and _knows_modes
        and not _len_torch_dispatch_stack()
        and not _is_torch_function_mode_enabled()
        and maybe_current_level() is None
        and _get_tracing_state() is None
        and not _profiler_enabled()
        and get_eval_frame_callback() is None
        and x.layout is torch.strided
        and not x.is_quantized
        and not x.is_nested
        and not (x.dtype.is_complex and x.is_conj())  # torch's dispatcher resolves such views
        and not x.is_neg()
        and not torch.Tensor._is_zerotensor(x)
    )


def needs_gradient(x: torch.Tensor) -> bool:
    """Whether results computed from `x` now need gradients."""
    return x.requires_grad and torch.is_grad_enabled()


def is_unseen(x: torch.Tensor) -> bool:
    """Whether only the operator must see its call with `x`: `is_eager`, and no gradient."""
    return is_eager(x) and not needs_gradient(x)


def differentiable(function: Callable, setup: Callable, gradient: Callable) -> Callable:
    """Give the operator of a function its gradient, as `torch.library.register_autograd`; returns the operator for
    eager calls that need one.
    """
    torch.library.register_autograd(f"tilescale_net::{function.__name__[1:]}", gradient, setup_context=setup)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = function(*inputs)
            setup(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return gradient(ctx, *grads)

    return Eager.apply


def _with_known_names(function: Callable) -> Callable:
    """The function, with annotations that torch can evaluate: before 2.7 it knows only `typing.List`."""
    if torch.__version__ < "2.7":
        for argument, kind in function.__annotations__.items():
            function.__annotations__[argument] = kind.replace("list[", "typing.List[")
    return function


def custom_op(name: str) -> Callable[[Callable], Any]:
    """A decorator: `torch.library.custom_op` of tilescale_net::`name`, which changes none of its arguments."""
    return lambda function: torch.library.custom_op(
        f"tilescale_net::{name}", _with_known_names(function), mutates_args=()
    )


def operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """A decorator: makes the function the operator tilescale_net::`name`; it changes these of its arguments.

    As `torch.library.custom_op`, without its checks in each call.
    """

    def decorate(function: Callable) -> Callable:
        schema = torch.library.infer_schema(_with_known_names(function), mutates_args=mutates)
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, outside_graphs(function), "CompositeExplicitAutograd")
        return function

    return decorate


# ---------------------------------------------------------------------------------------------------------------------
# torch.autocast for GEMMs in operators that torch does not know.


def operands(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands of a GEMM: in the dtype of their device's torch.autocast region, as for torch.mm
    (docs.pytorch.org/docs/stable/amp.html: all floating dtypes except float64); unchanged outside of one, and for 8-bit
    operands with scales.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or any(x.dtype == torch.float8_e4m3fn for x in tensors):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


# ---------------------------------------------------------------------------------------------------------------------
# Keeps the operators in program order under torch.compile's default backend.
#
# Inductor orders kernels for least memory, by this rank's sizes, and may move an unknown operator anywhere between its
# producers and consumers. Ranks whose sizes differ (tokens of a dispatch, rows of an uneven exchange) would make their
# calls in different orders, and wait for each other. So each of our operators depends on the previous one, as Inductor
# does for torch's own collectives.


_LOWERING = "torch._inductor.lowering"  # imported by the first compilation, which takes seconds

_waiting: list[str] = []  # operators that are not yet registered with Inductor


def register_fake(operator: str) -> Callable[[Callable], Callable]:
    """A decorator, as `torch.library.register_fake`, for an operator of ours whose calls all ranks make in one order."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            # Compilation requests shapes after it has imported its lowerings and before it uses them.
            if _waiting and _LOWERING in sys.modules:
                _tell_inductor()
            return function(*args, **kwargs)

        torch.library.register_fake(f"tilescale_net::{operator}", call)
        return function

    _waiting.append(operator)
    return decorate


def _tell_inductor() -> None:
    kernel, lowerings = _kernel(), sys.modules[_LOWERING].lowerings
    while _waiting:
        overload = getattr(torch.ops.tilescale_net, _waiting.pop()).default
        lowerings[overload] = functools.partial(_lower, kernel, overload)


def _lower(kernel, overload, *args, **kwargs):
    """Inductor's lowering of unknown operators, with our kernel."""
    from torch._inductor import ir

    made = kernel.create(overload, *args, **kwargs)
    return torch.utils._pytree.tree_map(lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x, made)


@functools.cache
def _kernel() -> type:
    from torch._inductor import ir
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.virtualized import V

    # A dependency that orders without keeping memory alive, if torch has the distinction.
    fake = {"is_fake": True} if "is_fake" in {f.name for f in dataclasses.fields(WeakDep)} else {}

    class OrderedKernel(ir.FallbackKernel):
        """A call of an operator that depends on the previous one in the graph."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.earlier = getattr(V.graph, "tilescale_net_last_call", None)
            V.graph.tilescale_net_last_call = self.get_name()

        def get_read_writes(self):
            found = super().get_read_writes()
            if self.earlier is not None:
                found.reads.add(WeakDep(self.earlier, mutating_buf=self.get_name(), **fake))
            return found

    return OrderedKernel
