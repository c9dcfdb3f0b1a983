"""The library's loggers: one line for one event, whatever a peer puts into its texts."""

import logging
from traceback import TracebackException
from typing import Final

__all__ = ["MAX_TEXT", "logger_of", "one_line"]

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
