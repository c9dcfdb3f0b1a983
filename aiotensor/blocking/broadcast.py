"""Blocking publishers and subscribers."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic

import torch

from aiotensor import broadcast
from aiotensor.blocking.portal import BlockingObject, UntilClosed, parameters_of
from aiotensor.types import M, Publication, Published, PublisherStatistics, SubscriberStatistics


class Publisher(BlockingObject[broadcast.Publisher, PublisherStatistics]):
    """Publish messages from threads; open it with ``with``, and share it between the threads.

    Arguments and errors are those of `aiotensor.broadcast.Publisher`.
    """

    @parameters_of(broadcast.Publisher)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(broadcast.Publisher(*args, **kwargs))

    @property
    def id(self) -> str:
        """The id of this publisher, as its subscribers see it."""
        return self.inner.id

    def publish(self, message: object, *, timeout: float | None = None) -> Published:
        """Publish a message to all connected subscribers, and return its number and delivery counts.

        Waits as `aiotensor.broadcast.Publisher.publish` does. After a timeout, nothing has been published.
        """
        return self.wait_for(self.inner.publish, message, timeout=timeout)

    def publish_nowait(self, message: object) -> Published:
        """Publish a message without waiting; the copy runs in the thread of the event loop."""
        return self.call(self.inner.publish_nowait, message)

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, timeout: float | None = None
    ) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory, which is published without a copy.

        Waits for shared memory.
        """
        return self.wait_for(self.inner.allocate, shape, dtype, timeout=timeout)

    def wait_for_subscribers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until at least `count` subscribers are connected at the same time."""
        self.wait_for(self.inner.wait_for_subscribers, count, timeout=timeout)

    def drain(self, *, timeout: float | None = None) -> None:
        """Wait until every subscriber has taken or lost all earlier messages, or is gone."""
        self.wait_for(self.inner.drain, timeout=timeout)


class Subscriber(BlockingObject[broadcast.Subscriber[M], SubscriberStatistics], Generic[M]):
    """Receive publications in threads; open it with ``with``, and share it between the threads.

    Arguments and errors are those of `aiotensor.broadcast.Subscriber`.
    """

    @parameters_of(broadcast.Subscriber[M])
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(broadcast.Subscriber(*args, **kwargs))

    @property
    def id(self) -> str:
        """The id of this subscriber, as the publisher sees it."""
        return self.inner.id

    @property
    def number(self) -> int | None:
        """The number of the last publication that was received; None before the first."""
        return self.inner.number

    @property
    def missed(self) -> int:
        """The number of publications missed since opening, before the last received publication."""
        return self.inner.missed

    def receive(self, *, timeout: float | None = None) -> Publication[M]:
        """Return the next publication, once it has arrived.

        After a timeout, no publication is lost. With a timeout of 0, the call does not wait.
        """
        return self.take(None, self.inner.receive, timeout=timeout)

    def receive_nowait(self) -> Publication[M]:
        """Return the next publication if it has arrived, or raise `WouldBlockError`."""
        return self.take_now(None, self.inner.receive_nowait)

    def __iter__(self) -> Iterator[Publication[M]]:
        """Iterate over the publications.

        The iteration ends when the publisher has closed and all its publications were received, or when this
        subscriber is closed. Iterate again to wait for the next publisher.
        """
        return UntilClosed(lambda: self.take(None, self._next, self.inner))
