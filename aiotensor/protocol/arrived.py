"""The state of a mailbox: messages that have arrived, their senders, and the calls that wait for tensors."""

from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

from aiotensor.errors import AioTensorError
from aiotensor.protocol.numbers import NumberSet

__all__ = ["REMEMBERED_DISCARDS", "ArrivedMessage", "Claims", "Key", "SenderRecord"]

T = TypeVar("T")

# The number of discarded messages that are remembered for each sender; errors for older ones are less exact.
REMEMBERED_DISCARDS = 1024


class Key(msgspec.Struct, frozen=True, order=True, gc=False):
    """The name of one tensor: the first three fields of its handle."""

    sender: str
    message: int
    tensor: int


class Claims:
    """Count the calls that wait for each tensor by its handle; only one of these calls can receive it."""

    __slots__ = ("by_message",)

    def __init__(self) -> None:
        self.by_message: dict[tuple[str, int], dict[int, int]] = {}  # the count for each tensor

    def __contains__(self, key: Key) -> bool:
        return key.tensor in self.by_message.get((key.sender, key.message), ())

    def add(self, key: Key) -> None:
        """Add a claim."""
        claims = self.by_message.setdefault((key.sender, key.message), {})
        claims[key.tensor] = claims.get(key.tensor, 0) + 1

    def remove(self, key: Key) -> bool:
        """Remove a claim, and return whether it was the last one for its tensor."""
        claims = self.by_message[key.sender, key.message]
        claims[key.tensor] -= 1
        if claims[key.tensor]:
            return False
        del claims[key.tensor]
        if not claims:
            del self.by_message[key.sender, key.message]
        return True

    def of_message(self, sender: str, number: int) -> list[Key]:
        """List the claimed tensors of a message, including unknown ones."""
        return [Key(sender, number, tensor) for tensor in self.by_message.get((sender, number), ())]

    def of_sender(self, sender: str) -> list[Key]:
        """List the claimed tensors of a sender."""
        return [
            key for name, number in self.by_message if name == sender for key in self.of_message(name, number)
        ]


class ArrivedMessage(msgspec.Struct, Generic[T], eq=False):
    """The tensors of one message that has not ended."""

    keys: list[Key] = []
    sizes: list[int] = []  # in bytes, one for each key
    tensors: dict[int, T] = {}  # still to be taken
    count: int | None = None  # set when the message becomes whole
    held: set[int] = set()


class SenderRecord(msgspec.Struct, Generic[T], eq=False):
    """One sender and its messages."""

    joined: bool = False
    left: bool = False
    loss: AioTensorError | None = None  # set while the sender is gone or refused
    last_loss: AioTensorError | None = None
    pid: int | None = None
    limit: int = 0  # the maximum number of its messages in flight
    first: int = 0  # messages with lower numbers belonged to a connection that was lost
    next: int = 0  # above the numbers of all messages that have arrived
    messages: dict[int, ArrivedMessage[T]] = {}
    unclaimed_tensors: int = 0  # in `messages`; updated on each change, since counting would block the loop
    unclaimed_bytes: int = 0
    ended: NumberSet = msgspec.field(default_factory=NumberSet)
    discarded: OrderedDict[int, None] = msgspec.field(default_factory=OrderedDict)

    def discard(self, number: int) -> None:
        """Record that a message was discarded."""
        self.ended.add(number)
        self.discarded[number] = None
        if len(self.discarded) > REMEMBERED_DISCARDS:
            self.discarded.popitem(last=False)
