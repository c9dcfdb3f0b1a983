"""The library's loggers: one line for one event, whatever a peer puts into its texts."""

import asyncio
import logging
from collections.abc import Callable
from traceback import TracebackException
from typing import Final, Generic, TypeVarTuple, Unpack

__all__ = ["MAX_TEXT", "RepeatedEvent", "logger_of", "one_line", "others"]

Details = TypeVarTuple("Details")

# Of a text in a log, in characters. A peer may send megabytes, and the event loop would look through them.
MAX_TEXT: Final = 1024


def logger_of(room: str) -> logging.Logger:
    """Return the logger of a room, whose records are plain and fit one line.

    Some texts are those of peers and clients: reasons, names, paths. One with a line break in it would look
    like two events, the second of which never was; one with an escape sequence would command a terminal.

    Args:
        room: what comes after ``aiotensor.`` in the logger's name.
    """
    logger = logging.getLogger(f"aiotensor.{room}")
    # Of the logger and not of a handler: those are the application's.
    logger.addFilter(_make_plain)
    return logger


class RepeatedEvent(Generic[*Details]):
    """Log an event that a peer can repeat at any rate, in at most one line per interval.

    The first event is logged at once. Further events within the interval are counted, and the latest of them
    is logged at its end. Belongs to the running loop.

    Args:
        write: logs a line; called with the number of events that it stands for, and the details of the
            latest.
        interval_s: the least time between two lines, in seconds.
    """

    def __init__(self, write: Callable[[int, Unpack[Details]], None], interval_s: float = 1.0) -> None:
        self._write = write
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0  # events since the last line
        self._latest: tuple[*Details] | None = None

    def add(self, *details: *Details) -> None:
        """Log an event, or count it if the last line was written within the interval."""
        self._count += 1
        self._latest = details
        if self._timer is None:
            self._log()
            self._begin_interval()

    def close(self) -> None:
        """Log the events that were only counted so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._count:
            self._log()

    def _begin_interval(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._interval_ended)

    def _interval_ended(self) -> None:
        self._timer = None
        if self._count:
            self._log()
            self._begin_interval()

    def _log(self) -> None:
        if self._latest is not None:
            count, self._count = self._count, 0
            details, self._latest = self._latest, None
            self._write(count, *details)


def others(count: int) -> str:
    """Return what to append to the text of a line that stands for so many events."""
    return "" if count == 1 else f" (the latest of {count} since the last such line)"


def one_line(text: str) -> str:
    """Escape what is not printable in a text, as `repr` does, and cut it if it is very long."""
    cut = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
    if cut.isprintable():
        return cut
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut)


def _make_plain(record: logging.LogRecord) -> bool:
    """Leave numbers and single lines of text in a record, and its traceback, if it has one."""
    if isinstance(record.args, tuple):
        # Also of errors: their tracebacks would keep tensors for as long as somebody keeps the record.
        record.args = tuple(
            part if isinstance(part, int | float | None) else one_line(str(part)) for part in record.args
        )
    for name, value in list(vars(record).items()):
        if isinstance(value, str):
            setattr(record, name, one_line(value))
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        # Where the formatters of logging keep it. They would make it themselves, of texts as they are.
        record.exc_text = _plain_traceback(error)
    return True


def _plain_traceback(error: BaseException) -> str:
    """Format a traceback of plain lines: the text of an error stays one."""
    lines: list[str] = []
    for part in TracebackException.from_exception(error).format():
        # Calls and what stands between errors are several lines of their own, the first of which begins with
        # a space or is empty; in a group of errors all lines do.
        own = part.rstrip("\n").split("\n") if part[0].isspace() else [part.removesuffix("\n")]
        lines += map(one_line, own)
    return "\n".join(lines)
