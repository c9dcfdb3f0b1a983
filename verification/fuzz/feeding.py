"""Feed conversations into connection objects of every role, without any socket."""

from aiotensor.protocol import frames as protocol
from aiotensor.protocol.connection import CLOSED, MAX_SEGMENTS, Connection
from verification.fuzz.decoding import in_bounds
from verification.fuzz.grammar import LISTENERS, MOST_READ, TO_CLIENT, TO_PUBLISHER, TO_SENDER
from verification.fuzz.steps import FIRST_NUMBER, PEER, Conversation, Step


class Feeding:
    """The connection objects of one end, to which conversations are fed."""

    def __init__(self) -> None:
        self._begun: dict[int, None] = {}  # all messages of a connection, in order

    def hear(self, said: Conversation) -> None:
        """Feed a conversation into new connections, whose owner takes or discards all messages."""
        hello = protocol.Hello(protocol.VERSION, 1, said.to, PEER, 64, 1 << 20, FIRST_NUMBER)
        listens = said.to in LISTENERS
        is_first = listens
        connection = None if listens else _announced(said.to, Connection(hello, "the peer"))
        self._begun.clear()
        for step in said.steps:
            if step.beside:
                self._open(hello, step, said.to)
            elif step.connects or is_first:
                is_first, connection = False, self._open(hello, step, said.to)
                self._begun.clear()
            elif connection is not None:
                self._feed(connection, step.data)

    def _open(self, hello: protocol.Hello, step: Step, role: str) -> Connection | None:
        """Return the connection after its first record; None if the record is no hello."""
        theirs = in_bounds(protocol.decode_hello, step.data, len(step.data))
        if theirs is None:
            return None
        connection = Connection(hello, "the peer", theirs)
        if connection.mismatch is None:
            connection.admit(FIRST_NUMBER)
        else:
            connection.refuse(connection.mismatch)
        return _announced(role, connection)

    def _feed(self, connection: Connection, data: bytes) -> None:
        """Feed a record into a connection."""
        if connection.is_closed:
            assert not connection.receive(data)
            return
        received: list[protocol.Frame] | None = in_bounds(connection.receive, data, len(data))
        frames = received or []
        for frame in frames:
            if isinstance(frame, protocol.Begin | protocol.Put | protocol.End | protocol.Message):
                number = frame.message
                assert number in self._begun or number > max(self._begun, default=-1), number
                self._begun[number] = None
        _own(connection, frames)
        assert received is not None or connection.state is CLOSED
        most = 0 if connection.theirs is None else connection.theirs.max_messages
        assert connection.in_flight <= most
        assert len(connection.segments) <= MAX_SEGMENTS
        _check_records(connection)


def _own(connection: Connection, frames: list[protocol.Frame]) -> None:
    """Answer frames as the owner of a connection: take two of three messages, and free all blocks."""
    for frame in frames:
        match frame:
            case protocol.Put(last=True) | protocol.End():
                (connection.taken if frame.message % 3 else connection.discarded)(frame.message)
            case protocol.Message():
                if frame.placement == protocol.INLINE:
                    in_bounds(protocol.read_content, frame.payload, len(frame.payload))
                if frame.message % 3:
                    connection.taken(frame.message)
            case protocol.Discard():
                connection.discarded(frame.message, confirms=bool(frame.message % 2))
            case protocol.Begin() if frame.message % 5 == 0:
                connection.discarded(frame.message)
        if isinstance(frame, protocol.Put | protocol.Message) and frame.block is not None:
            connection.release(frame.block)


def _announced(role: str, connection: Connection) -> Connection:
    """Send the messages that a rogue may answer."""
    for number in range(FIRST_NUMBER, FIRST_NUMBER + MOST_READ):
        if role == TO_SENDER:
            where = protocol.ARENA, bytes(16), 0
            is_whole = number % MOST_READ > 0
            connection.put(protocol.Put(number, 0, "uint8", (3,), "cpu", *where, last=is_whole))
        elif role == TO_PUBLISHER:
            connection.publish(number, protocol.encode(protocol.Message(number, protocol.INLINE, b"", 0)))
        elif role == TO_CLIENT:
            asks = number % MOST_READ > 0
            connection.post(protocol.Message(number, protocol.INLINE, b"", 0, asks=asks), waits=True)
    _check_records(connection)
    return connection


def _check_records(connection: Connection) -> None:
    """Check that the peer can read all records of an end."""
    for record in connection.data_to_send():
        assert len(record) <= protocol.MAX_RECORD_BYTES
        assert protocol.decode(record)
