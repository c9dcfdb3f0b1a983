"""A rogue subscriber: plain sockets, on which it reads publications and sends any record."""

import os
import secrets

from msgspec.structs import replace

from aiotensor.errors import ProtocolError
from aiotensor.protocol.broadcast import TO_SUBSCRIBER, Admit, Publish
from aiotensor.protocol.frames import Welcome, decode
from aiotensor.protocol.subscriber import read_content
from verification.fuzz.broadcasts import MOST_READ
from verification.fuzz.speaking import Road
from verification.fuzz.steps import FIRST_BLOCK, FIRST_NUMBER, PID, PUBLISHER, Conversation, Step

__all__ = ["subscribe"]

_PATIENCE_S = 0.05  # for a publication that may never arrive

_MOST_NAMED = 2 * MOST_READ + 2  # numbers for which a conversation has a placeholder


class _Heard:
    """The records of a publisher on one connection, and the values of the placeholders that follow."""

    def __init__(self) -> None:
        self.count = 0  # of publications
        self._publisher = ""
        self._numbers: list[int] = []
        self._blocks: list[int] = []
        self._next = 0

    def again(self) -> "_Heard":
        """Return an object for the next connection to the same publisher."""
        next_one = _Heard()
        next_one._publisher, next_one._next = self._publisher, self._next
        return next_one

    def add(self, record: bytes) -> None:
        """Update this with a record of the publisher."""
        try:
            frames = decode(TO_SUBSCRIBER, record)
        except ProtocolError:
            return  # to an inspector
        for frame in frames:
            match frame:
                case Welcome():
                    self._publisher = frame.receiver
                case Admit():
                    self._next = frame.next
                case Publish():
                    self.count += 1
                    self._numbers.append(frame.number)
                    self._next = frame.number + 1
                    tensors = read_content(frame.payload).tensors if frame.block is None else ()
                    self._blocks += [tensor.block for tensor in tensors]

    def filled_in(self, step: Step) -> Step:
        """Replace the placeholders in a record."""
        data = step.data.replace(PID.to_bytes(4), os.getpid().to_bytes(4))
        if self._publisher:
            data = data.replace(PUBLISHER.encode(), self._publisher.encode())
        for index in range(_MOST_NAMED):
            here = index - len(self._numbers)
            number = self._numbers[index] if here < 0 else self._next + here
            data = data.replace((FIRST_NUMBER + index).to_bytes(8), number.to_bytes(8))
        for index, block in enumerate(self._blocks[:_MOST_NAMED]):
            data = data.replace((FIRST_BLOCK + index).to_bytes(8), block.to_bytes(8))
        return replace(step, record=data.hex())


async def subscribe(road: Road, conversation: Conversation) -> int:
    """Send a whole conversation under a new name, and return the number of publications that were read."""
    sender = secrets.token_hex(16).encode()
    heard = _Heard()
    count = 0
    is_connected = is_heard = False
    for step in conversation.steps:
        if step.beside:
            await road.say_beside(step, secrets.token_hex(16).encode())
            continue
        if step.connects or not is_connected:
            await road.connect(step.opening)
            heard = heard.again()
            is_connected = True
        elif not is_heard:
            continue
        while heard.count < step.after and (record := await road.read(_PATIENCE_S)):
            before = heard.count
            heard.add(record)
            count += heard.count - before
        is_heard = await road.say(heard.filled_in(step), sender)
    return count
