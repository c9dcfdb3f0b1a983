"""The connections that an object accepts before their roles are known, and those of inspectors.

accepted --hello--> admitted: a peer of the object, or an inspector
|         |
|         '--limit, version, wrong role--> refused
'--replaced by newer connections
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from aiotensor.errors import ProtocolError
from aiotensor.link.events import PeerLog
from aiotensor.link.session import Session
from aiotensor.protocol.connection import Connection, Loss
from aiotensor.protocol.frames import MAX_RECORD_BYTES, Close, Frame, Hello, decode_hello, encode
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.base import Transport

# The maximum number of connections that are not admitted: unidentified ones and those of inspectors. A peer
# of this library sends its hello right after connecting, so the oldest unidentified connection is the least
# likely to belong to one. Inspectors are disconnected first, because they can connect again. A time limit
# for the hello would close the connections of suspended processes, and would not help against a flood, which
# takes all places within milliseconds.
MAX_UNIDENTIFIED = 64

_LISTENERS = {
    "sender": "a TensorReceiver",
    "subscriber": "a Publisher",
    "rank": "a RankPipe",
    "client": "a MessageServer",
}


class Admission:
    """Admit or refuse the peers of one object, and answer inspectors; belongs to the running loop.

    Args:
        hello: the hello of the object.
        role: the role of its peers, such as "sender".
        log: the log of the object.
        refusal: called with the hello of a peer; returns the reason to refuse it, or None.
        admitted: called with the transport and the connection of a peer without a reason to refuse it.
        refused: called with the hello of a refused peer and the reason, or with None for a connection that
            was never identified.
        reports: returns the frames that answer an inspector.
    """

    def __init__(
        self,
        hello: Hello,
        role: str,
        log: PeerLog,
        refusal: Callable[[Hello], str | None],
        admitted: Callable[[Transport, Connection], object],
        refused: Callable[[Hello | None, str], object],
        reports: Callable[[], Sequence[Frame]] = lambda: (),
    ) -> None:
        self._hello = hello
        self._role = role
        self._log = log
        self._refusal = refusal
        self._admitted = admitted
        self._refused = refused
        self._reports = reports
        self._inspectors: dict[_Inspector, None] = {}  # the oldest first
        self._unidentified: dict[_Unidentified, None] = {}  # the oldest first

    def read_now(self) -> None:
        """Read a record of each unidentified connection immediately, if one has arrived."""
        for connection in list(self._unidentified):
            connection.transport.read_now()

    def close(self) -> None:
        """Close all connections that belong to no admitted peer.

        They get no last frame: they might not read it, and would delay the other connections.
        """
        for inspector in list(self._inspectors):
            inspector.end(inspector.connection.lost("this end was closed", is_retried=False))
        for connection in list(self._unidentified):
            self.drop(connection)

    def connection_accepted(self, transport: Transport) -> None:
        """Add a connection, and close the oldest inspector or unidentified one if there are too many."""
        connection = _Unidentified(transport, self)
        self._unidentified[connection] = None
        transport.start(connection)
        if len(self._unidentified) + len(self._inspectors) > MAX_UNIDENTIFIED:
            self._replace_oldest()

    def identify(self, connection: "_Unidentified", data: memoryview) -> None:
        """Admit or refuse the peer of a connection after its first record."""
        try:
            theirs = decode_hello(data)
        except ProtocolError as error:
            self.drop(connection, error)
            return
        del self._unidentified[connection]
        transport = connection.transport
        if theirs.role == "inspector":
            opened = Connection(self._hello, "the inspector", theirs)
            reason = opened.mismatch
        else:
            opened = Connection(self._hello, f"the {self._role}", theirs)
            reason = opened.mismatch or self._wrong_role(theirs) or self._refusal(theirs)
        if reason is not None:
            opened.refuse(reason)
            with suppress(OSError):
                for record in opened.data_to_send():
                    transport.write(record)
            transport.close()
            self._log.refused.add(f"{theirs.role} {theirs.id}".strip(), theirs.pid, reason)
            self._refused(theirs, reason)
            return
        if theirs.role == "inspector":
            opened.admit()
            for frame in self._reports():
                opened.send(frame, MAX_RECORD_BYTES)
            inspector = _Inspector(transport, opened, self._log)
            inspector.inspectors = self._inspectors
            self._inspectors[inspector] = None
            transport.start(inspector)
            inspector.flush()
        else:
            self._admitted(transport, opened)

    def drop(self, connection: "_Unidentified", error: ProtocolError | None = None) -> None:
        """Close a connection that was not identified; log the error if it broke the protocol."""
        if error is not None:
            self._log.broken.add("an unidentified connection", connection.transport.peer_pid, str(error))
        self._unidentified.pop(connection, None)
        connection.transport.close()

    def _wrong_role(self, theirs: Hello) -> str | None:
        if theirs.role == self._role:
            return None
        here, there = _LISTENERS.get(self._role), _LISTENERS.get(theirs.role, "an object of another kind")
        return f"{here} listens at this address, not {there}"

    def _replace_oldest(self) -> None:
        reason = (
            f"a newer connection replaced it: at most {MAX_UNIDENTIFIED} connections may be unidentified or "
            "belong to inspectors"
        )
        close = Close(reason, retry=True)
        inspector = next(iter(self._inspectors), None)
        if inspector is not None:
            inspector.close(close)
            inspector.end(inspector.connection.lost(reason, is_retried=False))
            return
        oldest = next(iter(self._unidentified))
        with suppress(OSError):
            oldest.transport.write(encode(close))
        self._log.replaced.add("an unidentified connection", oldest.transport.peer_pid, reason)
        self._refused(None, reason)
        self.drop(oldest)


class _Unidentified:
    """A connection before its hello."""

    def __init__(self, transport: Transport, admission: Admission) -> None:
        self.transport = transport
        self._admission = admission

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Handle an event of the transport."""
        close_all(descriptors)
        self._admission.identify(self, data)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """Handle an event of the transport."""
        self._admission.drop(self, reason if isinstance(reason, ProtocolError) else None)

    def resume_writing(self) -> None:
        """Do nothing: only one frame is ever written."""


class _Inspector(Session):
    """One inspector, which limits its own waiting time, and must not send a second record."""

    inspectors: "dict[_Inspector, None]"
    name = "inspector"

    def received(self, frames: Sequence[Frame], descriptors: list[int]) -> None:
        """Process the frames of a record."""
        for frame in frames:
            if not isinstance(frame, Close):
                raise ProtocolError("it sent another frame after its hello, its only one")
            self.closed(frame)

    def lost(self, loss: Loss) -> None:
        """Handle the end of the session."""
        self.inspectors.pop(self, None)
