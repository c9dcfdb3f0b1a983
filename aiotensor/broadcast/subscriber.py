"""Receive the messages of a publisher; the implementation is in `aiotensor.broadcast.subscription`."""

import secrets
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack, overload

from aiotensor.broadcast.subscription import Ended, Subscription
from aiotensor.codec import TensorDecoder
from aiotensor.errors import AioTensorError, again
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import count_or_none, seconds_or_never
from aiotensor.statistics.counters import ErrorCounter, new_counts, snapshot
from aiotensor.transports.endpoints import Endpoint, TcpArguments, route_to
from aiotensor.types import CurveKey, Publication, SubscriberStatistics

__all__ = ["Subscriber", "SubscriberOptions"]

T = TypeVar("T")


class SubscriberOptions(TypedDict, total=False):
    """The keyword arguments of a `Subscriber`."""

    max_mapped_bytes: int | None
    max_wait_s: float | None
    secret_key: CurveKey | None
    server_key: CurveKey | None
    peer_timeout_s: float | None


class Subscriber(LoopObject, Generic[T]):
    """Receive the messages of a publisher, in order.

    Open it with ``async with``, once, and share it between the tasks of that event loop. Opening does not
    wait for the publisher. If the publisher is lost, the next publisher that listens at the address replaces
    it. Until they are received, the publications of the last two connections are kept; those of earlier
    ones are dropped, and counted as missed.

    A received tensor is a view of shared memory; a small tensor has its own memory. A received tensor stays
    valid as long as it or a view of it exists, even after the publisher or this subscriber has ended. Writes
    to it are visible only in this process. The publisher can reuse the memory when all subscribers have freed
    their views.

    Args:
        endpoint: the location of the publisher: an address such as ``unix:///run/user/1000/frames.sock``, or
            the `TensorQueue` or `multiprocessing.Queue` of the publisher.
        type: the type of the messages, as for msgspec, or `torch.Tensor` for bare tensors. A message of
            another type raises `ProtocolError`. By default, messages may have any type.
        max_mapped_bytes: the maximum number of bytes of shared memory that a publisher may have (its
            `arena_bytes`); None for no limit.
        max_wait_s: the time in seconds after which `receive` stops waiting and raises `WouldBlockError`; None
            for never. Iterations wait without limit.
        secret_key: the CURVE secret key of this subscriber, for a ``tcp://`` endpoint on another machine.
        server_key: the CURVE public key of the publisher at a ``tcp://`` endpoint.
        peer_timeout_s: the time in seconds without an answer after which the publisher at a ``tcp://``
            endpoint is lost; None means 2 s, or no limit at a loopback address.

    Raises:
        TypeError: the endpoint or a limit has the wrong type, or msgspec cannot decode the type.
        ValueError: the address is invalid, or a limit is out of range.
    """

    @overload
    def __init__(
        self: "Subscriber[Any]", endpoint: Endpoint, **options: Unpack[SubscriberOptions]
    ) -> None: ...

    @overload
    def __init__(self, endpoint: Endpoint, type: type[T], **options: Unpack[SubscriberOptions]) -> None: ...

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
        self._id = secrets.token_hex(16)
        self.affinity = LoopAffinity("Subscriber")
        self._route = route_to(endpoint, TcpArguments(True, secret_key, server_key, (), peer_timeout_s))
        self._decoder: TensorDecoder[T] = TensorDecoder(type)
        self._max_mapped_bytes = count_or_none("max_mapped_bytes", max_mapped_bytes)
        self._max_wait_s = seconds_or_never("max_wait_s", max_wait_s)
        self._errors = ErrorCounter()
        self._counts = new_counts(SubscriberStatistics)
        self._subscription: Subscription[T] | None = None  # made by `__aenter__`, since it belongs to a loop

    @property
    def id(self) -> str:
        """The id of this subscriber, as the publisher sees it."""
        return self._id

    @property
    def number(self) -> int | None:
        """The number of the publication that was received last; None before the first."""
        return None if self._subscription is None else self._subscription.number

    @property
    def missed(self) -> int:
        """The number of publications that were missed since opening, up to the one received last."""
        return self._counts["missed"]

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            self._subscription = Subscription(
                self._id,
                self._route.connector,
                self._decoder,
                self._max_mapped_bytes,
                self._max_wait_s,
                self._counts,
                self._errors,
            )
            self._subscription.open()
        except BaseException:
            self.affinity.close()
            raise
        self.affinity.settle(self, self._route.label)
        return self

    async def receive(self) -> Publication[T]:
        """Return the next publication, once it has arrived.

        Waits at most `max_wait_s`. Cancellation loses nothing: the next call returns the publication. An
        error of the message type, such as one of its `__post_init__`, is raised as it is; the next call
        returns the next publication.

        Raises:
            PeerLostError: the publisher died, closed, or disconnected this subscriber, and all of its
                publications that have arrived were received. The next call waits for the next publisher.
            RefusedError: the publisher refused this subscriber because of a limit or its version, or exceeds
                `max_mapped_bytes`. The next call connects again.
            WouldBlockError: nothing has arrived within `max_wait_s`. It is an `UnavailableError` if no
                publisher has answered.
            ProtocolError: the message does not have the type of this subscriber. The next call returns the
                next publication.
            AccessDeniedError: the publisher runs as another user.
            UsageError: the process at the address is not a publisher.
            ClosedError: this subscriber was closed, perhaps while waiting.
            OSError: the machine has no memory or no thread left to decode the message. The next call tries
                again.
        """
        try:
            found = await self._opened().receive()
            if isinstance(found, Ended):
                raise again(found.error)
        except Exception as error:
            self._errors.add(error)
            raise
        return found

    def receive_nowait(self) -> Publication[T]:
        """Return the next publication without waiting; it is decoded on this thread.

        Other errors are those of `receive`.

        Raises:
            WouldBlockError: nothing has arrived. It is an `UnavailableError` if no publisher has answered.
        """
        with self._errors:
            subscription = self._opened()
            found = subscription.receive_nowait()
            if found is None:
                raise subscription.next_would_block()
            if isinstance(found, Ended):
                raise again(found.error)
            return found

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Publication[T]:
        """Return the next publication; cancellation loses nothing.

        Ends when the publisher has closed and all of its publications were received, or when this subscriber
        is closed. Iterate again to wait for the next publisher. Waits without a time limit; errors are those
        of `receive`.
        """
        if self.affinity.is_closed:
            raise StopAsyncIteration
        try:
            found = await self._opened().receive(has_limit=False)
            if isinstance(found, Ended):
                if found.is_clean:
                    raise StopAsyncIteration
                raise again(found.error)
        except AioTensorError as error:  # not the end of the iteration
            if self.affinity.is_closed:
                raise StopAsyncIteration from None
            self._errors.add(error)
            raise
        return found

    def statistics(self) -> SubscriberStatistics:
        """Return the current state and the totals since opening; also available after closing."""
        self.affinity.check_place()
        if self._subscription is None:
            return snapshot(
                SubscriberStatistics,
                dict.fromkeys(SubscriberStatistics.__struct_fields__, 0),
                errors=self._errors.counts(),
            )
        return self._subscription.statistics()

    async def aclose(self) -> None:
        """Close the subscriber; waiting calls raise `ClosedError`, and iterations end.

        Received tensors stay valid; the other publications are dropped. Waits until the connection has
        accepted the last answers. Cancellation closes the subscriber immediately. Closing again has no
        effect.
        """
        self.affinity.check_place()
        was_open = self.affinity.close()
        if was_open and self._subscription is not None:
            with self.affinity.leaving():
                await self._subscription.close()

    def _details(self) -> list[str]:
        return [f"at {self._route.label}"]

    def _opened(self) -> Subscription[T]:
        """Return the implementation, after checking that this subscriber is open and belongs to this loop."""
        self.affinity.check()
        if self._subscription is None:
            raise AssertionError("an open subscriber has an implementation")
        return self._subscription
