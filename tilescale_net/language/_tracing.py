"""Errors while a kernel is traced: where its author is, and what tilelang prints before them."""

import logging
import sys

from tilelang.language.eager import builder

from tilescale_net.errors import KernelError
from tilescale_net.language._primitive import author_line


def _is_wanted(record: logging.LogRecord) -> bool:
    """Whether to print a record: not the rewritten source of a kernel whose author gets a line and a sentence."""
    return not (record.levelno >= logging.CRITICAL and isinstance(sys.exc_info()[1], KernelError))


def author_place() -> str:
    """The author's line as the last line of a message, where a kernel is being traced; else ''."""
    if builder.Builder.current() is None:
        return ""
    file, line = author_line()
    return f"\n  at {file}:{line}"


def silence_dumps() -> None:
    """Keep tilelang from printing a kernel's source before an error of this package."""
    if _is_wanted not in builder.logger.filters:
        builder.logger.addFilter(_is_wanted)
