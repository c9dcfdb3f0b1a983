"""A real publisher and real subscribers on one loop, with a model that checks every result."""

from collections.abc import Callable, Coroutine
from typing import Any

import torch

from aiotensor import ClosedError, PeerLostError, RefusedError, TooLargeError, WouldBlockError
from aiotensor.broadcast import Publication as Received
from aiotensor.broadcast import Published
from verification.model.broadcast_records import Call, Publication, PublisherSide, SubscriberSide, View
from verification.model.records import Outcome
from verification.model.stage import Stage, outcome_of

__all__ = ["BroadcastWorld"]


class BroadcastWorld(Stage):
    """Keep a record of every publication, and compare what each call returns with it."""

    size = 2  # the maximum number of subscribers

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
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

    def of(self, side: PublisherSide | SubscriberSide, *what: str) -> list[Call]:
        """Return the pending calls of one side; only those of some kinds if any are given."""
        return [call for call in self.calls if call.side is side and (not what or call.what in what)]

    def call(
        self,
        what: str,
        side: PublisherSide | SubscriberSide,
        coroutine: Coroutine[Any, Any, Any],
        finish: Callable[[Call, Outcome], None],
        **more: Any,
    ) -> Call:
        """Start a call, whose outcome is checked when it has returned."""
        clock = self.steps.loop.time()
        call = Call(what, self.steps.start(coroutine), self.tick(), clock, finish, side, **more)
        self.calls.append(call)
        return call

    def cancel(self, call: Call) -> None:
        """Cancel a call."""
        call.is_cancelled = True
        assert call.task is not None
        with self.steps.inside():
            call.task.cancel()

    def turn(self, times: int = 1) -> None:
        """Run iterations of the loop, and check the results of calls."""
        for _ in range(times):
            self.steps.turn()
            done = [(call, call.task) for call in self.calls if call.task is not None and call.task.done()]
            for call, _ in done:
                self.calls.remove(call)
                call.task = None
            heard = [(call, outcome_of(task, call)) for call, task in done]
            del done
            for call, outcome in sorted(heard, key=self._order):
                if outcome.is_cancelled:
                    assert call.is_cancelled, f"{call} was cancelled by the library"
                call.finish(call, outcome)

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
        assert limits.max_subscribers is None or published.delivered <= limits.max_subscribers
        publication.number = published.number
        for block in publication.blocks:
            block.was_published = True
        side.published.append(publication)
        if limits.slow == "disconnect":
            for subscriber in self.living:
                if self.most_behind(subscriber, side) > limits.max_behind:
                    self.lose(subscriber)

    def most_behind(self, subscriber: SubscriberSide, side: PublisherSide) -> int:
        """Return the number of publications that a subscriber may be behind, as its publisher knows it."""
        last = subscriber.known
        received = last.number if last is not None and last.side is side and last.number is not None else -1
        return len(side.published) - 1 - received

    def check_not_published(self, call: Call, error: BaseException) -> None:
        """Check the error of a call of a publisher."""
        side = call.side
        assert isinstance(side, PublisherSide)
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
        assert received.missed >= 0
        last = subscriber.last
        if last is not None and last.side is side and last.number is not None:
            assert number == last.number + 1 + received.missed, (
                f"{last} precedes {publication} at {subscriber}"
            )
            may_miss = side.limits.slow == "drop" or subscriber.was_lost
            assert may_miss or not received.missed, f"{subscriber} missed {received.missed} publications"
        else:
            first = number - received.missed
            # Restarts may have evicted publications of earlier publishers, which count as missed, too.
            evicted = [
                one for one in self.by_seed.values() if one.side is not side and one.number is not None
            ]
            assert first >= -sum(one.seed not in subscriber.received for one in evicted)
            may_miss = side.limits.slow == "drop" or subscriber.was_lost
            assert may_miss or not received.missed, f"{subscriber} missed {received.missed} publications"
            if not subscriber.was_lost:
                assert first >= subscriber.opened_after - side.limits.history, f"{subscriber} began too early"
        assert len(tensors) == len(publication.tensors)
        assert all(map(torch.equal, tensors, publication.tensors)), f"{publication} has other values"
        subscriber.received.add(seed)
        subscriber.last = publication
        subscriber.views.append(View(publication, tensors, list(publication.tensors)))

    def check_not_received(self, call: Call, error: BaseException) -> None:
        """Check the error of a call of a subscriber."""
        side = call.side
        assert isinstance(side, SubscriberSide)
        match error:
            case PeerLostError():
                assert side.was_lost, f"{call}: nothing was lost"
                assert side.may_be_lost, f"{call}: nothing was lost since"
            case RefusedError():
                assert side.may_be_refused, f"{call}: it was not refused"
            case ClosedError():
                assert side.is_closed, f"{call}: it was not closed"
            case StopAsyncIteration():
                assert side.is_closed or side.may_be_lost, f"{call}: it has not ended"
            case _:
                raise AssertionError(f"{call} failed: {error!r}") from error

    # Ends

    def lose(self, subscriber: SubscriberSide) -> None:
        """Record that the connection of a subscriber may have ended, perhaps with pins."""
        subscriber.may_be_lost = subscriber.was_lost = True
        if self.publisher is not None:
            self.publisher.may_keep_pins = True

    def note_the_limit(self) -> None:
        """Record which subscribers may be refused, now that one of them connects."""
        most = None if self.publisher is None else self.publisher.limits.max_subscribers
        # The publisher may notice later that a subscriber has closed.
        if most is not None and len(self.living) + len(self.calls_of_closing()) > most:
            for one in self.living:
                one.may_be_refused = True

    def calls_of_closing(self) -> list[Call]:
        """Return the calls that close subscribers."""
        return [call for call in self.calls if call.what == "close" and isinstance(call.side, SubscriberSide)]
