"""Open a message client, or a sender, for the lifetime of a FastAPI or Starlette application.

::

    def make_client() -> MessageClient[Answer]:  # called in each worker
        return MessageClient("unix:///run/engine.sock", Answer, max_concurrent_videos=4, max_wait_s=5)

    engine = MessageLifespan(make_client)
    app = FastAPI(lifespan=engine.lifespan)
    engine.install(app)

    @app.post("/videos")
    async def post_video(
        request: Request,
        client: Annotated[MessageClient[Answer], Depends(engine.client)],
        permit: Annotated[Permit, Depends(engine.permit, scope="function")],
    ) -> ...:
        frames = await decode(request)
        answer = await client.request(Video(frames), inside=permit)

Each worker of a server has its own client, so ``--workers 4`` multiplies the permits and the memory by four.
In Starlette without FastAPI, a handler calls ``await engine.client(request)``.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

from aiotensor.integrations import not_installed

try:
    from starlette.applications import Starlette
    from starlette.exceptions import WebSocketException
    from starlette.requests import HTTPConnection
    from starlette.responses import Response
    from starlette.status import WS_1011_INTERNAL_ERROR, WS_1013_TRY_AGAIN_LATER
    from starlette.websockets import WebSocket, WebSocketState
except ModuleNotFoundError as error:
    raise not_installed(error, __name__) from None

from aiotensor.channel import MessageClient, Permit
from aiotensor.errors import AioTensorError, UsageError
from aiotensor.integrations.watching import WatchRequests, watch
from aiotensor.integrations.web import (
    ANSWERED_ERRORS,
    MEDIA_TYPE,
    MIN_UPLOAD_RATE,
    UPLOAD_GRACE_S,
    UploadLimits,
    problem_of,
    serving,
)
from aiotensor.sender import OpenMessage, TensorSender

__all__ = ["MessageLifespan", "TensorLifespan"]

R = TypeVar("R")
T = TypeVar("T")


class _Lifespan(Generic[T]):
    """The object that an application uses while it runs, its error responses, and the limits on its requests.

    Args:
        make: returns the object, which is opened when the application starts.
        retry_after_s: the time in seconds after which a client should retry a request answered with 503.
        limits: the limits on uploads of requests that use the object.
    """

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[T]], retry_after_s: float, limits: UploadLimits
    ) -> None:
        self._make = make
        self._retry_after_s = retry_after_s
        self._limits = limits
        self._opened: T | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'not running' if self._opened is None else self._opened}>"

    def install(self, app: Starlette) -> None:
        """Add the error responses and the cancellation of requests to an application."""
        app.add_middleware(WatchRequests)
        for error in ANSWERED_ERRORS:
            app.add_exception_handler(error, self.answer_error)

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Open the sender or client while an application runs.

        Pass this method to the application, or enter it in a lifespan of your own:
        ``async with engine.lifespan(app): ... yield``.

        Raises:
            UsageError: another application is using this object: create one for each application.
        """
        if self._opened is not None:
            raise UsageError("this lifespan has already begun: create one for each application")
        async with self._make() as self._opened:
            try:
                yield
            finally:
                self._opened = None

    async def answer_error(self, connection: HTTPConnection, error: Exception) -> Response:
        """Return the problem JSON response for an error of this library; `install` registers this method.

        Raises:
            WebSocketException: the error belongs to an accepted web socket, which is closed with the reason.
            Exception: `error` itself, if it is an error of the application.
        """
        problem = problem_of(error, self._retry_after_s) if isinstance(error, AioTensorError) else None
        if problem is None:
            raise error
        if (
            isinstance(connection, WebSocket)
            and connection.application_state is not WebSocketState.CONNECTING
        ):
            code = WS_1011_INTERNAL_ERROR if problem.retry_after is None else WS_1013_TRY_AGAIN_LATER
            raise WebSocketException(code, problem.reason) from error
        return Response(problem.body, problem.status, problem.headers, MEDIA_TYPE)

    def _get(self) -> T:
        if self._opened is None:
            raise UsageError(
                "the application is not running: pass it the lifespan, as in "
                "FastAPI(lifespan=engine.lifespan)"
            )
        return self._opened

    def _used_by(self, connection: HTTPConnection) -> T:
        watch(connection.scope, self._limits)
        return self._get()


class MessageLifespan(_Lifespan[MessageClient[R]], Generic[R]):
    """Open a message client for the lifetime of an application, and provide it to the handlers.

    A request whose handler uses the client is cancelled when its client disconnects, so that its permit and
    memory are released at once.

    Errors of this library become problem JSON responses. The status is 503 with ``Retry-After`` after a wait
    longer than `max_wait_s`, or if the engine was lost. It is 500 if the engine refuses the client or runs as
    another user, or if the keys do not match, 502 if the engine could not answer the request, and 413 if a
    message is too large.

    Args:
        make_client: a function that creates the client, called in each worker when the application starts.
            For several engines, the client has several addresses.
        retry_after_s: the time in seconds after which a client should retry a request answered with 503.
        min_upload_rate: the minimum rate, in bytes per second, at which a client must send a body while the
            handler waits for it; None for no limit. A slower request is cancelled and answered with 408.
        upload_grace_s: the longest allowed stall of an upload, in seconds.

    Raises:
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        make_client: Callable[[], MessageClient[R]],
        *,
        retry_after_s: float = 5.0,
        min_upload_rate: float | None = MIN_UPLOAD_RATE,
        upload_grace_s: float = UPLOAD_GRACE_S,
    ) -> None:
        limits = UploadLimits(min_upload_rate, upload_grace_s)
        super().__init__(make_client, retry_after_s, limits)

    @property
    def opened_client(self) -> MessageClient[R]:
        """The client, for code outside of requests.

        Raises:
            UsageError: the application has not started, or has ended.
        """
        return self._get()

    async def client(self, connection: HTTPConnection) -> MessageClient[R]:
        """Return the client, as a dependency: ``Annotated[MessageClient[...], Depends(engine.client)]``.

        From this call on, an HTTP request is cancelled when its client disconnects or uploads too slowly.

        Raises:
            UsageError: the application is not running, or `install` was not called for it.
        """
        return self._used_by(connection)

    async def permit(self, connection: HTTPConnection) -> AsyncIterator[Permit]:
        """Acquire a permit for one request, as a dependency: ``Depends(engine.permit, scope="function")``.

        Waits for the permit before the handler begins, and before a handler that reads its own body has read
        any of it, so the permits also bound the number of concurrent decoders. Without this scope, FastAPI
        releases an unused permit only after the response.

        Raises:
            UsageError: the application is not running, or `install` was not called for it.
            AioTensorError: no permit could be acquired, for example because none was free within the client's
                `max_wait_s`.
        """
        async with self._used_by(connection).permit() as permit:
            yield permit


class TensorLifespan(_Lifespan[TensorSender]):
    """Open a sender for the lifetime of an application, and provide it to the handlers.

    Requests are cancelled, and errors become responses, as with `MessageLifespan`.

    Args:
        make_sender: a function that creates the sender, called in each worker when the application starts.
        drain_s: the time in seconds that the receiver has at shutdown to take the messages that were sent;
            the rest is discarded. Keep it below the shutdown timeout of the server's supervisor.

    The other arguments are those of `MessageLifespan`.
    """

    def __init__(
        self,
        make_sender: Callable[[], TensorSender],
        *,
        drain_s: float = 5.0,
        retry_after_s: float = 5.0,
        min_upload_rate: float | None = MIN_UPLOAD_RATE,
        upload_grace_s: float = UPLOAD_GRACE_S,
    ) -> None:
        limits = UploadLimits(min_upload_rate, upload_grace_s)
        super().__init__(partial(serving, make_sender, drain_s), retry_after_s, limits)

    @property
    def opened_sender(self) -> TensorSender:
        """The sender, for code outside of requests.

        Raises:
            UsageError: the application has not started, or has ended.
        """
        return self._get()

    async def sender(self, connection: HTTPConnection) -> TensorSender:
        """Return the sender, as a dependency: ``Annotated[TensorSender, Depends(engine.sender)]``.

        The cancellation and the errors are those of `MessageLifespan.client`.
        """
        return self._used_by(connection)

    async def permit(self, connection: HTTPConnection) -> AsyncIterator[OpenMessage]:
        """Begin a message with a permit, as a dependency: ``Depends(engine.permit, scope="function")``.

        Waits as `MessageLifespan.permit` does. The message is complete when the handler returns, and is
        discarded if the handler raises. Without this scope, FastAPI completes the message after the response,
        when an error can no longer be reported to the client.
        """
        async with self._used_by(connection).message() as message:
            yield message
