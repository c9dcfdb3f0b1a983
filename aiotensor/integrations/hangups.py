"""Cancel a request when its client hangs up: an ASGI middleware.

ASGI servers leave a handler alone when its client goes away; they only say so to whoever asks for the next
part of the request. So this asks, for those requests that want it.
"""

import asyncio
import types
from collections.abc import Coroutine, Generator
from contextlib import suppress

import anyio
from anyio.lowlevel import checkpoint
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiotensor.errors import UsageError
from aiotensor.logs import logger_of

__all__ = ["HangUps", "watch"]

logger = logger_of("integrations")

_KEY = "aiotensor.request"
# What an answer ends with; some servers send files by themselves.
_ENDS = frozenset({"http.response.body", "http.response.pathsend"})
_CLIENT_CLOSED_REQUEST = 499  # as proxies log it; there is no such status on the wire


def watch(scope: Scope) -> None:
    """Have a request cancelled when its client hangs up.

    Raises:
        UsageError: the application lacks the middleware.
    """
    if scope["type"] != "http":
        return  # a handler of a web socket hears of it where it receives
    request = scope.get(_KEY)
    if not isinstance(request, _Request):
        raise UsageError("the application does not watch its clients: call install(app) when it is made")
    request.watch()


class HangUps:
    """Cancel those requests that are watched, when their clients hang up.

    Args:
        app: what answers the requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Two scopes, so that the inner one can end the cancellation by the outer one.
        with anyio.CancelScope() as cancel_scope, anyio.CancelScope() as app_scope:
            request = scope[_KEY] = _Request(cancel_scope, receive, send)
            try:
                await _cancelled_once(self._serve(scope, request), app_scope)
            except ClientDisconnect:
                # Of a handler that was reading, and heard of the end before it was cancelled.
                if not cancel_scope.cancel_called:
                    raise
            finally:
                await request.end()
        if cancel_scope.cancel_called:
            await request.end_response()
            logger.info(
                "a client hung up, and its request was cancelled: %s %s",
                scope["method"],
                scope["path"],
                extra={"event": "request_cancelled", "method": scope["method"], "path": scope["path"]},
            )

    async def _serve(self, scope: Scope, request: "_Request") -> None:
        await self._app(scope, request.receive, request.send)


@types.coroutine
def _cancelled_once(
    work: Coroutine[object, object, None], scope: anyio.CancelScope
) -> Generator[object, object, None]:
    """Run a coroutine within a scope, and shield the scope when a cancellation was delivered to the task.

    A cancelled scope of anyio cancels its task again in each iteration of the loop: a handler that shields
    its work would keep the processor busy, and no cleanup could wait. `asyncio.Task.cancel` is no
    replacement, since threads that the task waits for, such as those of ``def`` endpoints, are notified by
    scopes only.
    """
    error: BaseException | None = None
    while True:
        try:
            waits_for = work.send(None) if error is None else work.throw(error)
        except StopIteration:
            return
        finally:
            error = None  # its traceback has this frame
        try:
            yield waits_for
        except GeneratorExit:
            work.close()
            raise
        except BaseException as thrown:  # noqa: BLE001 - for the coroutine
            if isinstance(thrown, asyncio.CancelledError):
                scope.shield = True
            error = thrown
        finally:
            del waits_for  # a future, which keeps its error


class _Request:
    """One request: what the server says of it goes through here, since only one may ask the server.

    For a request that is watched, the server is asked ahead of the application: for one piece of the body,
    which is kept until the application wants it, and after the last piece for the end of the client.
    """

    def __init__(self, cancel_scope: anyio.CancelScope, receive: Receive, send: Send) -> None:
        self._cancel_scope = cancel_scope
        self._receive = receive
        self._send = send
        self._is_watched = self._is_begun = self._is_answered = False
        self._readers = 0  # calls of the application that ask the server
        self._watcher: asyncio.Task[Message] | None = None
        self._kept: Message | None = None  # a piece of the body that was asked for ahead
        self._end: Message | None = None  # what the server said when the client was gone

    def watch(self) -> None:
        """Cancel the request when its client hangs up."""
        self._is_watched = True
        if self._end is not None:
            self._gone(self._end)
        self._ask_ahead()

    async def receive(self) -> Message:
        """Pass on what the server says."""
        while self._kept is None and self._end is None:
            watcher = self._watcher
            if watcher is not None:
                await asyncio.shield(watcher)
                self._asked(watcher)  # its callback may not have had its turn
                continue
            self._readers += 1
            try:
                message = await self._receive()
            except BaseException:
                self._readers -= 1
                self._ask_ahead()  # watched meanwhile, nobody else would hear of the end
                raise
            self._readers -= 1
            self._heard(message)
            break
        if self._kept is None:
            # Cancelled here, the application takes it for no error of its own.
            if self._cancel_scope.cancel_called:
                await checkpoint()
            return self._end or {"type": "http.disconnect"}
        message, self._kept = self._kept, None
        self._ask_ahead()
        return message

    async def send(self, message: Message) -> None:
        """Pass on what the application says."""
        await self._send(message)
        self._is_begun = True
        if message["type"] in _ENDS and not message.get("more_body", False):
            self._is_answered = True  # the client may go now, and what is still to be done be done

    async def end(self) -> None:
        """Watch no more."""
        self._is_watched = False
        watcher = self._watcher
        if watcher is not None:
            watcher.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([watcher])

    async def end_response(self) -> None:
        """Say that there is no response: nobody reads it, but other middleware expects to see one."""
        with suppress(OSError):  # some servers say so that nobody does
            if not self._is_begun:
                start = {"type": "http.response.start", "status": _CLIENT_CLOSED_REQUEST, "headers": []}
                await self._send(start)
            if not self._is_answered:
                await self._send({"type": "http.response.body", "body": b""})

    def _ask_ahead(self) -> None:
        """Ask the server, if nobody else does, and there is no piece that waits to be taken."""
        if not self._is_watched or self._end is not None or self._watcher is not None or self._readers:
            return
        if self._kept is None or not self._kept.get("more_body", False):
            self._watcher = asyncio.get_running_loop().create_task(self._ask())
            self._watcher.add_done_callback(self._asked)

    async def _ask(self) -> Message:
        return await self._receive()

    def _asked(self, watcher: "asyncio.Task[Message]") -> None:
        if self._watcher is not watcher:
            return
        self._watcher = None
        if not watcher.cancelled() and watcher.exception() is None:
            self._heard(watcher.result())

    def _heard(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self._gone(message)
        else:
            self._kept = message
            self._ask_ahead()

    def _gone(self, message: Message) -> None:
        self._end = message
        if self._is_watched and not self._is_answered:
            self._cancel_scope.cancel()
