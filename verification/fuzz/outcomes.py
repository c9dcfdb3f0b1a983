"""Count the frames of conversations that the rules of the protocol accept and reject, without any socket."""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence

from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.protocol.audience import Backlog, Item
from aiotensor.protocol.broadcast import Admit, Publish
from aiotensor.protocol.frames import (
    ARENA,
    INLINE,
    OPENING,
    OUT_OF_BAND,
    VERSION,
    Hello,
    Inspect,
    Opening,
    Put,
    Subscribe,
    Welcome,
    decode,
)
from aiotensor.protocol.inspector import InspectedConnection, InspectorConnection
from aiotensor.protocol.publisher import PublisherConnection
from aiotensor.protocol.ranks import Join, PutNone, RankConnection
from aiotensor.protocol.receiver import ReceiverConnection
from aiotensor.protocol.sender import SenderConnection
from aiotensor.protocol.subscriber import SubscriberConnection, read_content
from aiotensor.tensors.arena import segment_bytes
from verification.fuzz.broadcasts import MOST_READ
from verification.fuzz.grammar import (
    TO_INSPECTOR,
    TO_PUBLISHER,
    TO_RANK,
    TO_RECEIVER,
    TO_SENDER,
    TO_SUBSCRIBER,
)
from verification.fuzz.ranks import MAX_BYTES, MESSAGES
from verification.fuzz.steps import FIRST_BLOCK, FIRST_NUMBER, Conversation

__all__ = ["Outcomes"]

_WELCOME = Welcome(VERSION, 1, receiver="r", is_admitted=True)

_Opened = ReceiverConnection | PublisherConnection | InspectedConnection


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
            TO_RECEIVER: self._at_listener,
            TO_PUBLISHER: self._at_listener,
            TO_SENDER: self._at_sender,
            TO_SUBSCRIBER: self._at_subscriber,
            TO_INSPECTOR: self._at_inspector,
            TO_RANK: self._at_rank,
        }
        try:
            sides[said.to](said)
        except (ProtocolError, RefusedError):
            self.invalid[said.to] += 1
        else:
            self.valid[said.to] += 1

    def _accept(self, side: str, frames: Sequence[object]) -> None:
        self.accepted.update((side, type(frame).__name__) for frame in frames)

    def _at_listener(self, said: Conversation) -> None:
        connection: _Opened | None = None
        for step in said.steps:
            if step.beside:
                [opening] = decode(OPENING, step.data)
                self._accept(said.to, [opening])
            elif step.connects or connection is None:
                [opening] = decode(OPENING, step.data)
                connection = _opened(said.to, opening)
                if connection.mismatch is not None:
                    raise RefusedError(connection.mismatch)
                self._accept(said.to, [opening])
            else:
                self._accept(said.to, connection.receive(step.data))

    def _at_sender(self, said: Conversation) -> None:
        connection = SenderConnection(Hello(VERSION, 1, secrets.token_hex(16), 8, 1 << 20))
        for message in range(3):
            put = Put(message, 0, "uint8", (3,), "cpu", ARENA, bytes(16), message, last=True)
            connection.put(put)
        for step in said.steps:
            self._accept(TO_SENDER, connection.receive(step.data))

    def _at_subscriber(self, said: Conversation) -> None:
        connection = SubscriberConnection(Subscribe(VERSION, 1, secrets.token_hex(16)))
        for step in said.steps:
            frames = connection.receive(step.data)
            self._accept(TO_SUBSCRIBER, frames)
            for frame in frames:
                if isinstance(frame, Publish):
                    connection.taken(frame.number)
                    if frame.placement == INLINE:
                        self._accept(TO_SUBSCRIBER, [read_content(frame.payload)])

    def _at_rank(self, said: Conversation) -> None:
        connection = RankConnection(Join(VERSION, 1, MAX_BYTES), "rank 1")
        for message in range(MESSAGES):
            connection.put(PutNone(message))
        for step in said.steps:
            if step.beside:
                continue
            frames = connection.receive(step.data)
            puts = [frame for frame in frames if isinstance(frame, Put) and frame.placement == OUT_OF_BAND]
            if frames and len(puts) != (step.carried is not None):
                raise ProtocolError("the session rejects it")
            self._accept(TO_RANK, frames)
            for put in puts:
                connection.count_data(put.message, len(step.carried or "") // 2)
            for frame in frames:
                if isinstance(frame, Put | PutNone):
                    connection.taken(frame.message)

    def _at_inspector(self, said: Conversation) -> None:
        connection = InspectorConnection(1)
        for step in said.steps:
            self._accept(TO_INSPECTOR, connection.receive(step.data))


def _opened(to: str, opening: Opening) -> _Opened:
    match opening:
        case Inspect():
            return InspectedConnection(opening, _WELCOME)
        case Hello() if to == TO_RECEIVER:
            receiver = ReceiverConnection(opening, _WELCOME, segment_bytes(opening.arena_bytes))
            receiver.admit()
            return receiver
        case Subscribe() if to == TO_PUBLISHER:
            publisher = PublisherConnection(opening, _WELCOME)
            backlog = Backlog(MOST_READ, None)
            publisher.admit(backlog, Admit(1 << 20, MOST_READ, FIRST_NUMBER))
            for number in range(MOST_READ):
                item = Item(FIRST_NUMBER + number, b"", blocks=((FIRST_BLOCK + number, 4096),))
                backlog.add(item)
                backlog.next()
            return publisher
    raise RefusedError("it has the role of a peer elsewhere")
