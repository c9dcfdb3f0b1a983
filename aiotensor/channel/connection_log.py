"""The log of the connections of a client to its servers."""

import logging

from aiotensor.errors import AioTensorError, ProtocolError, RefusedError
from aiotensor.protocol.connection import Loss
from aiotensor.runtime.logs import logger_of

__all__ = ["log_failure", "log_loss", "log_violation"]

logger = logger_of("channel")


def log_violation(error: ProtocolError, pid: int | None) -> None:
    """Log that the server with a process id broke the protocol."""
    logger.error(
        "the server (pid %s) broke the protocol: %s",
        pid,
        error,
        extra={"event": "protocol_broken", "count": 1, "peer_pid": pid, "reason": str(error)},
    )


def log_loss(loss: Loss, address: str, unanswered: int) -> None:
    """Log the end of the connection to the server at an address, with the number of unanswered requests."""
    is_refusal = isinstance(loss.error, RefusedError)
    logger.log(
        logging.WARNING if unanswered or is_refusal else logging.INFO,
        "%s; requests without an answer: %s",
        loss.error,
        unanswered,
        extra={
            "event": "server_lost",
            "address": address,
            "peer_pid": loss.error.pid,
            "reason": loss.reason,
            "messages_lost": unanswered,
        },
    )


def log_failure(error: AioTensorError, address: str) -> None:
    """Log that no connection to the address is possible, because of its user, its keys or its path."""
    logger.error("%s", error, extra={"event": "server_refused", "address": address, "reason": str(error)})
