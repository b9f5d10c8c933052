"""Shorthand for kernels of tests: types of tensors by dtype, and decorators of kernels without compile-time arguments."""

import functools
from collections.abc import Callable
from typing import Any

import tilelang.language as T

import tilescale_net as tsn


def _tensors(dtype: str) -> Callable[..., Any]:
    return lambda *shape: T.Tensor(shape, dtype)


f16, bf16, f32, f64 = map(_tensors, ("float16", "bfloat16", "float32", "float64"))
u8, i32, i64, u64 = map(_tensors, ("uint8", "int32", "int64", "uint64"))


def traced(kernel: Callable[..., Any]) -> Callable[[], Any]:
    """Decorator of a kernel: `name()` is the T.prim_func."""
    factory = functools.wraps(kernel)(lambda: T.prim_func(kernel))
    del factory.__wrapped__  # type: ignore[attr-defined]  # its signature is the kernel's, and the factory takes nothing
    return factory


def jitted(kernel: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator of a kernel, with the options of `tsn.jit`: `name()` is the compiled kernel."""
    return tsn.jit(traced(kernel), **options) if kernel else functools.partial(jitted, **options)
