"""Blocking publishers and subscribers."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import torch

from aiotensor import broadcast
from aiotensor.blocking.portal import BlockingObject, parameters_of
from aiotensor.errors import ClosedError
from aiotensor.transports.endpoints import Endpoint
from aiotensor.types import (
    CurveKey,
    Publication,
    Published,
    PublisherStatistics,
    SubscriberStatistics,
)

__all__ = ["Publisher", "Subscriber"]

T = TypeVar("T")


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


class Subscriber(BlockingObject[broadcast.Subscriber[T], SubscriberStatistics], Generic[T]):
    """Receive publications in threads; open it with ``with``, and share it between the threads.

    Arguments and errors are those of `aiotensor.broadcast.Subscriber`.
    """

    @overload
    def __init__(
        self: "Subscriber[Any]",
        endpoint: Endpoint,
        *,
        max_mapped_bytes: int | None = ...,
        max_wait_s: float | None = ...,
        secret_key: CurveKey | None = ...,
        server_key: CurveKey | None = ...,
        peer_timeout_s: float | None = ...,
    ) -> None: ...

    @overload
    def __init__(
        self,
        endpoint: Endpoint,
        type: type[T],
        *,
        max_mapped_bytes: int | None = ...,
        max_wait_s: float | None = ...,
        secret_key: CurveKey | None = ...,
        server_key: CurveKey | None = ...,
        peer_timeout_s: float | None = ...,
    ) -> None: ...

    def __init__(
        self,
        endpoint: Endpoint,
        type: Any = Any,  # noqa: A002
        *,
        max_mapped_bytes: int | None = 64 << 30,
        max_wait_s: float | None = None,
        secret_key: CurveKey | None = None,
        server_key: CurveKey | None = None,
        peer_timeout_s: float | None = None,
    ) -> None:
        super().__init__(
            broadcast.Subscriber(
                endpoint,
                type,
                max_mapped_bytes=max_mapped_bytes,
                max_wait_s=max_wait_s,
                secret_key=secret_key,
                server_key=server_key,
                peer_timeout_s=peer_timeout_s,
            )
        )

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

    def receive(self, *, timeout: float | None = None) -> Publication[T]:
        """Return the next publication, once it has arrived.

        After a timeout, no publication is lost. With a timeout of 0, the call does not wait.
        """
        return self.wait_for(self.inner.receive, timeout=timeout)

    def receive_nowait(self) -> Publication[T]:
        """Return the next publication if it has arrived, or raise `WouldBlockError`."""
        return self.call(self.inner.receive_nowait)

    def __iter__(self) -> Iterator[Publication[T]]:
        """Iterate over the publications.

        The iteration ends when the publisher has closed and all its publications were received, or when this
        subscriber is closed. Iterate again to wait for the next publisher.
        """
        while True:
            try:
                publication = self.wait_for(self._next_or_none)
            except ClosedError:
                return
            if publication is None:
                return
            yield publication

    async def _next_or_none(self) -> Publication[T] | None:
        return await anext(self.inner, None)
