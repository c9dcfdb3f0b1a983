"""Count the frames of conversations that the rules of the protocol accept and reject, without any socket."""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence

from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.protocol.frames import ARENA, OPENING, VERSION, Hello, Inspect, Put, Subscribe, Welcome, decode
from aiotensor.protocol.inspector import InspectedConnection, InspectorConnection
from aiotensor.protocol.receiver import ReceiverConnection
from aiotensor.protocol.sender import SenderConnection
from aiotensor.tensors.arena import segment_bytes
from verification.fuzz.grammar import TO_INSPECTOR, TO_RECEIVER, TO_SENDER
from verification.fuzz.steps import Conversation

__all__ = ["Outcomes"]

_WELCOME = Welcome(VERSION, 1, receiver="r", is_admitted=True)


class Outcomes:
    """The outcomes of conversations.

    Attributes:
        accepted: the number of accepted frames, by the side that accepts them and their kind.
        valid: the number of conversations that each side has accepted entirely.
        invalid: the number of conversations with a rejected frame, by the side that rejects it.
    """

    def __init__(self) -> None:
        self.accepted: Counter[tuple[str, str]] = Counter()
        self.valid: Counter[str] = Counter()
        self.invalid: Counter[str] = Counter()

    def add(self, said: Conversation) -> None:
        """Pass the records of a conversation to the connection objects of its side."""
        sides: dict[str, Callable[[Conversation], None]] = {
            TO_RECEIVER: self._at_receiver,
            TO_SENDER: self._at_sender,
            TO_INSPECTOR: self._at_inspector,
        }
        try:
            sides[said.to](said)
        except (ProtocolError, RefusedError):
            self.invalid[said.to] += 1
        else:
            self.valid[said.to] += 1

    def _accept(self, side: str, frames: Sequence[object]) -> None:
        self.accepted.update((side, type(frame).__name__) for frame in frames)

    def _at_receiver(self, said: Conversation) -> None:
        connection: ReceiverConnection | InspectedConnection | None = None
        for step in said.steps:
            if step.beside:
                [opening] = decode(OPENING, step.data)
                self._accept(TO_RECEIVER, [opening])
                if isinstance(connection, ReceiverConnection):
                    connection.request_statistics()
            elif step.connects or connection is None:
                connection = self._opened(step.data)
            else:
                self._accept(TO_RECEIVER, connection.receive(step.data))

    def _opened(self, record: bytes) -> ReceiverConnection | InspectedConnection:
        [opening] = decode(OPENING, record)
        connection: ReceiverConnection | InspectedConnection
        if isinstance(opening, Inspect):
            connection = InspectedConnection(opening, _WELCOME)
        elif isinstance(opening, Subscribe):
            raise RefusedError("no publisher is here")
        else:
            connection = ReceiverConnection(opening, _WELCOME, segment_bytes(opening.arena_bytes))
            connection.admit()
        if connection.mismatch is not None:
            raise RefusedError(connection.mismatch)
        self._accept(TO_RECEIVER, [opening])
        return connection

    def _at_sender(self, said: Conversation) -> None:
        connection = SenderConnection(Hello(VERSION, 1, secrets.token_hex(16), 8, 1 << 20))
        for message in range(3):
            put = Put(message, 0, "uint8", (3,), "cpu", ARENA, bytes(16), message, last=True)
            connection.put(put)
        for step in said.steps:
            self._accept(TO_SENDER, connection.receive(step.data))

    def _at_inspector(self, said: Conversation) -> None:
        connection = InspectorConnection(1)
        for step in said.steps:
            self._accept(TO_INSPECTOR, connection.receive(step.data))
