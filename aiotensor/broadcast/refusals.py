"""Log the connections that a publisher closes, in at most one line per second and event.

Refused and unidentified peers, and peers that break the protocol, can connect again at any rate. Each line
contains the details of the latest connection, and the number of connections since the previous line.
"""

from aiotensor.runtime.logs import RepeatedEvent, logger_of, others

__all__ = ["SubscriberRefusalLog"]

logger = logger_of("publisher")


class SubscriberRefusalLog:
    """Log the refusals of one publisher; belongs to the running loop.

    Attributes:
        refused: logs that a subscriber was refused because of a limit or its version, with its id, its pid
            and the reason.
        broken: logs that a peer broke the protocol, with its id, its pid and the reason.
        replaced: logs that an unidentified connection was closed in favor of newer ones, with its pid and
            their number.
        disconnected: logs that a subscriber was disconnected because it was slow or writing to it failed,
            with its id, its pid and the reason.
    """

    def __init__(self) -> None:
        # These are functions of the module, so that a running timer keeps no publisher alive.
        self.refused = RepeatedEvent(_log_refused)
        self.broken = RepeatedEvent(_log_broken)
        self.replaced = RepeatedEvent(_log_replaced)
        self.disconnected = RepeatedEvent(_log_disconnected)

    def close(self) -> None:
        """Log the events that have only been counted so far."""
        for event in (self.refused, self.broken, self.replaced, self.disconnected):
            event.close()


def _log_refused(count: int, subscriber: str, pid: int, reason: str) -> None:
    logger.warning(
        "subscriber %s (pid %s) was refused: %s%s",
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
        "subscriber %s broke the protocol and was disconnected: %s%s",
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
        "an unidentified connection (pid %s) was closed because %s newer ones were opened%s",
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
        "subscriber %s (pid %s) was disconnected: %s%s",
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
