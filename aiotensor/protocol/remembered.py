"""What a mailbox remembers of a sender and of each of its messages."""

from collections import OrderedDict
from typing import Generic, TypeVar

from aiotensor.errors import AioTensorError
from aiotensor.protocol.claims import Key
from aiotensor.protocol.numbers import NumberSet
from aiotensor.protocol.unclaimed import Unclaimed

__all__ = ["REMEMBERED_DISCARDS", "ArrivedMessage", "SenderRecord"]

T = TypeVar("T")

# How many discarded messages of a sender are remembered. An older one gets a less exact error.
REMEMBERED_DISCARDS = 1024


class ArrivedMessage(Generic[T]):
    """The tensors of one message that has not ended."""

    __slots__ = ("count", "held", "keys", "sizes", "tensors")

    def __init__(self) -> None:
        self.keys: list[Key] = []  # of all tensors that arrived
        self.sizes: list[int] = []  # of the same, in bytes
        self.tensors: dict[int, T] = {}  # those that nobody has taken
        self.count: int | None = None  # known when the message is whole
        self.held: set[int] = set()


class SenderRecord(Generic[T]):
    """One sender and its messages."""

    __slots__ = (
        "discarded",
        "ended",
        "first",
        "joined",
        "last_loss",
        "left",
        "limit",
        "loss",
        "messages",
        "next",
        "pid",
        "unclaimed",
    )

    def __init__(self, unclaimed: Unclaimed) -> None:
        self.joined = False
        self.left = False
        self.loss: AioTensorError | None = None  # while it is gone
        self.last_loss: AioTensorError | None = None
        self.pid: int | None = None
        self.limit = 0
        self.first = 0  # messages below it belonged to a connection that was lost
        self.next = 0
        self.messages: dict[int, ArrivedMessage[T]] = {}
        self.unclaimed = unclaimed  # what is in them
        self.ended = NumberSet()
        self.discarded: OrderedDict[int, None] = OrderedDict()

    def end(self, number: int, *, discarded: bool) -> None:
        """Note that a message has ended, and that it was discarded, as far back as that is remembered."""
        self.ended.add(number)
        if discarded:
            self.discarded[number] = None
            if len(self.discarded) > REMEMBERED_DISCARDS:
                self.discarded.popitem(last=False)

    def drop(self, number: int) -> ArrivedMessage[T] | None:
        """Forget the tensors of a message, and end it."""
        message = self.messages.pop(number, None)
        if message is not None:
            there = message.tensors
            self.unclaimed.add(-len(there), -sum(message.sizes[tensor] for tensor in there))
        self.end(number, discarded=True)
        return message
