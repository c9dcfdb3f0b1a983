"""A client's end of one connection of the channel.

    OPENING --ServerHello, of this version--> OPEN --Close; disconnected; violation--> CLOSED
       |                                                                                 ^
       '--ServerHello, of another version; Close; disconnected; violation----------------'

A message of the client, numbered by `ask`:

    --ask--> numbered --sent--> waiting --Answer or Failure--> (ended)
                |                  |
                '------------------'--cancelled by its owner--> (ended)

A numbered message that is never sent leaves a gap in the numbers. The server may answer a message that was
cancelled in the meantime; the owner of the connection ignores that answer, so `cancel` changes no state here.
"""

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import CLOSED, OPEN, BaseConnection, Loss
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
from aiotensor.types import TensorHandle, TraceContext

__all__ = ["ClientConnection"]


class ClientConnection(BaseConnection):
    """A client's end of one connection.

    Its commands return the messages to send; the first part of each is the header.

    Args:
        limits: the limits of this client on the parts and the body of an answer.
        where: the address of the server, for error messages; "" to omit it.

    Attributes:
        limits: the limits of the server on the parts and the body of a message; no limits before its hello.
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
        """Open the connection with the hello of this client.

        Args:
            pid: the process id of this client.
            receiver: the id of the receiver for the tensors of answers; "" for none.
        """
        self.has_sent_hello = True
        return [write(ClientHello(VERSION, pid, receiver, *self._own_limits))]

    def ask(
        self,
        parts: Parts,
        handles: tuple[TensorHandle, ...],
        *,
        wants_answer: bool,
        trace: TraceContext | None = None,
    ) -> tuple[int, Parts]:
        """Number a message, and return its number and the message to send.

        The caller sends messages in the order of their numbers, while `window` has credit, and then calls
        `sent`.

        Args:
            parts: the body of the message, and the buffers beside it.
            handles: the handles of those tensors of the message that a sender has sent.
            wants_answer: whether the client expects an answer.
            trace: the trace context of the message; None without tracing.

        Raises:
            TooLargeError: the message exceeds a limit of the server.
        """
        check_parts(parts, self.limits, "server")
        number, self._next_number = self._next_number, self._next_number + 1
        body, following = split(parts)
        return number, [write(Ask(number, body, handles, wants_answer, trace)), *following]

    def sent(self, number: int, nbytes: int) -> None:
        """Count a message that was sent; `nbytes` is the size of its body and buffers in bytes."""
        self._sent_below = number + 1
        self.window.sent(nbytes)

    def cancel(self, number: int) -> Parts:
        """Cancel a message that was sent."""
        return [write(Cancel(number))]

    # Messages of the server

    def receive(self, message: list[memoryview]) -> tuple[FromServer, list[memoryview]]:
        """Validate a message, and return its frame, with the body and the buffers if it is an `Answer`.

        The owner ends the connection: with `violated` after a `ProtocolError`, and with `closed` after a
        `Close`.

        Raises:
            ProtocolError: the server violated the protocol.
            RefusedError: the server has another version; the connection is closed.
        """
        if not 0 < len(message) <= MAX_PARTS:
            raise ProtocolError(f"it sent a message of {len(message)} parts, expected 1 to {MAX_PARTS}")
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
        return self.lost("it ended, or the network failed", is_retried=True)
