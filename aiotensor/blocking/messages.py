"""Blocking clients and servers of messages."""

import asyncio
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

import torch

import aiotensor
from aiotensor import channel
from aiotensor.blocking.portal import BlockingObject, UntilClosed
from aiotensor.blocking.requests import Request
from aiotensor.blocking.tensors import OpenMessage, TensorReceiver, TensorSender
from aiotensor.channel.batches import checked_results
from aiotensor.channel.request import fail_batch
from aiotensor.channel.server import take_ready
from aiotensor.errors import ClosedError
from aiotensor.runtime import tracing
from aiotensor.runtime.arguments import instances
from aiotensor.types import ClientStatistics, CurveKey, ServerStatistics

__all__ = ["MessageClient", "MessageServer", "Permit"]

M = TypeVar("M")
R = TypeVar("R")


class MessageClient(BlockingObject[channel.MessageClient[R], ClientStatistics], Generic[R]):
    """Send messages with tensors to a server; open it with ``with``, and share it between threads.

    Arguments and errors are those of `aiotensor.channel.MessageClient`, but `sender` and `receiver` are
    objects of `aiotensor.blocking`.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        sender: TensorSender | Sequence[TensorSender] | None = None,
        receiver: TensorReceiver | None = None,
        reply_type: type[R],
        high_water_mark: int = 16,
        max_part_bytes: int | None = 1 << 30,
        max_body_bytes: int | None = 1 << 20,
        heartbeat_interval_s: float | None = None,
        heartbeat_timeout_s: float | None = None,
        secret_key: CurveKey | None = None,
        server_key: CurveKey | None = None,
        max_wait_s: float | None = None,
        grace_s: float | None = None,
        linger_s: float = 1.0,
    ) -> None:
        super().__init__(
            channel.MessageClient(
                address,
                sender=_inner_senders(sender),
                receiver=_inner_receiver(receiver),
                reply_type=reply_type,
                high_water_mark=high_water_mark,
                max_part_bytes=max_part_bytes,
                max_body_bytes=max_body_bytes,
                heartbeat_interval_s=heartbeat_interval_s,
                heartbeat_timeout_s=heartbeat_timeout_s,
                secret_key=secret_key,
                server_key=server_key,
                max_wait_s=max_wait_s,
                grace_s=grace_s,
                linger_s=linger_s,
            )
        )
        if sender is None or isinstance(sender, TensorSender):
            sender = () if sender is None else (sender,)
        self._senders = tuple(sender)
        self._receiver = receiver  # otherwise, the garbage collector could close it

    @property
    def senders(self) -> tuple[TensorSender, ...]:
        """The senders, in the order of the servers; empty if this client has none."""
        return self._senders

    def permit(self, *, timeout: float | None = None) -> "Permit":
        """Return a permit for one request: ``with client.permit() as permit``.

        Entering the permit waits for it, at most `timeout` seconds.
        """
        return Permit(self, self.call(self.inner.permit), timeout)

    def ready(self, *, timeout: float | None = None) -> None:
        """Wait until a server has accepted this client and, with a `sender`, a permit is free."""
        self.wait_for(self.inner.ready, timeout=timeout)

    def request(
        self,
        message: object,
        *,
        target: int | None = None,
        inside: "OpenMessage | Permit | None" = None,
        idempotent: bool = False,
        timeout: float | None = None,
    ) -> R:
        """Send a message, and return the answer to it.

        Arguments, waiting and errors are those of `aiotensor.channel.MessageClient.request`, but `inside` is
        a blocking permit or message. A timeout cancels the request.
        """
        block = None if inside is None else inside.inner
        return self.wait_for(
            self.inner.request,
            message,
            target=target,
            inside=block,
            idempotent=idempotent,
            timeout=timeout,
        )

    def send(
        self,
        message: object,
        *,
        target: int | None = None,
        inside: "OpenMessage | Permit | None" = None,
        timeout: float | None = None,
    ) -> None:
        """Send a message without requesting an answer.

        Arguments, waiting and errors are those of `request`, except for the answer. After a timeout, the
        message is discarded unless it was sent.
        """
        block = None if inside is None else inside.inner
        self.wait_for(self.inner.send, message, target=target, inside=block, timeout=timeout)


class Permit:
    """A permit for one request, made by `MessageClient.permit`.

    Use it as ``with client.permit() as permit``; waiting and errors are those of `aiotensor.channel.Permit`.
    """

    def __init__(self, client: MessageClient[Any], inner: channel.Permit, timeout: float | None) -> None:
        self._client = client
        self.inner = inner
        self._timeout = timeout
        self._is_acquired = False

    def __repr__(self) -> str:
        return f"<aiotensor.blocking.{repr(self.inner)[1:]}"

    def __enter__(self) -> Self:
        try:
            self._client.wait_for(self.inner.__aenter__, timeout=self._timeout)
        except BaseException as error:
            if (
                not self._is_acquired
            ):  # a signal may have interrupted this thread after the permit was granted
                self.__exit__(type(error), error, error.__traceback__)
            raise
        self._is_acquired = True
        return self

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, timeout: float | None = None
    ) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory for the request, which is sent without a copy."""
        return self._client.wait_for(self.inner.allocate, shape, dtype, timeout=timeout)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client.inner.affinity.is_left_in_child(error):
            return
        try:
            self._client.wait_for(self.inner.__aexit__, kind, error, trace)
        except ClosedError:
            if kind is None:
                raise


class MessageServer(BlockingObject[channel.MessageServer[M], ServerStatistics], Generic[M]):
    """Receive messages with tensors, and answer them in any order.

    Open it with ``with``, and iterate over it in any number of threads. Arguments and errors are those of
    `aiotensor.channel.MessageServer`, but `sender` and `receiver` are objects of `aiotensor.blocking`.
    """

    def __init__(
        self,
        address: str,
        message_type: type[M],
        *,
        receiver: TensorReceiver | None = None,
        sender: TensorSender | Sequence[TensorSender] = (),
        max_clients: int | None = 64,
        max_waiting: int = 64,
        max_waiting_bytes: int = 64 << 20,
        high_water_mark: int = 16,
        max_part_bytes: int | None = 1 << 30,
        max_body_bytes: int | None = 1 << 20,
        heartbeat_interval_s: float | None = None,
        heartbeat_timeout_s: float | None = None,
        secret_key: CurveKey | None = None,
        client_keys: Collection[CurveKey] = (),
        linger_s: float = 1.0,
    ) -> None:
        super().__init__(
            channel.MessageServer(
                address,
                message_type,
                receiver=_inner_receiver(receiver),
                sender=_inner_senders(sender) or (),
                max_clients=max_clients,
                max_waiting=max_waiting,
                max_waiting_bytes=max_waiting_bytes,
                high_water_mark=high_water_mark,
                max_part_bytes=max_part_bytes,
                max_body_bytes=max_body_bytes,
                heartbeat_interval_s=heartbeat_interval_s,
                heartbeat_timeout_s=heartbeat_timeout_s,
                secret_key=secret_key,
                client_keys=client_keys,
                linger_s=linger_s,
            )
        )
        self._kept = sender, receiver  # otherwise, the garbage collector could close them

    @property
    def address(self) -> str:
        """The address to which clients connect, with the actual port if 0 was given."""
        return self.inner.address

    def __iter__(self) -> Iterator[Request[M]]:
        """Iterate over the requests whose tensors have arrived, until this server is closed."""
        return UntilClosed(self.next)

    def next(self, *, timeout: float | None = None) -> Request[M]:
        """Return the next request whose tensors have arrived.

        After a timeout, no request is lost. With a timeout of 0, the call does not wait for a request.

        Raises:
            TimeoutError: no request arrived within `timeout` seconds.
            ClosedError: this server was closed.
        """
        return self.take(None, self._take, timeout)

    def arrived(self, *, timeout: float | None = None) -> None:
        """Wait until a request has arrived with its tensors, without taking it."""
        self.wait_for(self.inner.arrived, timeout=timeout)

    async def _take(self, timeout: float | None) -> Request[M]:
        """Wait for a request until the timeout; decoding a request that has arrived may take longer."""
        try:
            async with asyncio.timeout(timeout):
                return Request(self, await self._next(self.inner))
        except TimeoutError:
            request = await take_ready(self.inner)
            if request is None:
                raise
            return Request(self, request)

    def batches(self, max_batch: int, *, batch_wait_s: float = 0.0) -> Iterator[list[Request[M]]]:
        """Iterate over batches of requests, until this server is closed.

        Arguments and errors are those of `aiotensor.channel.MessageServer.batches`.
        """
        batches = self.inner.batches(max_batch, batch_wait_s=batch_wait_s)

        async def next_batch() -> list[Request[M]]:
            return [Request(self, request) for request in await self._next(batches)]

        return UntilClosed(lambda: self.take(batches, next_batch))

    @overload
    def serve(self, handler: Callable[[M], object]) -> None: ...

    @overload
    def serve(
        self, handler: Callable[[list[M]], Sequence[object]], *, max_batch: int, batch_wait_s: float = 0.0
    ) -> None: ...

    def serve(
        self,
        handler: Callable[[Any], Any],
        *,
        max_batch: int | None = None,
        batch_wait_s: float = 0.0,
    ) -> None:
        """Answer every message with the result of a function, called in this thread.

        Returns when this server is closed. An `Exception` in the function reaches the client as
        `RemoteError`, and is logged. Other exceptions, such as `SystemExit`, propagate, and the client gets
        `PeerLostError`.

        With `max_batch`, the function is called with a list of messages, and returns a sequence with a result
        for each of them; see `aiotensor.channel.MessageServer.serve`.

        Args:
            handler: called with each message, or with each list of messages; returns the answer, or a
                sequence of answers.
            max_batch: the maximum number of messages in a batch; None for single messages.
            batch_wait_s: the time in seconds for which the first message of a batch may wait for others.
        """
        if inspect.iscoroutinefunction(handler):
            raise TypeError(
                f"the handler {handler!r:.64} is a coroutine function: use an aiotensor.channel.MessageServer"
            )
        if max_batch is None:
            for request in self:
                with request:
                    request.reply(handler(request.message))
        else:
            for batch in self.batches(max_batch, batch_wait_s=batch_wait_s):
                self._answer_batch(handler, batch)

    def _answer_batch(self, handler: Callable[[list[M]], Sequence[object]], batch: list[Request[M]]) -> None:
        span: tracing.Span | None = None
        if (tracer := tracing.tracer) is not None:
            span = tracer.answer_batch([request.trace_context for request in batch])
        try:
            results = checked_results(handler([request.message for request in batch]), len(batch))
        except BaseException as error:
            if span is not None:
                span.end(error)
            inner = [request.inner for request in batch]
            try:
                self.call(fail_batch, inner, error)
            except ClosedError:
                fail_batch(inner, error)  # no client waits for an answer
            if not isinstance(error, Exception):
                raise
            return
        if span is not None:
            span.end()
        for request, result in zip(batch, results, strict=True):
            with request:
                if isinstance(result, Exception):
                    request.fail(result)
                else:
                    request.reply(result)


def _inner_senders(
    sender: TensorSender | Sequence[TensorSender] | None,
) -> list[aiotensor.TensorSender] | None:
    if sender is None:
        return None
    return [one.inner for one in instances("sender", sender, TensorSender, "aiotensor.blocking.TensorSender")]


def _inner_receiver(receiver: TensorReceiver | None) -> aiotensor.TensorReceiver | None:
    if receiver is None:
        return None
    [found] = instances("receiver", receiver, TensorReceiver, "aiotensor.blocking.TensorReceiver")
    return found.inner
