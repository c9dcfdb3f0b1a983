"""A sender, or a client of messages, for the life of an aiohttp application.

::

    SENDER = web.AppKey("sender", TensorSender)
    CLIENT = web.AppKey("client", MessageClient[Answer])

    app = web.Application(middlewares=[problem_middleware()])
    app.cleanup_ctx.append(
        sender_context(SENDER, lambda: TensorSender("unix:///run/engine.tensors", 4, max_wait_s=5))
    )
    app.cleanup_ctx.append(
        client_context(
            CLIENT,
            lambda: MessageClient("ipc:///run/engine.messages", sender=app[SENDER], reply_type=Answer),
        )
    )
    web.run_app(app, handler_cancellation=True)

A handler then has ``request.app[SENDER]``. With `handler_cancellation` aiohttp cancels a handler whose client
hangs up, and all that it holds comes back at once; under gunicorn, whose worker has no such option, give it a
coroutine function that returns ``web.AppRunner(app, handler_cancellation=True)``.
"""

from collections.abc import AsyncIterator, Callable
from typing import TypeAlias, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aiotensor.channel import MessageClient
from aiotensor.errors import AioTensorError
from aiotensor.integrations.problems import MEDIA_TYPE, problem_of
from aiotensor.integrations.serving import serving
from aiotensor.logs import logger_of
from aiotensor.sender import TensorSender

__all__ = ["client_context", "problem_middleware", "sender_context"]

logger = logger_of("integrations")

R = TypeVar("R")

Context: TypeAlias = Callable[[web.Application], AsyncIterator[None]]


def sender_context(
    key: web.AppKey[TensorSender], make: Callable[[], TensorSender], *, drain_s: float = 5.0
) -> Context:
    """Make a context for `cleanup_ctx` that opens a sender for the life of an application.

    Args:
        key: where the application has it.
        make: makes it; called when the application starts, in each worker.
        drain_s: how many seconds the receiver has at the end to take what was sent; then the rest is
            discarded. Keep it below what the server's supervisor allows for a shutdown.
    """

    async def context(app: web.Application) -> AsyncIterator[None]:
        async with serving(make, drain_s) as app[key]:
            yield

    return context


def client_context(key: web.AppKey[MessageClient[R]], make: Callable[[], MessageClient[R]]) -> Context:
    """Make a context for `cleanup_ctx` that opens a client of messages for the life of an application.

    Args:
        key: where the application has it.
        make: makes it; called when the application starts, in each worker, after the contexts before it.
    """

    async def context(app: web.Application) -> AsyncIterator[None]:
        async with make() as app[key]:
            yield

    return context


def problem_middleware(*, retry_after_s: float = 5.0) -> Middleware:
    """Make a middleware that answers errors of this library as problem JSON.

    A wait longer than the sender's `max_wait_s`, a receiver that was lost, and a call of this library that
    found no descriptors or memory left are answered with 503 and ``Retry-After``. A receiver that refuses the
    sender is answered with 500. Other errors are left alone.

    Args:
        retry_after_s: when a client that got a 503 is to try again, in seconds.
    """
    has_warned = False

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal has_warned
        try:
            response = await handler(request)
        except (AioTensorError, OSError) as error:
            problem = problem_of(error, retry_after_s)
            if problem is None or request.writer.output_size:  # another answer is on its way already
                raise
            response = web.Response(
                body=problem.body, status=problem.status, headers=problem.headers, content_type=MEDIA_TYPE
            )
        # The handler of a web socket hears of it where it receives.
        is_socket = isinstance(response, web.WebSocketResponse)
        if request.transport is None and not is_socket and not has_warned:
            has_warned = True
            logger.warning(
                "a client hung up, and its handler went on and kept what it held: run the application with "
                "handler_cancellation=True",
                extra={"event": "handler_not_cancelled"},
            )
        return response

    return middleware
