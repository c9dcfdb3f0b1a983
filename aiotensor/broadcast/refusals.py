"""Log lines about connections that a publisher closes: at most one per second and event.

Refused, broken and unidentified peers can connect again at any rate. A line has the details of the latest
connection, and the number of connections since the line before.
"""

from aiotensor.runtime.logs import RepeatedEvent, logger_of, others

__all__ = ["SubscriberRefusalLog"]

logger = logger_of("publisher")


class SubscriberRefusalLog:
    """Log the refusals of one publisher; belongs to the running loop.

    Attributes:
        refused: a subscriber was refused, because of a limit or of its version; with its id, pid, and the
            reason.
        broken: a peer broke the protocol; with its id, pid, and the reason.
        replaced: an unidentified connection was closed in favor of new ones; with its pid, and their number.
        disconnected: a subscriber was disconnected, because it was slow or writing to it failed; with its id,
            pid, and the reason.
    """

    def __init__(self) -> None:
        # Functions of the module: a timer that is under way keeps no publisher alive.
        self.refused = RepeatedEvent(_log_refused)
        self.broken = RepeatedEvent(_log_broken)
        self.replaced = RepeatedEvent(_log_replaced)
        self.disconnected = RepeatedEvent(_log_disconnected)

    def close(self) -> None:
        """Log the events that were only counted so far."""
        for event in (self.refused, self.broken, self.replaced, self.disconnected):
            event.close()


def _log_refused(count: int, subscriber: str, pid: int, reason: str) -> None:
    logger.warning(
        "subscriber %s (pid %s) is refused: %s%s",
        subscriber,
        pid,
        reason,
        others(count),
        extra={
            "event": "subscriber_refused",
            "subscriber_id": subscriber,
            "peer_pid": pid,
            "reason": reason,
            "count": count,
        },
    )


def _log_broken(count: int, subscriber: str | None, pid: int | None, reason: str) -> None:
    logger.error(
        "subscriber %s broke the protocol, its connection is closed: %s%s",
        subscriber,
        reason,
        others(count),
        extra={
            "event": "protocol_broken",
            "subscriber_id": subscriber,
            "peer_pid": pid,
            "reason": reason,
            "count": count,
        },
    )


def _log_replaced(count: int, pid: int | None, connections: int) -> None:
    logger.warning(
        "an unidentified connection (pid %s) is closed, since %s newer ones were opened%s",
        pid,
        connections,
        others(count),
        extra={
            "event": "connection_cut_off",
            "peer_pid": pid,
            "connections": connections,
            "count": count,
        },
    )


def _log_disconnected(count: int, subscriber: str, pid: int, reason: str) -> None:
    logger.warning(
        "subscriber %s (pid %s) is disconnected: %s%s",
        subscriber,
        pid,
        reason,
        others(count),
        extra={
            "event": "subscriber_disconnected",
            "subscriber_id": subscriber,
            "peer_pid": pid,
            "reason": reason,
            "count": count,
        },
    )
