"""Standard output of the command: if a write fails, the command exits with one line on standard error."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["checked_output"]


class _OutputError(Exception):
    """A write to standard output failed.

    This is not an `OSError`, because the code that writes may catch the `OSError` of other operations.

    Args:
        reason: the error of the write.
    """

    def __init__(self, reason: OSError) -> None:
        super().__init__(f"writing to standard output failed: {reason.strerror}")
        self.is_broken_pipe = isinstance(reason, BrokenPipeError)


class _StandardOutput(io.FileIO):
    """The unbuffered file below `sys.stdout`, through which everything is written."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            # Unlike the method of the base class, this also raises an error if the write would block.
            return os.write(self.fileno(), data)
        except OSError as error:
            raise _OutputError(error) from error


@contextmanager
def checked_output() -> Iterator[None]:
    """Replace `sys.stdout` in a block, and exit if a write to it fails.

    Other exceptions, including every other `OSError`, propagate unchanged.

    Raises:
        SystemExit: standard output is closed, or a write to it failed. The exit status is 1. The reason is
            printed on standard error, except for a pipe without a reader: `head` closes its pipe early on
            purpose.
    """
    try:
        if sys.stdout is None:  # the process was started with a closed standard output
            raise _OutputError(OSError(errno.EBADF, os.strerror(errno.EBADF)))
        # Closing the stream writes the rest of its buffers here, where a failure can be handled. If the
        # interpreter wrote them at exit, a failure would be printed with a traceback.
        with (
            io.TextIOWrapper(
                io.BufferedWriter(_StandardOutput(sys.stdout.fileno(), "w", closefd=False)),
                encoding=sys.stdout.encoding,
                errors=sys.stdout.errors,
                line_buffering=sys.stdout.isatty(),
            ) as output,
            redirect_stdout(output),
        ):
            yield
    except _OutputError as error:
        raise SystemExit(1 if error.is_broken_pipe else f"Error: {error}") from None
