"""`precompile`: compiles the kernels of listed objects into a folder that an image ships, without a GPU."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilescale_net.cli.arguments import positive_int
from tilescale_net.errors import ConfigurationError, TileScaleError

if TYPE_CHECKING:
    from tilescale_net.compiler.jit import Call

ARCH, SMS = "sm_90a", 132  # of H100 and H200
_KERNELS = "tilescale_net.kernels."
_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")


def precompile_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `precompile`."""
    command.add_argument("list", nargs="?", metavar="LIST", help="JSON file of objects, see docs/install.md")
    text = "compile the kernels of this folder: of an earlier run, of another version or GPU"
    command.add_argument("--like", metavar="FOLDER", help=text)
    command.add_argument("--output", default="tilescale_net_kernels", metavar="FOLDER", help="(%(default)s)")
    command.add_argument("--arch", default=ARCH, help="of the GPUs (%(default)s)")
    command.add_argument("--sms", type=positive_int, default=SMS, metavar="N", help="SMs of a GPU (%(default)s)")
    text = "kernels at a time (one for each processor)"
    command.add_argument("--jobs", type=positive_int, metavar="N", help=text)


def precompile(args: argparse.Namespace) -> int:
    """Compile all kernels, with a line for each; 1 if one of them fails. Raises ConfigurationError: a list, an
    object or a folder that is not valid, or no compiler."""
    from tilescale_net.compiler import gpu_cache, toolchain

    if not args.list and not args.like:
        raise ConfigurationError("precompile: give a LIST of objects, --like FOLDER, or both")
    if not gpu_cache.is_enabled():
        raise ConfigurationError("precompile: TILELANG_DISABLE_CACHE or TSN_TRACE is set, with which nothing is cached")
    toolchain.find_nvcc()
    calls: list[Call] = []
    for call in [*(_of_list(args.list, args.sms) if args.list else ()), *(_of_folder(args.like) if args.like else ())]:
        if call not in calls:
            calls.append(call)
    output = Path(args.output).absolute()
    target = {"kind": "cuda", "arch": args.arch}
    begin, failed = time.monotonic(), 0
    with gpu_cache.writing_to(output), ThreadPoolExecutor(args.jobs or len(os.sched_getaffinity(0))) as threads:
        print(f"precompile: {len(calls)} kernels for {args.arch} into {output}", flush=True)
        started = {threads.submit(_timed, call, target): call for call in calls}
        for number, future in enumerate(as_completed(started), 1):
            factory, given, named = started[future]
            error = future.exception()
            if error is not None and not isinstance(error, TileScaleError | ValueError | RuntimeError):
                raise error
            failed += error is not None
            outcome = f"{future.result():.1f} s" if error is None else f"failed: {error}"
            print(f"precompile: {number} of {len(calls)}: {factory.__name__}, {outcome}", flush=True)
    print(
        f"precompile: {len(calls) - failed} kernels in {time.monotonic() - begin:.0f} s; use them with TSN_KERNELS={output}"
    )
    return int(failed > 0)


def _timed(call: Call, target: dict[str, Any]) -> float:
    begin = time.monotonic()
    factory, given, named = call
    if factory.cached_for_gpu(given, named, target) is None:
        raise TileScaleError(
            "it cannot be cached: a file of the package was changed while this ran, or the folder is full"
        )
    return time.monotonic() - begin


# -- kernels of an earlier run ----------------------------------------------------------------------------------------


def _of_folder(place: str) -> Iterable[Call]:
    from tilescale_net.compiler import gpu_cache

    paths = sorted(Path(place).glob(f"*{gpu_cache.SUFFIX}"))
    if not paths:
        raise ConfigurationError(
            f"--like {place}: no kernels there; name the folder `tilescale_net` of tilelang's cache"
        )
    for path in paths:
        try:
            made = gpu_cache.made_by(path)
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigurationError(f"--like: {path} is damaged or no kernel of this package") from None
        if made is not None:
            name, given, named = made
            yield _factory(path, name), given, named


def _factory(path: Path, name: str) -> Any:
    from tilescale_net.compiler.jit import KernelFactory

    module, _, function = name.partition(":")
    found = None
    if module.startswith(_KERNELS):
        try:
            found = getattr(importlib.import_module(module), function, None)
        except ImportError:
            found = None
    if not isinstance(found, KernelFactory):
        raise ConfigurationError(f"--like: {path} is of {name}, which this version does not have")
    return found


# -- objects of a list ------------------------------------------------------------------------------------------------


def _of_list(file: str, sms: int) -> Iterable[Call]:
    try:
        listed = json.loads(Path(file).read_text())
    except OSError as err:
        raise ConfigurationError(f"{file}: {err.strerror}") from None
    except ValueError as err:
        raise ConfigurationError(f"{file} is no JSON: {err}") from None
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ConfigurationError(f"{file} must hold a list of objects, such as {EXAMPLE}")
    for number, entry in enumerate(listed, 1):
        try:
            yield from _of_object(dict(entry), sms)
        except (KeyError, TypeError, ValueError) as err:
            text = f"{err} is missing" if isinstance(err, KeyError) else str(err)
            raise ConfigurationError(f"{file}, object {number}: {text}") from None


EXAMPLE = '[{"object": "AllToAll", "ranks": 8, "num_experts": 256, "max_tokens": 128, "hidden": 7168, "top_k": 8, "mode": "latency"}]'


def _of_object(entry: dict[str, Any], sms: int) -> Iterable[Call]:
    import torch

    from tilescale_net.compiler.jit import Recorded, recording
    from tilescale_net.deep_ep.objects import high_throughput_options, low_latency_options, room_for
    from tilescale_net.kernels.moe import Tuning
    from tilescale_net.kernels.moe.buffers import variants_of
    from tilescale_net.kernels.moe.config import configure

    kind, ranks, nodes = entry.pop("object"), entry.pop("ranks"), entry.pop("nodes", 1)
    for name in ("dtype", "combine_dtype"):
        if name in entry:
            if entry[name] not in _DTYPES:
                raise ValueError(f"{name} is {entry[name]!r}; it must be one of {', '.join(_DTYPES)}")
            entry[name] = getattr(torch, entry[name])
    tuning = Tuning(**entry.pop("tuning", {}))
    if kind == "AllToAll":
        objects = [entry]
    elif kind == "deep_ep.low_latency":
        # Both: Buffer makes an object for each.
        objects = [entry | low_latency_options(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)]
    elif kind == "deep_ep.high_throughput":
        tuning, entry["max_tokens"] = Tuning(blocks=entry.pop("num_sms", 20)), room_for(entry["max_tokens"])
        objects = [entry | high_throughput_options(entry.get("scale_words"))]
    else:
        raise ValueError(f"object is {kind!r}; it must be AllToAll, deep_ep.low_latency or deep_ep.high_throughput")
    with recording() as calls:
        for options in objects:
            for variant in variants_of(configure(ranks, **options), tuning, sms, nodes):
                try:
                    variant()
                except Recorded:
                    continue
    return _distinct(calls)


def _distinct(calls: Sequence[Call]) -> list[Call]:
    return [call for number, call in enumerate(calls) if call not in calls[:number]]
