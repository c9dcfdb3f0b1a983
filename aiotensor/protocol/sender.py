"""A sender's end of one connection to a receiver.

    OPENING --Welcome, admitted--> OPEN --Close, either way; violation--> CLOSED
       |                                                                    ^
       '--Welcome of another version; Close, either way; violation----------'

A sender that is not admitted receives the reason in a `Close` after the `Welcome`. A message of the sender,
which is numbered by its first frame:

    --Begin or Put--> begun --End, or the last Put--> whole --Taken--> (ended)
                        |                               |
                        '-------------------------------'--Discard, or Discarded by the receiver--> (ended)

Messages may be announced before the `Welcome`. The receiver may answer a message that this side has discarded
in the meantime; the owner of the connection ignores such an answer.
"""

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import CLOSED, OPEN, Close
from aiotensor.protocol.frames import (
    LEAST_FRAME_BYTES,
    MAX_RECORD_BYTES,
    TO_SENDER,
    VERSION,
    Attach,
    Begin,
    Discard,
    Discarded,
    End,
    FromSender,
    Hello,
    Put,
    Taken,
    ToSender,
    Welcome,
    encode,
)
from aiotensor.protocol.records import RecordConnection

__all__ = ["SenderConnection"]

_WHOLE = -1


class SenderConnection(RecordConnection[ToSender, FromSender]):
    """A sender's end of one connection.

    Args:
        hello: the first frame of this end; `data_to_send` returns it first.

    Attributes:
        next_message: the number of the next message, on this connection or on the next one.
        receiver_id: the id of the receiver; None until the `Welcome`.
    """

    def __init__(self, hello: Hello) -> None:
        super().__init__("sender", "the receiver", TO_SENDER, MAX_RECORD_BYTES, LEAST_FRAME_BYTES)
        self.next_message = hello.first_message
        self.receiver_id: str | None = None
        self._first_message = hello.first_message
        self._messages: dict[int, int] = {}  # the number of announced tensors, or _WHOLE
        self._records.append(encode(hello))

    # Commands

    def attach(self, segment: int, placement: str, nbytes: int) -> bytes:
        """Return the record that shares a segment; write it after earlier records, with the descriptor."""
        return encode(Attach(segment, placement, nbytes))

    def begin(self) -> int:
        """Begin a message before its first tensor, and return its number."""
        number = self.next_message
        self.next_message += 1
        self._messages[number] = 0
        self._send(Begin(number))
        return number

    def put(self, put: Put) -> None:
        """Announce a tensor of a message that has not ended; a new message has the number `next_message`."""
        number = put.message
        if number == self.next_message:
            self.next_message += 1
        self._messages[number] = _WHOLE if put.last else put.tensor + 1
        nbytes = len(put.payload)
        if put.trace is not None:
            nbytes += sum(map(len, (*put.trace, *put.trace.values())))
        self._send(put, nbytes)

    def end(self, message: int) -> None:
        """Complete a message that has at least one tensor."""
        self._send(End(message, self._messages[message]))
        self._messages[message] = _WHOLE

    def discard(self, message: int) -> None:
        """Withdraw a message that has not ended; answers to it are ignored from now on."""
        del self._messages[message]
        self._send(Discard(message))

    # Frames of the receiver

    def _validate(self, frame: ToSender) -> None:
        match frame:
            case Taken() | Discarded():
                if self.state is not OPEN:
                    self.check_open()
                for number in frame.messages:
                    count = self._messages.pop(number, None)
                    if count is None:  # discarded by this side, or never sent
                        if not self._first_message <= number < self.next_message:
                            raise ProtocolError(f"it answered message {number}, which was never sent")
                    elif count != _WHOLE and isinstance(frame, Taken):
                        raise ProtocolError(f"it took message {number}, which was not whole")
            case Close():
                self.state = CLOSED
            case Welcome():
                self.receiver_id = frame.receiver
                self.accept_hello(frame.version, frame.pid, VERSION)
                # At most the limit of the sockets of this side, even if the receiver accepts longer records.
                self._max_sent_bytes = min(frame.max_frame_bytes, MAX_RECORD_BYTES)
                if frame.is_admitted:
                    self.state = OPEN
            case _:
                if self.state is not OPEN:
                    self.check_open()
