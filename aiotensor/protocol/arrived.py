"""The state of a mailbox: messages that have arrived, their senders, and the calls that wait for tensors."""

from bisect import bisect_right
from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

from aiotensor.errors import AioTensorError

T = TypeVar("T")

# The number of discarded messages that are remembered for each sender; errors for older ones are less exact.
REMEMBERED_DISCARDS = 1024


class NumberSet:
    """A set of non-negative integers, stored as ranges: a million consecutive numbers take two integers.

    Messages end nearly in the order in which they began, so the numbers of ended messages form few ranges: at
    most one more than there are open messages.

    Attributes:
        stops: for each range in order, one past its last number.
    """

    __slots__ = ("_starts", "stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self.stops: list[int] = []

    def __contains__(self, number: int) -> bool:
        if not self.stops or number >= self.stops[-1]:
            return False  # the usual case
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self.stops[index]

    def add(self, number: int) -> None:
        """Add a number; this has no effect if the set contains it."""
        if self.stops and number == self.stops[-1]:
            self.stops[-1] += 1  # the usual case
            return
        index = bisect_right(self._starts, number)  # of the first range that starts above the number
        if index and number < self.stops[index - 1]:
            return
        self._starts.insert(index, number)
        self.stops.insert(index, number + 1)
        for left in (index, index - 1):  # merge it with the ranges that it touches
            if 0 <= left < len(self._starts) - 1 and self.stops[left] == self._starts[left + 1]:
                del self.stops[left], self._starts[left + 1]

    def keep_last(self, count: int) -> None:
        """Keep at most the last `count` ranges, and forget the numbers below them."""
        excess = len(self._starts) - count
        if excess > 0:
            del self._starts[:excess], self.stops[:excess]

    def keep_first(self, count: int) -> None:
        """Keep at most the first `count` ranges, and forget the numbers above them."""
        del self._starts[count:], self.stops[count:]

    def ranges(self) -> list[tuple[int, int]]:
        """List the ranges as (first, one past the last), in order."""
        return list(zip(self._starts, self.stops, strict=True))


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
