"""Log lines about peers that a listener rejects; see `RepeatedEvent` for the count."""

from aiotensor.runtime.logs import logger_of, others

__all__ = ["log_broken", "log_refused"]

logger = logger_of("transports")


def log_refused(count: int, path: str, reason: str) -> None:
    """Log that a sender of another user was refused at a path."""
    logger.error(
        "a sender was refused: %s%s",
        reason,
        others(count),
        extra={"event": "sender_refused", "address": path, "reason": reason, "count": count},
    )


def log_broken(count: int, sender: str, reason: str) -> None:
    """Log that the first record of a sender on a queue is invalid."""
    logger.error(
        "sender %s broke the protocol, its records are ignored: %s%s",
        sender,
        reason,
        others(count),
        extra={"event": "protocol_broken", "sender_id": sender, "reason": reason, "count": count},
    )
