"""A server's end of one connection of the channel.

    OPENING --ClientHello, then accept--> OPEN --close; disconnected--> CLOSED
       |                                                                  ^
       '--close, after a ClientHello or a violation; disconnected---------'

A message of the client:

    --Ask--> waiting --taken--> in hand --answer or fail--> (ended)
                |                  |
                '------------------'--fail; Cancel; disconnected--> (ended)

A rejected client receives a `Close` instead of the hello of the server, since the hello would let it send
messages. The owner of the connection ignores messages that arrive on a closed connection, because the client
may not have read the `Close` yet.
"""

from typing import NamedTuple

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import CLOSED, OPEN, BaseConnection
from aiotensor.protocol.exchange import (
    VERSION,
    Answer,
    Ask,
    Cancel,
    Cause,
    ClientHello,
    Credit,
    FromClient,
    ServerHello,
    failure,
    read_from_client,
    write,
)
from aiotensor.protocol.frames import Close
from aiotensor.protocol.parts import MAX_PARTS, PartLimits, Parts, check_parts, parts_of, split
from aiotensor.protocol.window import ReceiveWindow
from aiotensor.types import TensorHandle

__all__ = ["ClientLimits", "ServerConnection"]

_MAX_REASON = 1024


class ClientLimits(NamedTuple):
    """The limits of a server on its clients; None for no limit.

    Attributes:
        clients: the maximum number of connected clients.
        waiting: the maximum number of messages of each client that may wait to be taken.
        waiting_bytes: the bytes of waiting messages at which a client stops sending.
        parts: the limits of the server on the parts and the body of a message.
    """

    clients: int | None
    waiting: int
    waiting_bytes: int
    parts: PartLimits


class ServerConnection(BaseConnection):
    """A server's end of one connection to a client.

    Its commands return the messages to send; the first part of each is the header.

    Args:
        limits: the limits of the server on its clients.

    Attributes:
        limits: the limits of the client on the parts and the body of an answer; no limits before its hello.
        receiver: the id of the client's receiver; "" for none.
        refusal: the reason to reject the client because of its version; None if there is none.
        window: counts the messages of the client that wait to be taken, and the credit to return.
    """

    def __init__(self, limits: ClientLimits) -> None:
        super().__init__("server", "the client")
        self.limits = PartLimits()
        self.receiver = ""
        self.refusal: str | None = None
        self.window = ReceiveWindow(limits.waiting, limits.waiting_bytes)
        self._own_limits = limits
        self._next_number = 0

    # Commands

    def accept(self, pid: int, receiver: str) -> Parts:
        """Accept the client after its hello, and return the hello of the server.

        Args:
            pid: the process id of this server.
            receiver: the id of the server's receiver; "" for none.
        """
        self.state = OPEN
        limits = self._own_limits
        return [
            write(ServerHello(VERSION, pid, receiver, limits.waiting, limits.waiting_bytes, *limits.parts))
        ]

    def close(self, reason: str = "", *, is_refusal: bool = False) -> Parts:
        """Close the connection.

        Args:
            reason: the reason to reject the client, which the client receives; "" if the server closes.
            is_refusal: whether further attempts fail, too, because of a limit or the version of the client.
        """
        self.state = CLOSED
        return [write(Close(reason[:_MAX_REASON], is_refusal))]

    def disconnected(self) -> None:
        """End the connection because the socket has ended."""
        self.state = CLOSED

    def take(self, nbytes: int) -> bool:
        """Count a message of `nbytes` bytes that no longer waits, and return whether to send a `credit`."""
        return self.window.take(nbytes) and self.state is OPEN

    def credit(self) -> Parts:
        """Return the credit for the messages that no longer wait."""
        window = self.window
        window.reported(window.taken, window.taken_bytes)
        return [write(Credit(window.taken, window.taken_bytes))]

    def answer(self, number: int, parts: Parts, handles: tuple[TensorHandle, ...]) -> tuple[Answer, Parts]:
        """Answer a message, and return the frame of the answer and the message to send.

        The caller passes the frame to `answered` once the message was sent.

        Args:
            number: the number of the message to answer.
            parts: the body of the answer, and the buffers beside it.
            handles: the handles of those tensors of the answer that a sender has sent.

        Raises:
            TooLargeError: the answer exceeds a limit of the client.
        """
        check_parts(parts, self.limits, "client")
        body, following = split(parts)
        frame = Answer(number, body, handles, self.window.taken, self.window.taken_bytes)
        return frame, [write(frame), *following]

    def answered(self, answer: Answer) -> None:
        """Record that an answer was sent, and the credit in it."""
        self.window.reported(answer.taken, answer.taken_bytes)

    def fail(self, number: int, cause: Cause) -> Parts:
        """Answer a message with an error; `number` is as in `answer`."""
        window = self.window
        window.reported(window.taken, window.taken_bytes)
        return [write(failure(number, cause, window.taken, window.taken_bytes))]

    # Messages of the client

    def receive(self, message: list[memoryview]) -> tuple[FromClient, list[memoryview]]:
        """Validate a message, and return its frame, with the body and the buffers if it is an `Ask`.

        The owner calls `accept` or `close` after a `ClientHello`, and `close` after an error.

        Raises:
            ProtocolError: the client violated the protocol.
        """
        if not 0 < len(message) <= MAX_PARTS:
            raise ProtocolError(f"it sent a message of {len(message)} parts, expected 1 to {MAX_PARTS}")
        frame = read_from_client(message[0])
        parts: list[memoryview] = []
        match frame:
            case Ask(number):
                if self.state is not OPEN:
                    self.check_open()
                if number < self._next_number:
                    raise ProtocolError(f"it sent message {number} after message {self._next_number - 1}")
                parts = parts_of(frame.body, message[1:], self._own_limits.parts)
                self.window.arrived(sum(map(len, parts)))
                self._next_number = number + 1
            case Cancel(number):
                if self.state is not OPEN:
                    self.check_open()
                if number >= self._next_number:
                    raise ProtocolError(f"it cancelled message {number}, which it never sent")
            case ClientHello():
                self.refusal = self.record_hello(frame.version, frame.pid, VERSION)
                self.receiver = frame.receiver
                self.limits = PartLimits(frame.max_part_bytes, frame.max_body_bytes)
        return frame, parts
