"""The model's records of a publisher, its subscribers, and each publication."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from aiotensor.broadcast import Publisher, SlowPolicy, Subscriber
from verification.model.records import Outcome

__all__ = ["Block", "Call", "Limits", "Publication", "PublisherSide", "SubscriberSide", "View"]


class _Printed:
    """Make hypothesis print `repr()` instead of all fields."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True)
class Limits:
    """The limits of a publisher."""

    slow: SlowPolicy
    max_behind: int
    history: int
    max_held_bytes: int | None
    max_subscribers: int | None
    max_wait_s: float | None
    arena_bytes: int


@dataclass(eq=False, repr=False)
class PublisherSide(_Printed):
    """A publisher, from its opening to its end."""

    number: int
    publisher: Publisher
    limits: Limits
    is_closed: bool = False
    published: list["Publication"] = field(default_factory=list)
    has_allocated: bool = False  # the application has, or had, tensors of `allocate`
    # A subscriber has gone with pins, which may stay until memory is needed.
    may_keep_pins: bool = False

    def __repr__(self) -> str:
        return f"publisher {self.number}"


@dataclass(eq=False, repr=False)
class Block(_Printed):
    """A block of shared memory."""

    nbytes: int
    owner: torch.Tensor | None = None  # while the application has the tensor of `allocate`
    was_published: bool = False  # so that a further publication may be a copy

    def __repr__(self) -> str:
        return f"block of {self.nbytes} bytes"


@dataclass(eq=False, repr=False)
class Publication(_Printed):
    """One message; it has a number once it was published."""

    side: PublisherSide
    seed: int
    tensors: list[torch.Tensor]
    blocks: list[Block]  # that it certainly uses
    copies: list[Block]  # that it uses instead of some of them, perhaps
    began: int
    number: int | None = None

    def __repr__(self) -> str:
        return f"publication {self.number} of {self.side}"


@dataclass(eq=False, repr=False)
class View(_Printed):
    """A received message, whose tensors live."""

    publication: Publication
    tensors: list[torch.Tensor]
    expected: list[torch.Tensor]

    def __repr__(self) -> str:
        return f"view of {self.publication}"


@dataclass(eq=False, repr=False)
class SubscriberSide(_Printed):
    """A subscriber, from its opening to its end."""

    number: int
    subscriber: Subscriber[Any]
    is_closed: bool = False
    last: Publication | None = None  # that was received
    known: Publication | None = None  # the last one when everything was known: the publisher knows that, too
    # Since the last time when everything was known, its connection may have ended.
    may_be_lost: bool = False
    # Since it was opened: then views belong to several connections.
    was_lost: bool = False
    may_be_refused: bool = False
    opened_after: int = 0  # publications of the publisher that was open then
    received: set[int] = field(default_factory=set)  # seeds
    views: list[View] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"subscriber {self.number}"


@dataclass(eq=False, repr=False)
class Call(_Printed):
    """A call that has not returned, in a separate task."""

    what: str
    task: "asyncio.Task[Any] | None"  # None after its return, since hypothesis keeps drawn objects alive
    began: int
    clock: float  # of the loop, when it began
    finish: Callable[["Call", Outcome], None]
    side: PublisherSide | SubscriberSide
    publication: Publication | None = None
    nbytes: int = 0  # of shared memory that it may wait for
    is_cancelled: bool = False

    def __repr__(self) -> str:
        return f"{self.what} at {self.side}"
