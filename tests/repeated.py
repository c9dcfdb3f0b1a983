"""Checks of the log lines of events that a peer can repeat at any rate."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["check_rate", "repeated_lines"]


def check_rate(times: Sequence[float]) -> None:
    """Check that lines are at least a second apart, within the accuracy of clocks.

    Args:
        times: the times of the lines, all written before any close, since closing logs the pending events.
    """
    assert all(later - earlier > 0.9 for earlier, later in itertools.pairwise(times)), times


@contextmanager
def repeated_lines(event: str) -> Iterator[list[tuple[float, int]]]:
    """Collect the time of each line about an event of servers, and the number of events that it reports."""
    lines: list[tuple[float, int]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if vars(record).get("event") == event:
                lines.append((record.created, vars(record)["count"]))

    logger, listener = logging.getLogger("aiotensor.channel"), Listener()
    logger.addHandler(listener)
    try:
        yield lines
    finally:
        logger.removeHandler(listener)
