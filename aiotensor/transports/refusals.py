"""Log lines about senders that a listener refuses or cuts off; see `RepeatedEvent` for the count."""

from aiotensor.runtime.logs import logger_of, others

__all__ = ["log_broken", "log_cut_off", "log_refused"]

logger = logger_of("transports")


def log_refused(count: int, path: str, reason: str) -> None:
    """Log that a sender of another user was refused at a path."""
    logger.error(
        "a sender was refused: %s%s",
        reason,
        others(count),
        extra={"event": "sender_refused", "address": path, "reason": reason, "count": count},
    )


def log_cut_off(count: int, reason: str) -> None:
    """Log that a sender was cut off, since nothing more can be written to it."""
    logger.error(
        "a sender is cut off, writing to it failed: %s%s",
        reason,
        others(count),
        extra={"event": "sender_cut_off", "reason": reason, "count": count},
    )


def log_broken(count: int, sender: str, reason: str) -> None:
    """Log that a record on a queue introduced no sender."""
    logger.error(
        "sender %s broke the protocol, it is not listened to: %s%s",
        sender,
        reason,
        others(count),
        extra={"event": "protocol_broken", "sender_id": sender, "reason": reason, "count": count},
    )
