"""Command-line arguments: the flags that every benchmark has, and types whose errors say what is wrong."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from benchmark.common.report import is_rank_zero, read_json, world_size
from tilescale_net.cli.arguments import non_negative_int, positive_float, positive_int, writable_file
from tilescale_net.runtime import settings

__all__ = ["non_negative_int", "positive_float", "positive_int"]  # which benchmarks take from here


def parse_bytes(text: str) -> int:
    """Bytes from `4096`, `64K`, `1.5M`, `2GiB` (powers of two).

    Raises:
        ValueError: not a size, or not a whole number of bytes.
    """
    value = settings.size_of(text)
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def parse_sizes(text: str) -> list[int]:
    """Sizes from a comma-separated list of sizes and doubling ranges: `2K..4M`, `8,64,1K..16K`.

    A range starts at its first size and doubles up to and including its last one. Order is kept.

    Raises:
        ValueError: an empty list, a malformed or zero size, a range that ends before it starts or starts at zero.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        size = parse_bytes(first)
        end = parse_bytes(last) if dots else size
        if size == 0:
            raise ValueError(f"{part!r} holds a size of zero bytes; the smallest size is 1")
        if end < size:
            raise ValueError(f"{part!r} ends before it starts; write the smaller size first")
        while size <= end:
            sizes.append(size)
            size *= 2
    return sizes


def int_list(minimum: int, maximum: int) -> Callable[[str], list[int]]:
    """argparse type: a comma-separated list of whole numbers within [minimum, maximum]."""

    def parse(text: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,4") from None
        for value in values:
            if not minimum <= value <= maximum:
                raise argparse.ArgumentTypeError(f"{value} is not within {minimum} and {maximum}")
        return values

    return parse


def byte_count(text: str) -> int:
    """argparse type: one size in bytes, such as 64K."""
    try:
        value = parse_bytes(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from None
    if value == 0:
        raise argparse.ArgumentTypeError("a size of zero bytes; the smallest size is 1")
    return value


def offsets(text: str) -> tuple[int, int]:
    """argparse type: one or two whole numbers from 0 to 255, of a destination and a source; one is for both."""
    values = int_list(0, 255)(text)
    if len(values) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is more than an offset of the destination and one of the source")
    return values[0], values[-1]


def one_of(*choices: str) -> Callable[[str], list[str]]:
    """argparse type: a comma-separated list of `choices`; `all` means every one of them."""

    def parse(text: str) -> list[str]:
        if text == "all":
            return list(choices)
        picked = text.split(",")
        for item in picked:
            if item not in choices:
                raise argparse.ArgumentTypeError(f"{item!r} is not one of {', '.join(choices)}, all")
        return picked

    return parse


def size_list(text: str) -> list[int]:
    """argparse type: see `parse_sizes`."""
    try:
        return parse_sizes(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from None


PLOTS = (".png", ".svg", ".pdf")


def plot_file(text: str) -> str:
    """argparse type: a file that can be created and whose suffix names a format."""
    if os.path.splitext(text)[1].lower() not in PLOTS:
        raise argparse.ArgumentTypeError(f"{text!r} does not end with {', '.join(PLOTS[:-1])} or {PLOTS[-1]}")
    return writable_file(text)


def _baseline(text: str) -> dict[str, Any]:
    try:
        return read_json(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from None


EXIT_CODES = (
    "Exit codes: 0 fine; 1 wrong data or another failure; 2 wrong arguments; 3 nothing could be measured here; 130 "
    "interrupted. Rows are printed, and written to --json, as they are measured."
)


def on_gpu() -> bool:
    """Whether kernels will run on a GPU: by TSN_DEVICE, else as torch reports."""
    from tilescale_net.runtime import settings

    settings.load_kernels_early()  # before CUDA starts, which torch may do now
    return settings.device_kind() == "cuda"


class BenchmarkParser(argparse.ArgumentParser):
    """An ArgumentParser with the flags that every benchmark has; only rank 0 prints, wrong arguments exit with 2.

    Adds `--json FILE`, `--plot FILE`, `--baseline FILE`, `--warmup N`, `--repeat N` and, when `sizes` is given,
    `--sizes LIST`.

    Args:
        description: one sentence, shown by `--help`.
        warmup, repeat: defaults of the flags; None leaves both out (for benchmarks that define their own).
        sizes: default of `--sizes`, such as `2K..4M`; None leaves it out.
        simulated: the same in the simulator, where large sizes only cost time; None for the same sizes.
    """

    def __init__(
        self,
        description: str,
        *,
        warmup: int | None = 5,
        repeat: int | None = 20,
        sizes: str | None = None,
        simulated: str | None = None,
    ) -> None:
        super().__init__(description=description, allow_abbrev=False, epilog=EXIT_CODES)
        self._sizes = sizes, simulated
        output = self.add_argument_group("output")
        text = "write all samples and medians to FILE"
        output.add_argument("--json", type=writable_file, metavar="FILE", help=text)
        output.add_argument(
            "--plot", type=plot_file, metavar="FILE", help="draw the tables into FILE (.png, .svg, .pdf)"
        )
        output.add_argument(
            "--baseline", type=_baseline, metavar="FILE", help="add ratios to an earlier run's --json file"
        )
        if warmup is not None:
            text = f"untimed runs before the timed ones ({warmup})"
            self.add_argument("--warmup", type=non_negative_int, default=warmup, metavar="N", help=text)
        if repeat is not None:
            text = f"timed runs, whose median is shown ({repeat})"
            self.add_argument("--repeat", type=positive_int, default=repeat, metavar="N", help=text)
        if sizes is not None:
            text = (
                f"sizes and doubling ranges such as 8,1K..4M ({sizes}{f'; simulator {simulated}' if simulated else ''})"
            )
            self.add_argument("--sizes", type=size_list, metavar="LIST", help=text)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse; also keeps the command line for the report."""
        parsed = super().parse_args(args, namespace)
        sizes, simulated = self._sizes
        if sizes is not None and parsed.sizes is None:
            parsed.sizes = parse_sizes(simulated if simulated and not on_gpu() else sizes)
        parsed.command = [os.path.basename(sys.argv[0]), *(sys.argv[1:] if args is None else args)]
        return parsed

    def print_help(self, file: Any = None) -> None:
        if is_rank_zero():
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """Print usage and `message` on rank 0 and leave with exit code 2; for checks across arguments too."""
        if is_rank_zero():
            self.print_usage(sys.stderr)
            sys.stderr.write(f"{self.prog}: error: {message}\n")
        raise SystemExit(2)


# (warmup, repeat) of kernels of MoE on a GPU; and the shapes where the user gives none: tokens of a rank by mode, ….
MOE_TIMING = (10, 30)
MOE_ON_GPU = {"throughput": 4096, "latency": 128, "hidden": 7168, "topk": 8, "experts": 256}
MOE_SIMULATED = {"throughput": 32, "latency": 16, "hidden": 512, "topk": 4, "experts": 16}


class MoeParser(BenchmarkParser):
    """With the flags of dispatch and combine: modes, layouts, dtypes, the shape, and whether data are verified.

    `parse_args` fills in the shape, and `tokens_of`: tokens of a rank by mode.
    """

    def __init__(self, description: str) -> None:
        super().__init__(description, warmup=None, repeat=None)
        choices = {
            "mode": (("throughput", "latency"), "throughput, latency, or all (all)"),
            "layout": (("rank", "expert"), "of throughput mode: rank, expert, or all (all)"),
            "dtype": (("bf16", "fp8"), "of dispatch: bf16, fp8, or all (all)"),
        }
        for name, (values, text) in choices.items():
            self.add_argument(f"--{name}", type=one_of(*values), default=list(values), metavar="LIST", help=text)
        numbers = {
            "tokens": "per rank (4096; in latency mode 128; simulator 32, 16)",
            "hidden": "elements of a row (7168; simulator 512)",
            "topk": "choices per token (8; simulator 4)",
            "experts": "of all ranks (256; simulator 16)",
            "warmup": f"untimed calls ({MOE_TIMING[0]})",
            "repeat": f"timed calls, whose median is shown ({MOE_TIMING[1]})",
        }
        for name, text in numbers.items():
            self.add_argument(f"--{name}", type=positive_int, metavar="N", help=text)
        self.add_argument("--no-check", action="store_true", help="do not verify the data")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        parsed = super().parse_args(args, namespace)
        shape = MOE_ON_GPU if on_gpu() else MOE_SIMULATED
        for name in ("hidden", "topk", "experts"):
            setattr(parsed, name, getattr(parsed, name) or shape[name])
        parsed.tokens_of = {mode: parsed.tokens or shape[mode] for mode in parsed.mode}
        if parsed.experts % world_size():
            self.error(f"--experts is {parsed.experts}; it must be a multiple of the {world_size()} ranks")
        return parsed
