"""The log of connections: one place writes each event, at most one line per second for each.

Peers that are refused, break the protocol or remain unidentified can connect again at any rate. A line
contains the details of the latest connection, and the number of connections since the previous line.
"""

import logging
from collections.abc import Sequence

from aiotensor.protocol.connection import Loss
from aiotensor.runtime.logs import RepeatedEvent, logger_of, others
from aiotensor.types import Holder

ALLOCATED = "allocated"  # the state of a holder that is a tensor from `allocate`

_NAMED_HOLDERS = 8


class PeerLog:
    """Log the ends of the connections of one object; belongs to the running loop.

    The details of each event are the name of the peer, its process id, and the reason.

    Args:
        role: the role of the object, which names its logger.

    Attributes:
        refused: a peer was refused, because of a limit or its version.
        broken: a peer broke the protocol, and was disconnected.
        disconnected: a peer was disconnected, because it is slow or writing to it failed.
        replaced: a connection was closed in favor of newer ones.
    """

    def __init__(self, role: str) -> None:
        self._logger = logger_of(role)
        self.refused = self._repeated("was refused", logging.WARNING, event="peer_refused")
        self.broken = self._repeated("broke the protocol", logging.ERROR, event="protocol_broken")
        self.disconnected = self._repeated("was disconnected", logging.WARNING, event="peer_disconnected")
        self.replaced = self._repeated("was closed", logging.WARNING, event="connection_cut_off")

    def lost(self, loss: Loss, address: str, messages: int) -> None:
        """Log the end of a connection that calls of this object use.

        Args:
            loss: the end of the connection.
            address: the address of the peer.
            messages: the number of messages that were lost with it.
        """
        self._logger.log(
            logging.WARNING if messages or not loss.is_retried else logging.INFO,
            "%s; messages in flight that were lost: %s",
            loss.error,
            messages,
            extra={
                "event": "peer_lost",
                "address": address,
                "peer_pid": loss.error.pid,
                "reason": str(loss.error),
                "messages_lost": messages,
            },
        )

    def close(self) -> None:
        """Log the events that were only counted so far."""
        for event in (self.refused, self.broken, self.disconnected, self.replaced):
            event.close()

    def _repeated(self, what: str, level: int, *, event: str) -> RepeatedEvent[str, int | None, str]:
        def write(count: int, peer: str, pid: int | None, reason: str) -> None:
            self._logger.log(
                level,
                "%s (pid %s) %s: %s%s",
                peer,
                pid,
                what,
                reason,
                others(count),
                extra={"event": event, "peer": peer, "peer_pid": pid, "reason": reason, "count": count},
            )

        return RepeatedEvent(write)


def log_long_wait(
    logger: logging.Logger, waited_s: float, what: str, pid: int | None, holders: Sequence[Holder]
) -> None:
    """Log that a call has waited for a long time, with the holders of the resource.

    Args:
        logger: the logger of the object.
        waited_s: the duration of the wait so far, in seconds.
        what: what the call waits for.
        pid: the process id of the peer; None if there is none, or several.
        holders: the holders, with the longest time first.
    """
    held_by = "; ".join(
        f"{_name(holder)} ({holder.state}, {holder.bytes} bytes, {holder.seconds:.1f} s)"
        for holder in holders[:_NAMED_HOLDERS]
    )
    if len(holders) > _NAMED_HOLDERS:
        held_by += f"; and {len(holders) - _NAMED_HOLDERS} more"
    logger.warning(
        "a send has waited %g s for %s; %sheld by: %s",
        waited_s,
        what,
        "" if pid is None else f"peer: pid {pid}; ",
        held_by or "no message",
        extra={
            "event": "long_wait",
            "waited_s": waited_s,
            "waited_for": what,
            "peer_pid": pid,
            "holders": len(holders),
            "held_by": held_by,
        },
    )


def _name(holder: Holder) -> str:
    if holder.state == ALLOCATED:
        return "memory from allocate()"
    return "a message" if holder.message is None else f"message {holder.message}"
