"""The library's loggers: one line for each event, even if the text of a peer has line breaks."""

import asyncio
import logging
from collections.abc import Callable
from traceback import TracebackException
from typing import Final, Generic, TypeVarTuple, Unpack

Details = TypeVarTuple("Details")

# The longest text in a log, in characters. A peer may send megabytes, and escaping them would block the loop.
MAX_TEXT: Final = 1024


def logger_of(name: str) -> logging.Logger:
    """Return a logger whose records contain printable text in a single line.

    Some texts come from peers: reasons, names, paths. A line break in such a text could forge a second event,
    and an escape sequence could control the terminal.

    Args:
        name: the part of the logger's name after ``aiotensor.``; ``vllm`` stands for ``vllm.aiotensor``.
    """
    # vLLM configures only its own logger, and the handler of ``aiotensor`` drops records.
    logger = logging.getLogger("vllm.aiotensor" if name == "vllm" else f"aiotensor.{name}")
    # The filter belongs to the logger, because the handlers belong to the application.
    logger.addFilter(_make_plain)
    return logger


class RepeatedEvent(Generic[*Details]):
    """Log an event that a peer can repeat at any rate, in at most one line per interval.

    The first event is logged at once. Further events within the interval are counted, and the latest of them
    is logged at the end of the interval. Belongs to the running loop.

    Args:
        write: logs a line; called with the number of events since the last line, and the details of the
            latest event.
        interval_s: the minimum time between two lines, in seconds.
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
            self._interval_ended()

    def close(self) -> None:
        """Log the events that have only been counted so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._count:
            self._log()

    def _interval_ended(self) -> None:
        self._timer = None
        if self._count:
            self._log()
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._interval_ended)

    def _log(self) -> None:
        if self._latest is not None:
            count, self._count = self._count, 0
            details, self._latest = self._latest, None
            self._write(count, *details)


def others(count: int) -> str:
    """Return the suffix of a line that stands for `count` events."""
    return "" if count == 1 else f" (the latest of {count} since the last such line)"


def one_line(text: str) -> str:
    """Escape the unprintable characters of a text, as `repr` does, and truncate it to `MAX_TEXT`."""
    cut = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
    if cut.isprintable():
        return cut
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut)


def _make_plain(record: logging.LogRecord) -> bool:
    """Reduce a record to numbers, single lines of text, and a traceback if it has one."""
    if isinstance(record.args, tuple):
        # Errors become text too: their tracebacks would keep tensors alive as long as the record exists.
        record.args = tuple(
            part if isinstance(part, int | float | None) else one_line(str(part)) for part in record.args
        )
    for name, value in list(vars(record).items()):
        if isinstance(value, str):
            setattr(record, name, one_line(value))
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        # Formatters use this cached text. Without it, they would format the traceback with unescaped text.
        record.exc_text = _plain_traceback(error)
    return True


def _plain_traceback(error: BaseException) -> str:
    """Format a traceback so that the text of each error is a single line."""
    lines: list[str] = []
    for part in TracebackException.from_exception(error).format():
        # Parts for calls, and separators between errors, have several lines, the first of which begins with a
        # space or is empty; in an exception group, all lines do.
        own = part.rstrip("\n").split("\n") if part[0].isspace() else [part.removesuffix("\n")]
        lines += map(one_line, own)
    return "\n".join(lines)
