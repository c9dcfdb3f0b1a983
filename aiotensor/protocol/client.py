"""A client's end of one connection to a server of messages.

    OPENING --ServerHello, of this version--> OPEN --Close; disconnected; violation--> CLOSED
       |                                                                                 ^
       '--ServerHello, of another version; Close; disconnected; violation----------------'

A message of the client, numbered by `ask`:

    --ask--> numbered --sent--> waiting --Answer or Failure--> (ended)
                |                  |
                '------------------'--cancelled by its owner--> (ended)

A numbered message that is never sent leaves a gap. The server may answer a message that was cancelled in the
meantime; the owner of the connection ignores that answer, so `cancel` changes no state here.
"""

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import CLOSED, OPEN, Connection, Loss
from aiotensor.protocol.exchange import (
    VERSION,
    Answer,
    Ask,
    Cancel,
    ClientHello,
    Credit,
    Failure,
    FromServer,
    ServerHello,
    read_from_server,
    write,
)
from aiotensor.protocol.parts import MAX_PARTS, PartLimits, Parts, check_parts, parts_of, split
from aiotensor.protocol.window import SendWindow
from aiotensor.types import TensorHandle

__all__ = ["ClientConnection"]


class ClientConnection(Connection):
    """A client's end of one connection.

    Its commands return messages to send, of which the first part is the header.

    Args:
        limits: the largest part, and the largest body, of an answer.
        where: the address of the server, for the texts of errors.

    Attributes:
        limits: the largest part, and the largest body, that the server accepts.
        receiver: the id of the server's receiver; "" for none.
        window: the credit for messages.
        has_sent_hello: whether `hello` was called.
    """

    def __init__(self, limits: PartLimits, where: str = "") -> None:
        super().__init__("client", "the server", where)
        self.limits = PartLimits()
        self.receiver = ""
        self.window = SendWindow(0, 0)
        self.has_sent_hello = False
        self._own_limits = limits
        self._next_number = 0
        self._sent_below = 0  # every sent message has a lower number

    # Commands

    def hello(self, pid: int, receiver: str) -> Parts:
        """Open the connection.

        Args:
            pid: the process id of this client.
            receiver: the id of the receiver for the tensors of answers; "" for none.
        """
        self.has_sent_hello = True
        return [write(ClientHello(VERSION, pid, receiver, *self._own_limits))]

    def ask(
        self, parts: Parts, handles: tuple[TensorHandle, ...], *, wants_answer: bool
    ) -> tuple[int, Parts]:
        """Number a message. Send it while `window` has credit, in the order of the numbers, and call `sent`.

        Args:
            parts: its body, and the buffers beside it.
            handles: the handles of its tensors that a sender has sent.
            wants_answer: whether the client expects an answer.

        Raises:
            TooLargeError: the server does not accept it.
        """
        check_parts(parts, self.limits, "server")
        number, self._next_number = self._next_number, self._next_number + 1
        body, following = split(parts)
        return number, [write(Ask(number, body, handles, wants_answer)), *following]

    def sent(self, number: int, nbytes: int) -> None:
        """Count a message that was sent, with the bytes of its body and buffers."""
        self._sent_below = number + 1
        self.window.sent(nbytes)

    def cancel(self, number: int) -> Parts:
        """Cancel a message that was sent."""
        return [write(Cancel(number))]

    # Messages of the server

    def receive(self, message: list[memoryview]) -> tuple[FromServer, list[memoryview]]:
        """Validate a message, and return its frame, and the body and buffers of an answer.

        The owner ends the connection after an error, by `violated`, and after a `Close`, by `closed`.

        Raises:
            ProtocolError: the server violated the protocol.
            RefusedError: the server has another version; the connection is closed.
        """
        if not 0 < len(message) <= MAX_PARTS:
            raise ProtocolError(f"it sent a message of {len(message)} parts: there are 1 to {MAX_PARTS}")
        frame = read_from_server(message[0])
        parts: list[memoryview] = []
        match frame:
            case Answer() | Failure():
                if self.state is not OPEN:
                    self.check_open()
                if isinstance(frame, Answer):
                    parts = parts_of(frame.body, message[1:], self._own_limits)
                if frame.number >= self._sent_below:
                    raise ProtocolError(f"it answered message {frame.number}, which was never sent")
                self.window.taken(frame.taken, frame.taken_bytes)
            case Credit():
                if self.state is not OPEN:
                    self.check_open()
                self.window.taken(frame.taken, frame.taken_bytes)
            case ServerHello():
                if not self.has_sent_hello:
                    raise ProtocolError("it sent its hello before that of the client")
                self.accept_hello(frame.version, frame.pid, VERSION)
                self.state = OPEN
                self.receiver = frame.receiver
                self.limits = PartLimits(frame.max_part_bytes, frame.max_body_bytes)
                self.window = SendWindow(frame.max_waiting, frame.max_waiting_bytes)
        return frame, parts

    def disconnected(self) -> Loss:
        """End the connection because the socket has ended."""
        self.state = CLOSED
        return self.lost("it ended, or the connection broke", is_retried=True)
