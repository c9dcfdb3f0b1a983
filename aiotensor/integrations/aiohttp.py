"""Open a message client, or a sender, for the lifetime of an aiohttp application.

::

    CLIENT = web.AppKey("client", MessageClient[Answer])

    def make_client() -> MessageClient[Answer]:
        return MessageClient("unix:///run/engine.sock", Answer, max_concurrent_videos=4, max_wait_s=5)

    app = web.Application(middlewares=[problem_middleware()])
    app.cleanup_ctx.append(client_context(CLIENT, make_client))
    web.run_app(app, handler_cancellation=True)

A handler then uses ``request.app[CLIENT]``, and acquires a permit with ``request.app[CLIENT].permit()``. With
`handler_cancellation`, aiohttp cancels a handler whose client disconnects, so that its permit and memory are
released at once. The gunicorn worker of aiohttp has no such option: pass it a coroutine function that returns
``web.AppRunner(app, handler_cancellation=True)``.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeAlias, TypeVar

from aiotensor.integrations import not_installed

try:
    from aiohttp import web
    from aiohttp.typedefs import Handler, Middleware
except ModuleNotFoundError as error:
    raise not_installed(error, __name__) from None

from aiotensor.channel import MessageClient
from aiotensor.errors import AioTensorError
from aiotensor.integrations.web import (
    MEDIA_TYPE,
    MIN_UPLOAD_RATE,
    UPLOAD_GRACE_S,
    SlowUploadError,
    UploadLimits,
    UploadWatch,
    problem_of,
    serving,
)
from aiotensor.runtime.logs import logger_of
from aiotensor.sender import TensorSender

__all__ = ["client_context", "problem_middleware", "sender_context"]

logger = logger_of("integrations")

R = TypeVar("R")
T = TypeVar("T")

Context: TypeAlias = Callable[[web.Application], AsyncIterator[None]]


def client_context(key: web.AppKey[MessageClient[R]], make: Callable[[], MessageClient[R]]) -> Context:
    """Return a context for `cleanup_ctx` that opens a message client for the lifetime of an application.

    Args:
        key: the key under which the application stores the client.
        make: a function that creates the client, called in each worker when the application starts. For
            several engines, the client has several addresses.
    """
    return _context(key, make)


def sender_context(
    key: web.AppKey[TensorSender], make: Callable[[], TensorSender], *, drain_s: float = 5.0
) -> Context:
    """Return a context for `cleanup_ctx` that opens a sender for the lifetime of an application.

    Args:
        key: the key under which the application stores the sender.
        make: a function that creates the sender, called in each worker when the application starts.
        drain_s: the time in seconds that the receiver has at shutdown to take the messages that were sent;
            the rest is discarded. Keep it below the shutdown timeout of the server's supervisor.
    """
    return _context(key, partial(serving, make, drain_s))


def _context(key: web.AppKey[T], make: Callable[[], AbstractAsyncContextManager[T]]) -> Context:
    async def context(app: web.Application) -> AsyncIterator[None]:
        async with make() as app[key]:
            yield

    return context


def problem_middleware(
    *,
    retry_after_s: float = 5.0,
    min_upload_rate: float | None = MIN_UPLOAD_RATE,
    upload_grace_s: float = UPLOAD_GRACE_S,
) -> Middleware:
    """Return a middleware that turns errors of this library into problem JSON, and limits uploads.

    The status is 503 with ``Retry-After`` after a wait longer than `max_wait_s`, or if the engine was lost.
    It is 500 if the engine refuses the client or runs as another user, or if the keys do not match, 502 if
    the engine could not answer the request, and 413 if a message is too large. Errors of the application
    propagate.

    The limits apply to every request that passes through the middleware. To limit only the requests that use
    the engine, add the middleware to a subapplication.

    Args:
        retry_after_s: the time in seconds after which a client should retry a request answered with 503.
        min_upload_rate: the minimum rate, in bytes per second, at which a client must send a body while
            aiohttp reads it; None for no limit. The handler of a slower request is cancelled, and the request
            is answered with 408.
        upload_grace_s: the longest allowed stall of an upload, in seconds.

    Raises:
        ValueError: a limit is not positive.
    """
    limits = UploadLimits(min_upload_rate, upload_grace_s)
    has_warned = False

    def answer(request: web.Request, error: AioTensorError | SlowUploadError) -> web.Response:
        """Return the response to an error, or raise it if there is none."""
        # If another response has begun, aiohttp logs the error, and closes the connection.
        problem = None if request.writer.output_size else problem_of(error, retry_after_s)
        if problem is None:
            raise error
        return web.Response(
            body=problem.body, status=problem.status, headers=problem.headers, content_type=MEDIA_TYPE
        )

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal has_warned
        timeout = asyncio.timeout(None)
        slow: list[SlowUploadError] = []

        def too_slow(error: SlowUploadError) -> None:
            slow.append(error)
            timeout.reschedule(asyncio.get_running_loop().time())

        response: web.StreamResponse
        upload = UploadWatch(limits, partial(_look, request), too_slow)
        upload.begin()
        try:
            async with timeout:
                response = await handler(request)
        except TimeoutError:
            if not timeout.expired():
                raise  # an error of the application
            response = answer(request, slow.pop())
            response.force_close()  # the rest of the body is not read
        except AioTensorError as error:
            response = answer(request, error)
        finally:
            upload.end()
        # The handler of a web socket is notified of a disconnect when it receives.
        is_socket = isinstance(response, web.WebSocketResponse)
        if request.transport is None and not is_socket and not has_warned:
            has_warned = True
            logger.warning(
                "a client disconnected, but its handler continued and kept its resources: run the "
                "application with handler_cancellation=True",
                extra={"event": "handler_not_cancelled"},
            )
        return response

    return middleware


def _look(request: web.Request) -> tuple[int, bool] | None:
    """Return the received bytes of an upload, and whether aiohttp waits for more; None at its end.

    aiohttp does not report when a handler waits for the body. It pauses reading while the handler has not
    read the data that arrived, and that time does not count.
    """
    transport, content = request.transport, request.content
    if transport is None or content.is_eof():
        return None
    return content.total_raw_bytes, transport.is_reading()  # counted before decompression
