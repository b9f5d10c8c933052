"""Command-line arguments: the flags of every benchmark, and types with clear errors."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from benchmark.common.report import is_rank_zero, read_json, world_size
from tilescale_net.cli.arguments import Parser, non_negative_int, positive_float, positive_int, writable_file
from tilescale_net.runtime import settings

__all__ = ["non_negative_int", "positive_float", "positive_int"]  # imported from here by benchmarks


def parse_bytes(text: str) -> int:
    """Bytes from `4096`, `64K`, `1.5M`, `2GiB` (powers of two). Raises ValueError: not a size, or not a whole number of
    bytes."""
    value = settings.size_of(text)
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def parse_sizes(text: str) -> list[int]:
    """Sizes from a comma-separated list of sizes and doubling ranges: `2K..4M`, `8,64,1K..16K`. A range starts at its
    first size and doubles up to and including its last one. Order is kept. Raises ValueError: an empty list, a
    malformed or zero size, a range that ends before it starts or starts at zero."""
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


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type whose errors are the messages of `parse`."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as err:
            raise argparse.ArgumentTypeError(str(err)) from None

    return checked


def _one_size(text: str) -> int:
    value = parse_bytes(text)
    if value == 0:
        raise ValueError("a size of zero bytes; the smallest size is 1")
    return value


byte_count = _argument(_one_size)  # argparse type: one size in bytes, such as 64K
size_list = _argument(parse_sizes)  # argparse type: see `parse_sizes`
_baseline = _argument(read_json)


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


PLOTS = (".png", ".svg", ".pdf")


def plot_file(text: str) -> str:
    """argparse type: a file that can be created and whose suffix names a format."""
    if os.path.splitext(text)[1].lower() not in PLOTS:
        raise argparse.ArgumentTypeError(f"{text!r} does not end with {', '.join(PLOTS[:-1])} or {PLOTS[-1]}")
    return writable_file(text)


def on_gpu() -> bool:
    """Whether kernels will run on a GPU: by TSN_DEVICE, else as torch reports."""
    settings.load_kernels_early()  # before CUDA starts, which torch may do now
    return settings.device_kind() == "cuda"


EXIT_CODES = (
    "Exit codes: 0 fine; 1 wrong data or another failure; 2 wrong arguments; 3 nothing could be measured here; 130 "
    "interrupted. Rows are printed, and written to --json, as they are measured."
)
METAVARS: dict[Any, str] = {positive_int: "N", non_negative_int: "N", positive_float: "X", byte_count: "SIZE"}
ON_GPU, IN_SIMULATOR = (5, 20), (1, 3)  # default (warmup, repeat); in the simulator they only cost time
TIMINGS = ("launch", "graph", "loop")
CALLS = TIMINGS[:2]  # of operations without a loop in a kernel


class BenchmarkParser(Parser):
    """A parser with the flags of every benchmark; only rank 0 prints, wrong arguments exit with 2.

    Adds `--json FILE`, `--plot FILE`, `--baseline FILE`, `--warmup N`, `--repeat N` and, when `sizes` is given,
    `--sizes LIST`.

    Args:
        description: one sentence, shown by `--help`.
        warmup, repeat: defaults of the flags; None leaves both out (for benchmarks that define their own).
        sizes: default of `--sizes`, such as `2K..4M`; None leaves it out.
        simulated: the same in the simulator, where large sizes only cost time; None for the same sizes.
        timing: choices of `--timing`, of TIMINGS; with any, `Timer.of` chooses defaults of warmup and repeat by device.
        check: add `--no-check`.
    """

    def __init__(
        self,
        description: str,
        *,
        warmup: int | None = 5,
        repeat: int | None = 20,
        sizes: str | None = None,
        simulated: str | None = None,
        timing: Sequence[str] = (),
        check: bool = False,
    ) -> None:
        super().__init__(description=description, allow_abbrev=False, epilog=EXIT_CODES)
        self._sizes = sizes, simulated
        self.option("--json", writable_file, None, "write all samples and medians to FILE", "FILE")
        self.option("--plot", plot_file, None, f"draw the tables into FILE ({', '.join(PLOTS)})", "FILE")
        self.option("--baseline", _baseline, None, "add ratios to an earlier run's --json file", "FILE")
        untimed, timed = "untimed runs before the timed ones", "timed runs, whose median is shown"
        if timing:
            ways = zip(
                TIMINGS, ("launches from Python", "replays of a CUDA graph (default)", "a loop inside the kernel")
            )
            text = ", or ".join(way for name, way in ways if name in timing)
            self.add_argument("--timing", choices=timing, default="graph", help=f"{text}; on a GPU")
            by_device = "({}; in the simulator {})"
            self.option("--warmup", non_negative_int, None, f"{untimed} {by_device.format(ON_GPU[0], IN_SIMULATOR[0])}")
            self.option("--repeat", positive_int, None, f"{timed} {by_device.format(ON_GPU[1], IN_SIMULATOR[1])}")
        elif warmup is not None:
            self.option("--warmup", non_negative_int, warmup, untimed)
        if repeat is not None and not timing:
            self.option("--repeat", positive_int, repeat, timed)
        if sizes is not None:
            shown = f"{sizes}{f'; simulator {simulated}' if simulated else ''}"
            self.option("--sizes", size_list, None, f"sizes and doubling ranges such as 8,1K..4M ({shown})", "LIST")
        if check:
            self.flag("--no-check", "do not verify the data")

    def option(self, name: str, kind: Callable[[str], Any], default: Any, text: str, metavar: str = "") -> None:
        """Add an option with a value. The help ends with the default, unless `text` ends with one in brackets."""
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        about = text if default is None or text.endswith(")") else f"{text} ({shown})"
        self.add_argument(name, type=kind, default=default, metavar=metavar or METAVARS.get(kind, "LIST"), help=about)

    def flag(self, name: str, text: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=text)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse; also keeps the command line for the report."""
        parsed = super().parse_args(args, namespace)
        sizes, simulated = self._sizes
        if sizes is not None and parsed.sizes is None:
            parsed.sizes = parse_sizes(simulated if simulated and not on_gpu() else sizes)
        parsed.command = [os.path.basename(sys.argv[0]), *(sys.argv[1:] if args is None else args)]
        return parsed

    def require_two_ranks(self, what: str, start: str = "GPUS=2") -> None:
        """Reject (exit code 2) a launch with one rank. `what`: subject of the message, such as "copies need"."""
        if world_size() < 2:
            self.error(f"{what} two ranks or more; start it with {start} bash launch.sh …")

    def print_help(self, file: Any = None) -> None:
        if is_rank_zero():
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """Print usage and `message` on rank 0 and leave with exit code 2; for checks across arguments too."""
        if is_rank_zero():
            self.print_usage(sys.stderr)
            sys.stderr.write(f"{self.prog}: error: {message}\n")
        raise SystemExit(2)
