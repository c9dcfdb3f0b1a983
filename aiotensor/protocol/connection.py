"""The rules that all connections share: hello, version and closing.

The object of each role derives from `Connection`. It performs no I/O: received bytes produce validated
frames, which serve as events, and commands produce frames to send. Its owner passes both from and to a
socket, and closes that when the state is CLOSED.

    OPENING --hello of the peer, accepted--> OPEN --Close, violation, refusal, loss--> CLOSED
       |                                                                                 ^
       '--Close, violation, refusal, loss------------------------------------------------'

A violation or a refusal may come from either side; a loss is the end of the socket.

The connecting side sends its hello first, and its kind determines the roles of both sides. The accepting
side answers with its own hello; if it refuses the peer, a `Close` with the reason follows. Each side sends
one hello, and nothing after a `Close`: commands have no effect on a closed connection, and the peer's records
are ignored. A peer of another version is refused.
"""

import enum
from typing import Annotated, NamedTuple

import msgspec

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError

__all__ = ["CLOSED", "OPEN", "OPENING", "Close", "Connection", "ConnectionState", "Loss", "mismatch"]


class ConnectionState(enum.Enum):
    """The state of a connection object."""

    OPENING = "waiting for the hello of the peer"
    OPEN = "open"
    CLOSED = "closed"


# Each frame is checked against the state, and looking up a member of an enum is slow.
OPENING, OPEN, CLOSED = ConnectionState


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Close the connection; no frame follows. A reason means that this side rejects the other one.

    `is_refusal`: a new attempt fails too, until a limit or the version of one side is changed.
    `retry`: the peer may connect again automatically, since another connection only replaced this one.
    `uses_memory`: tensors allocated by this sender still exist. Otherwise the receiver returns the memory
    that its own tensors do not use to the system.
    """

    reason: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    is_refusal: bool = False
    retry: bool = False
    uses_memory: bool = True


class Loss(NamedTuple):
    """The end of a connection.

    Attributes:
        error: the error to raise in calls that wait for the peer.
        is_retried: whether to connect again automatically.
        reason: the part of the error's text that does not name the peer, for logs.
    """

    error: PeerLostError | RefusedError
    is_retried: bool
    reason: str = ""


def mismatch(theirs: int, ours: int) -> str | None:
    """Return the reason to refuse a peer of another version; None for the same version."""
    if theirs == ours:
        return None
    return (
        f"it speaks version {theirs} of the protocol, this side speaks {ours}: install the same aiotensor on "
        "both sides"
    )


class Connection:
    """One end of a connection.

    Args:
        role: the role of this end, for the texts of errors, such as ``"sender"``.
        peer: the other end, for the texts of errors, such as ``"the receiver"``.
        where: the address of the peer, for the texts of errors; "" to omit it.
    """

    def __init__(self, role: str, peer: str, where: str = "") -> None:
        self.state = OPENING
        self.peer_pid: int | None = None  # as the peer states it
        self._role = role
        self._peer = peer
        self._where = f" at {where}" if where else ""

    @property
    def is_closed(self) -> bool:
        """Whether no more frames are sent or received."""
        return self.state is CLOSED

    def accept_hello(self, version: int, pid: int, ours: int) -> None:
        """Record the version and the process id in the hello of the peer.

        Raises:
            ProtocolError: it is the second hello.
            RefusedError: the peer has another version than `ours`.
        """
        reason = self.record_hello(version, pid, ours)
        if reason is not None:
            raise self.refused(reason).error

    def record_hello(self, version: int, pid: int, ours: int) -> str | None:
        """Record the hello, as `accept_hello`, but return the reason to refuse the version."""
        if self.peer_pid is not None:
            raise ProtocolError("it sent a second hello")
        self.peer_pid = pid
        return mismatch(version, ours)

    def check_open(self) -> None:
        """Check that the peer has sent its hello, and this side has accepted it.

        Raises:
            ProtocolError: the peer sent another frame first.
        """
        if self.state is not OPEN:
            raise ProtocolError("it sent a frame before its hello")

    def closed(self, close: Close) -> Loss:
        """End the connection because of a `Close` of the peer."""
        if not close.reason:
            return self.lost("it closed", is_retried=True)
        if close.is_refusal:
            return self.refused(close.reason)
        return self.lost(f"it closed the connection: {close.reason}", is_retried=close.retry)

    def violated(self, error: ProtocolError) -> Loss:
        """End the connection because the peer violated the protocol."""
        loss = self.lost(f"it broke the protocol: {error}", is_retried=False)
        # A new exception without a traceback: the traceback of the original one keeps the record alive.
        loss.error.__cause__ = ProtocolError(*error.args)
        return loss

    def lost(self, reason: str, *, is_retried: bool) -> Loss:
        """End the connection because the peer is gone; the reason follows "the receiver is gone: "."""
        self.state = CLOSED
        error = PeerLostError(f"{self._name} is gone: {reason}", pid=self.peer_pid)
        return Loss(error, is_retried, reason)

    def refused(self, reason: str) -> Loss:
        """End the connection because the peer refuses this end, or has another version."""
        self.state = CLOSED
        error = RefusedError(f"{self._name} refused this {self._role}: {reason}", pid=self.peer_pid)
        return Loss(error, is_retried=False, reason=reason)

    @property
    def _name(self) -> str:
        pid = "" if self.peer_pid is None else f" (pid {self.peer_pid})"
        return f"{self._peer}{pid}{self._where}"
