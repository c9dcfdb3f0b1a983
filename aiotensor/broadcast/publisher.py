"""Publish messages to subscribers; the implementation is in `aiotensor.broadcast.publishing`."""

import secrets
from collections.abc import Collection, Sequence
from typing import Self, get_args

import torch

from aiotensor.broadcast.publishing import Publishing
from aiotensor.broadcast.settings import PublisherSettings
from aiotensor.errors import ClosedError
from aiotensor.protocol.audience import SlowPolicy
from aiotensor.protocol.frames import MAX_RECORD_BYTES, Subscribe
from aiotensor.receiving.intake import Intake
from aiotensor.runtime import arguments, tracing
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import count_or_none, seconds_or_never
from aiotensor.statistics.counters import ErrorCounter, WaitCounter, new_counts, snapshot
from aiotensor.transports.base import Listener
from aiotensor.transports.endpoints import Endpoint, TcpArguments, route_to
from aiotensor.types import CurveKey, Published, PublisherStatistics

__all__ = ["Publisher"]


class Publisher(LoopObject):
    """Publish messages to the subscribers that connect to an endpoint.

    Open it with ``async with``, once, and share it between the tasks of that event loop. Subscribers may
    start before it opens, or at any time later. Each tensor is placed in shared memory once, and all
    subscribers read it there. The memory is free again when all of them have freed the tensor.

    A subscriber receives, in order, the publications since it connected, each with the number of publications
    missed before it. A subscriber that is `max_behind` publications behind is slow, and `slow` decides what
    happens:

    - ``"wait"``: publishing waits until the subscriber has taken a publication, in the order of the calls.
    - ``"drop"``: the subscriber loses its oldest publication in favor of the new one.
    - ``"disconnect"``: the subscriber is disconnected, and receives the reason. It may connect again.

    Opening at an address waits while another process holds the lock of the socket's folder; cancellation has
    no side effects. Opening raises `UsageError` if another object listens there, and an `OSError` that names
    the folder if the folder cannot be used, as `TensorReceiver` does.

    Args:
        endpoint: the location of the publisher: an address such as ``unix:///run/user/1000/frames.sock``, to
            which only processes of this user may connect, or a `TensorQueue` or `multiprocessing.Queue`.
        arena_bytes: the maximum number of bytes of shared memory in use at once. Memory is in use as long as
            a tensor in it exists in any process, and as long as it belongs to the history or to a publication
            that was not taken.
        max_behind: the maximum number of publications that a subscriber may be behind.
        slow: the policy for slow subscribers.
        max_held_bytes: the maximum number of bytes of shared memory that one subscriber may use. A subscriber
            receives no publication that would exceed it, and so falls behind. None for no limit.
        history: the number of recent publications to keep for subscribers that connect later, less than
            `max_behind`. Fewer are kept while calls need their memory.
        max_subscribers: the maximum number of connected subscribers; None for no limit.
        keep_warm_s: the time in seconds after which unused shared memory is returned to the system; None
            keeps it.
        long_wait_s: the time in seconds after which a wait for slow subscribers or for memory is logged,
            once, with the slowest subscribers; None for never.
        max_wait_s: the time in seconds after which a wait for slow subscribers and earlier calls, for memory,
            or for subscribers to connect ends with `WouldBlockError`; it applies to each wait separately.
            None for never.
        secret_key: the CURVE secret key of this publisher, for a ``tcp://`` endpoint that other machines can
            reach.
        client_keys: the CURVE public keys of the subscribers and inspectors that may connect to a ``tcp://``
            endpoint.
        peer_timeout_s: the time in seconds without an answer after which a subscriber at a ``tcp://``
            endpoint is lost; None means 2 s, or no limit at a loopback address.

    Raises:
        TypeError: the endpoint or a limit has the wrong type.
        ValueError: the address is invalid, a limit is out of range, or two limits contradict each other.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        arena_bytes: int = 1 << 30,
        max_behind: int = 8,
        slow: SlowPolicy = "wait",
        max_held_bytes: int | None = None,
        history: int = 0,
        max_subscribers: int | None = 64,
        keep_warm_s: float | None = 30.0,
        long_wait_s: float | None = 10.0,
        max_wait_s: float | None = None,
        secret_key: CurveKey | None = None,
        client_keys: Collection[CurveKey] = (),
        peer_timeout_s: float | None = None,
    ) -> None:
        self._id = secrets.token_hex(16)
        self.affinity = LoopAffinity("Publisher")
        self._route = route_to(endpoint, TcpArguments(False, secret_key, None, client_keys, peer_timeout_s))
        self._settings = PublisherSettings(
            arguments.count("arena_bytes", arena_bytes),
            arguments.count("max_behind", max_behind),
            slow,
            count_or_none("max_held_bytes", max_held_bytes),
            arguments.count("history", history, 0),
            count_or_none("max_subscribers", max_subscribers),
            seconds_or_never("keep_warm_s", keep_warm_s),
            seconds_or_never("long_wait_s", long_wait_s),
            seconds_or_never("max_wait_s", max_wait_s),
        )
        _check(self._settings)
        self._errors = ErrorCounter()
        self._counts = new_counts(PublisherStatistics)
        self._publishing: Publishing | None = None  # made by `__aenter__`, since it belongs to a loop
        self._intake: Intake[Subscribe] | None = None
        self._listener: Listener | None = None

    @property
    def id(self) -> str:
        """The id of this publisher, as its subscribers see it."""
        return self._id

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            publishing = Publishing(self._id, self._settings, self._counts, self._errors)
            self._publishing = publishing
            self._intake = Intake(self._id, MAX_RECORD_BYTES, publishing.subscribers)
            try:
                self._listener = await self._route.listen(self._intake, MAX_RECORD_BYTES)
            except BaseException:
                await publishing.close()
                raise
            if self.affinity.is_closed:  # by another task, during the wait
                await self._close()
                raise ClosedError("this Publisher was closed")
        except BaseException:
            self.affinity.close()
            raise
        self.affinity.settle(self, self._route.label)
        return self

    async def publish(self, message: object) -> Published:
        """Publish a message to all connected subscribers, and return its number and delivery counts.

        Args:
            message: a tensor, None, bytes, a msgspec Struct, a dataclass, a list or a dict, nested to any
                depth, with tensors, arrays and objects with ``__dlpack__`` anywhere in it. It must not change
                until the call returns. A tensor from `allocate`, or a contiguous or permuted view of
                it, is not copied unless an earlier publication of it is in use.

        Waits for slow subscribers (with ``slow="wait"``) and for earlier calls in their order, for memory,
        and for the copies. It does not wait until subscribers connect or take the message; use
        `wait_for_subscribers` and `drain` for that. A cancelled call publishes nothing and releases its
        memory.

        Raises:
            TypeError: a value in the message cannot be encoded.
            UnsupportedTensorError: a tensor cannot be sent unchanged.
            TooLargeError: the message needs more memory than `arena_bytes` or `max_held_bytes` allows.
            WouldBlockError: a wait exceeded `max_wait_s`, or would never end, because tensors from `allocate`
                that are not published hold the memory.
            ClosedError: this publisher was closed, perhaps while waiting.
            OSError: the machine has no shared memory, threads or descriptors left.
        """
        span: tracing.Span | None = None
        try:
            publishing = self._checked()
            if (tracer := tracing.tracer) is not None:
                span = tracer.begin("publish", self._route.label)
            published = await publishing.publish(message)
        except BaseException as error:
            self._errors.add(error)
            if span is not None:
                span.end(error)
            raise
        if span is not None:
            span.end(name=str(published.number))
        return published

    def publish_nowait(self, message: object) -> Published:
        """Publish a message without waiting; it is encoded and copied on this thread.

        Arguments and other errors are those of `publish`.

        Raises:
            WouldBlockError: a subscriber is slow, another call is publishing or waiting, or too little memory
                is free.
        """
        span: tracing.Span | None = None
        try:
            publishing = self._checked()
            if (tracer := tracing.tracer) is not None:
                span = tracer.begin("publish", self._route.label)
            published = publishing.publish_nowait(message)
        except BaseException as error:
            self._errors.add(error)
            if span is not None:
                span.end(error)
            raise
        if span is not None:
            span.end(name=str(published.number))
        return published

    async def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory, which is published without a copy.

        Write to the tensor before you publish it, because subscribers read the same memory afterwards. Its
        memory is in use as long as the tensor, a view of it, or a received tensor exists.

        Args:
            shape: the sizes of the dimensions, in elements.
            dtype: the type of the elements.

        Waits for shared memory, in the order of the calls; cancellation releases it.

        Raises:
            TypeError: the dtype is not a torch dtype.
            UnsupportedTensorError: a tensor of this dtype cannot be sent.
            ValueError: a size is negative.
            TooLargeError: the tensor would be larger than `arena_bytes`, or it is empty and its other sizes
                are too large to address.
            WouldBlockError: the call waited for longer than `max_wait_s`.
            ClosedError: this publisher was closed, perhaps while waiting.
            OSError: the machine has no shared memory or descriptors left.
        """
        with self._errors:
            return await self._checked().allocate(shape, dtype)

    async def wait_for_subscribers(self, count: int) -> None:
        """Wait until at least `count` subscribers are connected at the same time.

        Cancellation has no side effects.

        Raises:
            ValueError: the count is not positive, or exceeds `max_subscribers`.
            WouldBlockError: fewer subscribers are connected after `max_wait_s`.
            ClosedError: this publisher was closed, perhaps while waiting.
        """
        with self._errors:
            publishing = self._checked()
            limit = self._settings.max_subscribers
            number = arguments.count("count", count)
            if limit is not None and number > limit:
                raise ValueError(f"count must be at most max_subscribers={limit}, got {number}")
            await publishing.wait_for_subscribers(number)

    async def drain(self) -> None:
        """Wait until every subscriber has taken or lost all earlier messages, or is gone.

        Cancellation has no side effects.

        Raises:
            ClosedError: this publisher was closed, perhaps while waiting.
        """
        with self._errors:
            await self._checked().drain()

    def statistics(self) -> PublisherStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        if self._publishing is not None:
            return self._publishing.statistics()
        waits = WaitCounter().waits()
        settings = self._settings
        return snapshot(
            PublisherStatistics,
            dict.fromkeys(PublisherStatistics.__struct_fields__, 0),
            max_subscribers=settings.max_subscribers,
            lags=(),
            max_behind=settings.max_behind,
            longest_wait_s=0.0,
            arena_bytes=settings.max_bytes,
            largest_free_bytes=settings.max_bytes,
            subscriber_waits=waits,
            memory_waits=waits,
            errors=self._errors.counts(),
        )

    async def aclose(self) -> None:
        """Close the publisher; subscribers receive all publications, and waiting calls raise `ClosedError`.

        Waits until running copies have stopped and the connections have accepted all publications, but at
        most a second for a subscriber that does not read. It does not wait until subscribers take them; for
        that, call `drain` first. Cancellation closes the publisher immediately. Closing again has no effect.
        """
        self.affinity.check_place()
        was_open = self.affinity.close()
        if was_open and self._listener is not None:
            with self.affinity.leaving():
                await self._close()

    async def _close(self) -> None:
        if self._listener is None or self._intake is None or self._publishing is None:
            raise AssertionError("an open publisher has a listener")
        self._listener.close()
        self._publishing.end_calls()
        try:
            await self._intake.close()
        finally:
            await self._publishing.close()

    def _details(self) -> list[str]:
        details = [f"at {self._route.label}"]
        if self._publishing is not None and self.affinity.is_open:
            details.append(f"{len(self._publishing.subscribers.connected)} subscribers connected")
        return details

    def _checked(self) -> Publishing:
        """Return the implementation, after checking that this publisher is open and belongs to this loop."""
        self.affinity.check()
        if self._publishing is None:
            raise AssertionError("an open publisher has an implementation")
        return self._publishing


def _check(settings: PublisherSettings) -> None:
    if settings.slow not in get_args(SlowPolicy):
        raise ValueError(f'slow must be "wait", "drop" or "disconnect", got {settings.slow!r}')
    if settings.history >= settings.max_behind:
        raise ValueError(
            f"history must be less than max_behind={settings.max_behind}, got {settings.history}: a new "
            "subscriber starts that many publications behind; raise max_behind"
        )
    held = settings.max_held_bytes
    if held is not None and held > settings.max_bytes:
        raise ValueError(
            f"max_held_bytes must be at most arena_bytes={settings.max_bytes}, got {held}: a subscriber "
            "cannot use more; lower it, or raise arena_bytes"
        )
