"""The operations of a subscriber's process in a round."""

import asyncio
import gc
import random

from aiotensor import AioTensorError, ClosedError
from aiotensor.broadcast import Publication, Subscriber
from verification.chaos.here import Kept, here, left_running, opened, token_of, until
from verification.chaos.journal import Broken, Disconnected, Received, Subscribed
from verification.chaos.plan import TakerPlan
from verification.chaos.publishing import Issue
from verification.internals import publisher_of
from verification.processes.peers import State

_CANCELLED = 0.2  # of the calls
_ITERATED = 0.5  # of the calls
_WRITTEN = 0.3  # of the tensors


class _Subscribing:
    """One subscriber in a round; takes from it until it is closed.

    Args:
        subscriber: an open subscriber.
        plan: the plan of the round.
    """

    def __init__(self, subscriber: Subscriber[Issue], plan: TakerPlan) -> None:
        self.subscriber = subscriber
        self.latest = "", -1  # the publisher and the number of the last publication
        self.has_ended = False  # the last call was notified of the end of a publisher
        self.is_closed = False
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._kept = Kept(plan)
        self.task = asyncio.create_task(self._take())

    async def _take(self) -> None:
        await asyncio.sleep(self._plan.stuck_ms / 1000)
        while not self.is_closed:
            try:
                self._took(await self._next())
            except StopAsyncIteration:
                self._ended(Disconnected(""))
            except ClosedError:
                return
            except (AioTensorError, OSError) as error:
                self._ended(Disconnected(type(error).__name__, str(error)))
                await asyncio.sleep(0.001)  # it may be refused again
            if self._plan.slow_ms:
                await asyncio.sleep(self._plan.slow_ms / 1000)

    def _ended(self, end: Disconnected) -> None:
        """Record the end of a connection, unless this side has closed it."""
        if not self.is_closed:
            here.journal(end)
            self.has_ended = True

    async def _next(self) -> Publication[Issue]:
        """Return the next publication; some calls are cancelled first, which loses nothing."""
        while True:
            call = anext(self.subscriber) if self._rng.random() < _ITERATED else self.subscriber.receive()
            if self._rng.random() >= _CANCELLED:
                return await call
            task = asyncio.ensure_future(call)
            try:
                await asyncio.wait([task], timeout=self._rng.choice((0.0, 0.002)) * self._rng.random())
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    return task.result()
            finally:
                del task  # its error refers to this frame

    def _took(self, publication: Publication[Issue]) -> None:
        issue, number = publication.message, publication.number
        for index, tensor in enumerate(issue.tensors):
            if token_of(tensor) != issue.key + index:
                here.journal(Broken(f"publication {number} arrived with other values: {tensor[:9]}"))
                return
        here.journal(Received(issue.key, issue.publisher, number, publication.missed))
        self.latest, self.has_ended = (issue.publisher, number), False
        for index, tensor in enumerate(issue.tensors):
            is_written = self._rng.random() < _WRITTEN
            if is_written:
                tensor.zero_()  # no other subscriber sees it
            self._kept.add(tensor, None if is_written else issue.key + index)

    async def close(self) -> None:
        """Close the subscriber during its operations; tensors are kept for as long as planned."""
        self.is_closed = True
        await self.subscriber.aclose()
        await self.task

    async def settle(self) -> None:
        """Wait until all tensors are dropped."""
        await self._kept.dropped()
        gc.collect()
        await until(lambda: not self.subscriber.statistics().leases)


_all: list[_Subscribing] = []  # of this round; the last one is open


async def open_receiver(state: State, plan: TakerPlan) -> None:
    """Open a subscriber, and take from it."""

    def make() -> Subscriber[Issue]:
        here.journal(Subscribed())
        return Subscriber(state.endpoint, Issue, **here.arguments)

    _all.append(_Subscribing(await opened(make), plan))


async def heard(state: State, publisher: str) -> None:
    """Wait until a subscriber is disconnected from a publisher that is gone."""
    await until(lambda: publisher_of(_all[-1].subscriber) != publisher)


async def finish(state: State, publisher: str, number: int) -> None:
    """Wait for the last publication, or until no other can arrive."""
    last = _all[-1]
    await until(lambda: last.latest == (publisher, number) or last.task.done())


async def settle(state: State) -> None:
    """Wait until all tensors of this round are dropped."""
    for one in _all:
        await one.settle()


async def ended(state: State) -> None:
    """Wait until the taker has been notified of the end of the publisher."""
    last = _all[-1]
    await until(lambda: last.has_ended or last.task.done())


async def close(state: State) -> None:
    """Close the subscriber."""
    await _all[-1].close()


async def stop(state: State) -> None:
    """Close the subscriber, forget those of this round, and wait for the end of their threads and tasks."""
    await close(state)
    _all.clear()
    await until(lambda: not left_running())
