"""The model's records of each side, each message and each tensor, with their possible outcomes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from aiotensor import TensorHandle, TensorReceiver, TensorSender
from aiotensor.sender import OpenMessage


class Printed:
    """Make hypothesis print `repr()` instead of all fields."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(eq=False, repr=False)
class Receiver(Printed):
    """A receiver, from its opening to its end."""

    number: int
    receiver: TensorReceiver
    is_open: bool = False
    is_gone: bool = False

    def __repr__(self) -> str:
        return f"receiver {self.number}"


@dataclass(eq=False)
class Loss:
    """An event that ends a connection."""

    at: int
    is_certain: bool  # the connection existed
    noticed: int | None = None  # when both sides had certainly noticed it


@dataclass(eq=False, repr=False)
class Sender(Printed):
    """A sender, from its opening to its end."""

    number: int
    sender: TensorSender
    limit: int
    arena_bytes: int
    met: Receiver | None = None  # the connected receiver, after the last settling
    introduced: set[Receiver] = field(default_factory=set)  # the receivers that have had its hello
    may_be_refused: bool = False
    latest_allocation: int = 0  # the start of the latest call of `allocate` that has returned
    end: str = ""  # or "closed" or "killed"
    messages: list["Message"] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"sender {self.number}"

    def lose(self, at: int, *, is_certain: bool) -> None:
        """Record that a connection may have ended, or has."""
        self.losses.append(Loss(at, is_certain))

    def may_have_lost(self, began: int) -> bool:
        """Return whether an operation that began at that moment may be lost by now."""
        if self.may_be_refused:
            return True
        return any(loss.noticed is None or began < loss.noticed for loss in self.losses)

    def has_lost(self, known: int) -> bool:
        """Return whether a message that was sent at that moment is certainly lost."""
        return any(loss.is_certain and known < loss.at for loss in self.losses)


@dataclass(eq=False, repr=False)
class Message(Printed):
    """One message: open, then whole or dropped."""

    sender: Sender
    began: int
    state: str = "open"  # or "whole" or "dropped", as the sending side sees it
    number: int | None = None
    known: int | None = None  # when it had certainly been sent
    outlived: int = 0  # the latest moment at which it was certainly not lost
    whole_in_turn: int = 0
    waits_in_line: bool = True  # for its permit
    is_posted: bool = False  # its tensor arrives once it is copied, and the message is whole then
    opened: OpenMessage | None = None
    ending: "asyncio.Future[None] | None" = None
    tensors: list["Tensor"] = field(default_factory=list)
    discarded_here: bool = False
    was_lost: bool = False  # on both sides
    is_gone: bool = False  # discarded or lost, as both sides know: no tensor of it can be taken any more

    def __repr__(self) -> str:
        return f"message {self.number} of {self.sender} ({self.state})"

    @property
    def is_taken(self) -> bool:
        return self.state == "whole" and all(tensor.is_taken for tensor in self.tensors)

    @property
    def may_be_lost(self) -> bool:
        return self.sender.may_have_lost(max(self.began, self.outlived))

    @property
    def is_lost(self) -> bool:
        return self.was_lost or (self.known is not None and self.sender.has_lost(self.known))


@dataclass(eq=False, repr=False)
class Block(Printed):
    """A block of shared memory, while it is pinned."""

    side: Any  # the record of the sender or publisher
    nbytes: int
    owner: torch.Tensor | None = None  # if it comes from `allocate`
    is_allocated: bool = False
    began: int = 0
    # It may lie in memory that a lost receiver still reads; then it is copied before it is sent.
    may_be_copied: bool = False

    def __repr__(self) -> str:
        return f"{self.nbytes} bytes of {self.side}"


@dataclass(eq=False, repr=False)
class Tensor(Printed):
    """One tensor that was announced."""

    message: Message
    handle: TensorHandle
    values: torch.Tensor
    block: Block | None
    is_taken: bool = False
    taken_at: int = 0
    taken_by: Receiver | None = None
    view: torch.Tensor | None = None  # the received tensor, while it lives
    is_copy: bool = False

    def __repr__(self) -> str:
        return f"tensor {self.handle.tensor} of {self.message}"


Key = tuple[str, int, int]


def key_of(handle: TensorHandle) -> Key:
    return handle.sender, handle.message, handle.tensor


@dataclass(eq=False)
class Outcome:
    """The outcome of a call."""

    value: Any = None
    error: BaseException | None = None
    is_cancelled: bool = False


@dataclass(eq=False, repr=False)
class Call(Printed):
    """A call that has not returned, in a separate task."""

    what: str
    task: "asyncio.Task[Any] | None"  # None after its return, since hypothesis keeps drawn objects alive
    began: int
    clock: float  # of the loop, when it began
    finish: Callable[["Call", Outcome], None]
    side: Any  # the record of the object that was called
    is_cancelled: bool = False
    # Of calls of senders and receivers:
    message: Message | None = None
    block: Block | None = None
    key: Key | None = None  # of the tensor that it waits for
    is_copy: bool = False
    must_be_lost: bool = False
    # Of calls of publishers:
    nbytes: int = 0  # of shared memory that it may wait for

    def __repr__(self) -> str:
        return f"{self.what} at {self.side}"

    @property
    def begun(self) -> Message:
        """The message that it sends."""
        assert self.message is not None
        return self.message
