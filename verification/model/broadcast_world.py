"""A real publisher and real subscribers on one loop, with a model that checks every result."""

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from aiotensor import ClosedError, PeerLostError, TooLargeError, WouldBlockError
from aiotensor.broadcast import Publication as Received
from aiotensor.broadcast import Published, Publisher, SlowPolicy, Subscriber
from verification.model.records import Call, Outcome, Printed
from verification.model.stage import Stage

SMALL = 3  # elements of int64: in a record instead of shared memory


@dataclass(frozen=True)
class Limits:
    """The limits of a publisher."""

    slow: SlowPolicy
    max_behind: int
    history: int
    max_held_bytes: int | None
    max_wait_s: float | None
    arena_bytes: int


@dataclass(eq=False, repr=False)
class PublisherSide(Printed):
    """A publisher, from its opening to its end."""

    number: int
    publisher: Publisher
    limits: Limits
    is_closed: bool = False
    published: list["Publication"] = field(default_factory=list)
    has_allocated: bool = False  # the application has, or had, tensors of `allocate`

    def __repr__(self) -> str:
        return f"publisher {self.number}"


@dataclass(eq=False, repr=False)
class Publication(Printed):
    """One message; it has a number once it was published."""

    side: PublisherSide
    seed: int
    tensors: list[torch.Tensor]
    number: int | None = None

    def __repr__(self) -> str:
        return f"publication {self.number} of {self.side}"


@dataclass(eq=False, repr=False)
class View(Printed):
    """A received message, whose tensors live."""

    publication: Publication
    tensors: list[torch.Tensor]
    expected: list[torch.Tensor]

    def __repr__(self) -> str:
        return f"view of {self.publication}"


@dataclass(eq=False, repr=False)
class SubscriberSide(Printed):
    """A subscriber, from its opening to its end."""

    number: int
    subscriber: Subscriber[Any]
    is_closed: bool = False
    last: Publication | None = None  # that was received
    known: Publication | None = None  # the last one when everything was known: the publisher knows that, too
    may_be_lost: bool = False  # since the last time when everything was known
    was_lost: bool = False  # since it was opened
    opened_after: int = 0  # publications of the publisher that was open then
    received: set[int] = field(default_factory=set)  # seeds
    views: list[View] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"subscriber {self.number}"


def bytes_of(counts: Iterable[int]) -> int:
    """Count the bytes of shared memory, in whole pages, that tensors with these numbers of elements need."""
    return sum(-(-8 * count // mmap.PAGESIZE) * mmap.PAGESIZE for count in counts if count > SMALL)


class BroadcastWorld(Stage):
    """Keep a record of every publication, and compare what each call returns with it."""

    size = 2  # the maximum number of subscribers
    closing_s = 0.3  # a subscriber that has gone may have pins until then

    def __init__(self) -> None:
        super().__init__()
        self.publishers: list[PublisherSide] = []
        self.subscribers: list[SubscriberSide] = []
        self.by_seed: dict[int, Publication] = {}

    @property
    def publisher(self) -> PublisherSide | None:
        """The publisher that is open."""
        return next((one for one in self.publishers if not one.is_closed), None)

    @property
    def living(self) -> list[SubscriberSide]:
        """The subscribers that are open."""
        return [one for one in self.subscribers if not one.is_closed]

    def objects(self) -> list[Any]:
        return [one.publisher for one in self.publishers] + [one.subscriber for one in self.subscribers]

    def turn(self, times: int = 1) -> None:
        """Run iterations of the loop, and check the results of calls."""
        for _ in range(times):
            self.steps.turn()
            self.finish(sorted(self.ended_calls(), key=self._order))

    def _order(self, heard: tuple[Call, Outcome]) -> tuple[int, int, int]:
        """Sort results: the publisher's in the order of their numbers, then the subscribers' in theirs.

        A call that begins when an earlier one is about to take a publication may take it instead.
        """
        call, outcome = heard
        match outcome.value:
            case Published(number=number):
                return -1, number, call.began
            case Received(message=[seed, *_], number=number):
                return self.by_seed[seed].side.number, number, call.began
        return -1 if isinstance(call.side, PublisherSide) else 1 << 62, 1 << 62, call.began

    # Results of a publisher's calls

    def was_published(self, publication: Publication, published: Published) -> None:
        """Check the result of publishing."""
        side, limits = publication.side, publication.side.limits
        assert published.number == len(side.published), f"{published.number} follows {side.published[-1:]}"
        assert published.dropped == 0 or limits.slow == "drop", published
        assert 0 <= published.dropped <= published.delivered <= len(self.subscribers)
        publication.number = published.number
        side.published.append(publication)
        if limits.slow == "disconnect":
            for subscriber in self.living:
                last = subscriber.known
                received = -1 if last is None or last.side is not side else last.number or 0
                if len(side.published) - 1 - received > limits.max_behind:
                    self.lose(subscriber)

    def check_error(self, call: Call, error: BaseException) -> None:
        if isinstance(call.side, PublisherSide):
            self._check_not_published(call, error)
        else:
            self._check_not_received(call, error)

    def _check_not_published(self, call: Call, error: BaseException) -> None:
        """Check the error of a call of a publisher."""
        side: PublisherSide = call.side
        limits = side.limits
        match error:
            case ClosedError():
                assert side.is_closed, f"{call}: it was not closed"
            case TooLargeError():
                assert limits.max_held_bytes is not None, f"{call}: it is not too large"
                assert call.nbytes > limits.max_held_bytes, f"{call}: it is not too large"
            case WouldBlockError() if "would never end" in str(error) or "all shared memory" in str(error):
                assert side.has_allocated, f"{call}: the application holds no memory"
            case WouldBlockError():
                waited = self.steps.loop.time() - call.clock
                assert limits.max_wait_s is not None, f"{call}: it may wait for ever"
                assert waited >= limits.max_wait_s, f"{call}: it has only waited for {waited} s"
            case _:
                raise AssertionError(f"{call} failed: {error!r}") from error

    # Results of a subscriber's calls

    def was_received(self, subscriber: SubscriberSide, received: Received[Any]) -> None:
        """Check that a publication is the next one of its publisher, with the right values."""
        seed, *tensors = received.message
        publication = self.by_seed[seed]
        side, number = publication.side, publication.number
        assert number is not None, f"{publication} was received, and not published"
        assert received.number == number, f"{publication} came as {received.number}"
        assert seed not in subscriber.received, f"{subscriber} received {publication} twice"
        last, first = subscriber.last, number - received.missed
        assert received.missed >= 0
        may_miss = side.limits.slow == "drop" or subscriber.was_lost
        assert may_miss or not received.missed, f"{subscriber} missed {received.missed} publications"
        if last is not None and last.side is side and last.number is not None:
            assert first == last.number + 1, f"{last} precedes {publication} at {subscriber}"
        elif not subscriber.was_lost:
            assert first >= subscriber.opened_after - side.limits.history, f"{subscriber} began too early"
        assert len(tensors) == len(publication.tensors)
        assert all(map(torch.equal, tensors, publication.tensors)), f"{publication} has other values"
        subscriber.received.add(seed)
        subscriber.last = publication
        subscriber.views.append(View(publication, tensors, list(publication.tensors)))

    def _check_not_received(self, call: Call, error: BaseException) -> None:
        """Check the error of a call of a subscriber."""
        side: SubscriberSide = call.side
        match error:
            case PeerLostError():
                assert side.may_be_lost, f"{call}: nothing was lost"
            case ClosedError():
                assert side.is_closed, f"{call}: it was not closed"
            case StopAsyncIteration():
                assert side.is_closed or side.may_be_lost, f"{call}: it has not ended"
            case _:
                raise AssertionError(f"{call} failed: {error!r}") from error

    def lose(self, subscriber: SubscriberSide) -> None:
        """Record that the connection of a subscriber may have ended."""
        subscriber.may_be_lost = subscriber.was_lost = True
