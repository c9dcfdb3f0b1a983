"""The log of connections that a receiver closes: at most one line per second for each event.

Refused, broken and unidentified peers can connect again at any rate. A line contains the details of the
latest connection, and the number of connections since the previous line.
"""

from aiotensor.runtime.logs import RepeatedEvent, logger_of, others

__all__ = ["SenderRefusalLog"]

logger = logger_of("receiver")


class SenderRefusalLog:
    """Log the refusals of one receiver; belongs to the running loop.

    Attributes:
        refused: a sender was refused; the details are its id, its process id and the reason.
        broken: a peer broke the protocol; the details are its id, its process id and the reason.
        replaced: an unidentified connection was closed, because there were too many newer ones; the details
            are the process id of the peer, and the number of the newer connections.
        unwritable: writing to a sender failed; the details are its id and the reason.
    """

    def __init__(self) -> None:
        # Functions of the module write the lines, so that a pending timer does not keep the receiver alive.
        self.refused = RepeatedEvent(_log_refused)
        self.broken = RepeatedEvent(_log_broken)
        self.replaced = RepeatedEvent(_log_replaced)
        self.unwritable = RepeatedEvent(_log_unwritable)

    def close(self) -> None:
        """Log the events that were only counted so far."""
        for event in (self.refused, self.broken, self.replaced, self.unwritable):
            event.close()


def _log_refused(count: int, sender: str | None, pid: int | None, reason: str) -> None:
    logger.warning(
        "sender %s (pid %s) was refused: %s%s",
        sender,
        pid,
        reason,
        others(count),
        extra={
            "event": "sender_refused",
            "sender_id": sender,
            "peer_pid": pid,
            "reason": reason,
            "count": count,
        },
    )


def _log_broken(count: int, sender: str | None, pid: int | None, reason: str) -> None:
    logger.error(
        "sender %s broke the protocol and was disconnected: %s%s",
        sender,
        reason,
        others(count),
        extra={
            "event": "protocol_broken",
            "sender_id": sender,
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


def _log_unwritable(count: int, sender: str, reason: str) -> None:
    logger.error(
        "sender %s was disconnected because writing to it failed: %s%s",
        sender,
        reason,
        others(count),
        extra={"event": "sender_cut_off", "sender_id": sender, "reason": reason, "count": count},
    )
