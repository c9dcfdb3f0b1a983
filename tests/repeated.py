"""The lines of events that a peer can repeat at any rate."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["check_rate", "repeated_lines"]


def check_rate(times: Sequence[float]) -> None:
    """Check that no two lines are closer than a second, apart from the accuracy of clocks.

    Args:
        times: of the lines, all written before any close, since a close writes the counted events.
    """
    assert all(later - earlier > 0.9 for earlier, later in itertools.pairwise(times)), times


@contextmanager
def repeated_lines(event: str) -> Iterator[list[tuple[float, int]]]:
    """Collect when servers log an event, and how many times it had happened."""
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
