"""The rules that all connections share: hello, version and closing.

The connection object of each role derives from `Connection`. It performs no I/O: received bytes produce
validated frames, which serve as events, and commands produce frames to send. The owner of the object passes
the bytes between it and a socket, and closes the socket when the state is CLOSED.

    OPENING --hello of the peer, accepted--> OPEN --Close, violation, refusal, loss--> CLOSED
       |                                                                                 ^
       '--Close, violation, refusal, loss------------------------------------------------'

Either side may commit a violation or refuse the other; a loss is the end of the socket.

The connecting side sends its hello first, and the type of this frame determines the roles of both sides. The
accepting side answers with its own hello; if it refuses the peer, a `Close` with the reason follows. Each
side sends one hello, and nothing after a `Close`: commands have no effect on a closed connection, and records
of the peer are ignored. A peer of another version is refused.
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


# Module variables, since each frame is checked against the state, and looking up a member of an enum is slow.
OPENING, OPEN, CLOSED = ConnectionState


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Close the connection; no frame follows. A reason means that this side rejects the other one.

    `is_refusal`: whether further attempts fail, too, until a limit or the version of one side is changed.
    `retry`: whether the peer may connect again automatically, because a newer connection replaced this one.
    `uses_memory`: whether tensors allocated by this sender still exist. If not, the receiver returns to the
    system the memory that its own tensors do not use.
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
        reason: the text of the error without the name of the peer, for logs.
        is_clean: whether the peer has closed.
    """

    error: PeerLostError | RefusedError
    is_retried: bool
    reason: str = ""
    is_clean: bool = False


def mismatch(theirs: int, ours: int, peer: str, this: str) -> str | None:
    """Return the reason to refuse a peer because of its version; None if both sides have the same one.

    Args:
        theirs: the version of the peer.
        ours: the version of this side.
        peer: the name of the peer, which both sides understand, since the peer also gets the reason.
        this: the name of this side, as above.
    """
    if theirs == ours:
        return None
    return (
        f"{peer} has protocol version {theirs}, and {this} has version {ours}: install the same version of "
        "aiotensor on both sides"
    )


class Connection:
    """One end of a connection.

    Args:
        role: the role of this end, for error messages, such as ``"sender"``.
        peer: the name of the other end, for error messages, such as ``"the receiver"``.
        where: the address of the peer, for error messages; "" to omit it.

    Attributes:
        state: the state of the connection.
        peer_pid: the process id that the peer stated; None before its hello.
    """

    def __init__(self, role: str, peer: str, where: str = "") -> None:
        self.state = OPENING
        self.peer_pid: int | None = None
        self._role = role
        self._this = f"the {role}"
        self._peer = peer
        self._where = f" at {where}" if where else ""

    @property
    def is_closed(self) -> bool:
        """Whether no more frames are sent or received."""
        return self.state is CLOSED

    def accept_hello(self, version: int, pid: int, ours: int) -> None:
        """Check the version in the hello of the peer, and record its process id.

        Raises:
            ProtocolError: the peer has sent a hello before.
            RefusedError: the version of the peer is not `ours`.
        """
        reason = self.record_hello(version, pid, ours)
        if reason is not None:
            raise self.refused(reason).error

    def record_hello(self, version: int, pid: int, ours: int) -> str | None:
        """Record the hello as in `accept_hello`, but return the reason to refuse the version, or None.

        Raises:
            ProtocolError: the peer has sent a hello before.
        """
        if self.peer_pid is not None:
            raise ProtocolError("it sent a second hello")
        self.peer_pid = pid
        return mismatch(version, ours, self._peer, self._this)

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
            return self.lost("it closed the connection", is_retried=True)._replace(is_clean=True)
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
        """End the connection because the peer is gone.

        Args:
            reason: the end of the error message, which begins with "the connection to … was lost: ".
            is_retried: whether to connect again automatically.
        """
        self.state = CLOSED
        error = PeerLostError(f"the connection to {self._name} was lost: {reason}", pid=self.peer_pid)
        return Loss(error, is_retried, reason)

    def refused(self, reason: str) -> Loss:
        """End the connection because the peer refused this end, or has another version."""
        self.state = CLOSED
        error = RefusedError(f"{self._name} refused this {self._role}: {reason}", pid=self.peer_pid)
        return Loss(error, is_retried=False, reason=reason)

    @property
    def _name(self) -> str:
        pid = "" if self.peer_pid is None else f" (pid {self.peer_pid})"
        return f"{self._peer}{pid}{self._where}"
