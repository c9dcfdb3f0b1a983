"""Log lines about connections that a server closes: at most one per second and event.

A line has the details of the latest connection, and the number of connections since the line before.
"""

from aiotensor.runtime.logs import RepeatedEvent, logger_of

__all__ = ["ClientRefusalLog"]

logger = logger_of("channel")


class ClientRefusalLog:
    """Log the refusals of one server; belongs to the running loop."""

    def __init__(self) -> None:
        # Functions of the module: a timer that is pending keeps no server alive.
        self._connections = RepeatedEvent(_log_connection_refused)
        self._clients = RepeatedEvent(_log_client_refused)
        self._broken = RepeatedEvent(_log_protocol_broken)

    def connection_refused(self, reason: str) -> None:
        """Log that a connection was closed before its peer sent a valid hello."""
        self._connections.add(reason)

    def client_refused(self, pid: int, reason: str) -> None:
        """Log that a client was refused, because of a limit or of its version."""
        self._clients.add(pid, reason)

    def protocol_broken(self, pid: int | None, reason: str) -> None:
        """Log that a connection was closed because its peer broke the protocol."""
        self._broken.add(pid, reason)

    def close(self) -> None:
        """Log the events that were only counted so far."""
        for event in (self._connections, self._clients, self._broken):
            event.close()


def _log_connection_refused(count: int, reason: str) -> None:
    logger.warning(
        "%s connections were refused, the latest because %s",
        count,
        reason,
        extra={"event": "connection_refused", "count": count, "reason": reason},
    )


def _log_client_refused(count: int, pid: int, reason: str) -> None:
    logger.warning(
        "%s clients were refused, the latest (pid %s) because %s",
        count,
        pid,
        reason,
        extra={"event": "client_refused", "count": count, "peer_pid": pid, "reason": reason},
    )


def _log_protocol_broken(count: int, pid: int | None, reason: str) -> None:
    logger.error(
        "%s clients broke the protocol, the latest (pid %s): %s",
        count,
        pid,
        reason,
        extra={"event": "protocol_broken", "count": count, "peer_pid": pid, "reason": reason},
    )
