"""An ASGI middleware that cancels requests whose clients disconnect or upload too slowly.

An ASGI server does not cancel the handler of a client that disconnects. It only reports the disconnect to the
next call that receives from the client. So, for watched requests, this middleware receives ahead of the
handler.
"""

import asyncio
import types
from collections.abc import Coroutine, Generator
from contextlib import suppress

import anyio
from anyio.lowlevel import checkpoint
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiotensor.errors import UsageError
from aiotensor.integrations.web import MEDIA_TYPE, SlowUploadError, UploadLimits, UploadWatch, problem_of
from aiotensor.runtime.logs import logger_of

logger = logger_of("integrations")

_KEY = "aiotensor.request"
# The messages that may end a response; with the second one, a server sends a file itself.
_ENDS = frozenset({"http.response.body", "http.response.pathsend"})
_CLIENT_CLOSED_REQUEST = 499  # as proxies log it; it is never sent


def watch(scope: Scope, limits: UploadLimits) -> None:
    """Watch a request: cancel it when its client disconnects, or uploads too slowly.

    The limits of the first call for a request apply; later ones are ignored.

    Raises:
        UsageError: the application does not have the middleware.
    """
    if scope["type"] != "http":
        return  # the handler of a web socket is notified of a disconnect when it receives
    request = scope.get(_KEY)
    if not isinstance(request, _WatchedRequest):
        raise UsageError("the application does not watch its clients: call install(app) when it is created")
    request.watch(limits)


class WatchRequests:
    """Cancel watched requests whose clients disconnect, or upload too slowly.

    Args:
        app: the ASGI application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or web socket."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Two scopes, so that the inner one can end the cancellation by the outer one.
        with anyio.CancelScope() as cancel_scope, anyio.CancelScope() as app_scope:
            request = scope[_KEY] = _WatchedRequest(cancel_scope, receive, send)
            try:
                work = self._work(scope, request)
                await _cancelled_once(work, cancel_scope, app_scope)
            except ClientDisconnect:
                # The handler was receiving, and was notified of the disconnect before it was cancelled.
                if not cancel_scope.cancel_called:
                    raise
            finally:
                await request.end()
        if not cancel_scope.cancel_called:
            return
        if not await request.refuse(scope):
            await request.end_response()
            logger.info(
                "a client disconnected, and its request was cancelled: %s %s",
                scope["method"],
                scope["path"],
                extra={"event": "request_cancelled", "method": scope["method"], "path": scope["path"]},
            )

    async def _work(self, scope: Scope, request: "_WatchedRequest") -> None:
        await self._app(scope, request.receive, request.send)


@types.coroutine
def _cancelled_once(
    work: Coroutine[object, object, None], outer: anyio.CancelScope, inner: anyio.CancelScope
) -> Generator[object, object, None]:
    """Run a coroutine in two nested scopes, and shield the inner one once the outer one has cancelled it.

    A cancelled scope of anyio cancels its task again in each iteration of the loop: a handler that shields
    its work would keep the processor busy, and no cleanup could wait. `asyncio.Task.cancel` does not suffice,
    since threads that the task waits for, such as those of ``def`` endpoints, are notified only by scopes.

    Other cancellations, such as those of timeouts in the coroutine, are passed on without an effect on the
    scopes. They can be distinguished, because anyio names the scope in the message of a cancellation. (If it
    did not, the coroutine would be cancelled repeatedly.)
    """
    origin = f"cancel scope {id(outer):x}"
    error: BaseException | None = None
    while True:
        try:
            waits_for = work.send(None) if error is None else work.throw(error)
        except StopIteration:
            return
        finally:
            error = None  # its traceback refers to this frame
        try:
            yield waits_for
        except GeneratorExit:
            work.close()
            raise
        except BaseException as thrown:  # noqa: BLE001 - passed on to the coroutine
            if isinstance(thrown, asyncio.CancelledError) and origin in str(thrown):
                inner.shield = True
            error = thrown
        finally:
            del waits_for  # a future refers to its error


class _WatchedRequest:
    """One request. All its messages pass through this object: a server allows one receiving call at a time.

    A watched request receives ahead of the application: one piece of the body, which is kept until the
    application receives it, and after the last piece the message that reports the disconnect.

    Args:
        cancel_scope: the scope in which the application runs.
        receive: the server's function that receives messages.
        send: the server's function that sends messages.
    """

    def __init__(self, cancel_scope: anyio.CancelScope, receive: Receive, send: Send) -> None:
        self._cancel_scope = cancel_scope
        self._receive = receive
        self._send = send
        self._is_watched = self._is_begun = self._is_answered = False
        self._reading: asyncio.Future[Message] | None = None  # the call that receives from the server
        self._kept: Message | None = None  # a piece of the body that was received ahead
        self._end: Message | None = None  # the message that reports the disconnect
        self._waiting = 0  # calls of the application that wait for a message
        self._received = 0  # bytes of the body
        self._is_complete = False  # the body has arrived
        self._upload: UploadWatch | None = None
        self._error: SlowUploadError | None = None

    def watch(self, limits: UploadLimits) -> None:
        """Cancel the request when its client disconnects, or uploads too slowly."""
        if self._upload is None:
            self._upload = UploadWatch(limits, self._look, self._too_slow)
            self._upload.begin()
        self._is_watched = True
        if self._end is not None:
            self._gone(self._end)
        self._read_ahead()

    async def receive(self) -> Message:
        """Return the server's next message to the application."""
        self._waiting += 1
        try:
            while self._kept is None and self._end is None:
                reading = self._read()
                await asyncio.shield(reading)  # if the application gives up, the message is kept
                self._read_ended(reading)  # the callback may not have run yet
        finally:
            self._waiting -= 1
        if self._kept is None:
            # A cancellation comes first, so that the application does not treat the disconnect as an error.
            if self._cancel_scope.cancel_called:
                await checkpoint()
            return self._end or {"type": "http.disconnect"}
        message, self._kept = self._kept, None
        self._read_ahead()
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the application to the server."""
        await self._send(message)
        self._is_begun = True
        if message["type"] in _ENDS and not message.get("more_body", False):
            self._is_answered = True  # background work continues if the client disconnects now

    async def end(self) -> None:
        """Stop watching."""
        self._is_watched = False
        if self._upload is not None:
            self._upload.end()
        reading = self._reading
        if reading is not None:
            reading.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([reading])

    async def refuse(self, scope: Scope) -> bool:
        """Answer the request if its upload was too slow, and return whether it was.

        Raises:
            SlowUploadError: the response has begun, and is not complete.
        """
        error, self._error = self._error, None
        if error is None:
            return False
        if self._is_answered:
            return True
        problem = None if self._is_begun else problem_of(error, 0)
        if problem is None:
            try:
                raise error  # the server logs it; an outer middleware must not complete the response
            finally:
                del error  # its traceback refers to this frame
        response = Response(problem.body, problem.status, problem.headers, MEDIA_TYPE)
        if scope["http_version"].startswith("1"):
            response.headers["Connection"] = "close"  # the rest is not read; HTTP/2 forbids this field
        with suppress(OSError):  # the client may have disconnected
            await response(scope, self._receive, self._send)
        return True

    async def end_response(self) -> None:
        """Send a response that no client reads, because other middleware expects one."""
        with suppress(OSError):  # some servers report a disconnect in this way
            if not self._is_begun:
                start = {"type": "http.response.start", "status": _CLIENT_CLOSED_REQUEST, "headers": []}
                await self._send(start)
            if not self._is_answered:
                await self._send({"type": "http.response.body", "body": b""})

    def _read(self) -> "asyncio.Future[Message]":
        """Receive from the server, which allows one call at a time."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._receive())
            self._reading.add_done_callback(self._read_ended)
        return self._reading

    def _read_ahead(self) -> None:
        """Receive ahead in a watched request, unless a piece of the body is kept and others follow."""
        if self._is_watched and self._end is None and (self._kept is None or self._is_complete):
            self._read()

    def _read_ended(self, reading: "asyncio.Future[Message]") -> None:
        if self._reading is not reading:
            return
        self._reading = None
        if reading.cancelled() or reading.exception() is not None:
            return
        message = reading.result()
        if message["type"] == "http.disconnect":
            self._gone(message)
            return
        self._kept = message
        self._received += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        self._read_ahead()

    def _gone(self, message: Message) -> None:
        self._end = message
        if self._is_watched and not self._is_answered:
            self._cancel_scope.cancel()

    def _look(self) -> tuple[int, bool] | None:
        return None if self._is_complete else (self._received, self._waiting > 0)

    def _too_slow(self, error: SlowUploadError) -> None:
        if not self._cancel_scope.cancel_called and not self._is_answered:
            self._error = error
            self._cancel_scope.cancel()
