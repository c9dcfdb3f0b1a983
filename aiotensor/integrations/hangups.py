"""Cancel a request when its client hangs up: an ASGI middleware.

ASGI servers leave a handler alone when its client goes away; they only say so to whoever asks for the next
part of the request. So this asks, once the request is here in full, for those requests that want it.
"""

import asyncio

import anyio
from anyio.lowlevel import checkpoint
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiotensor.errors import UsageError
from aiotensor.logs import logger_of

__all__ = ["HangUps", "watch"]

logger = logger_of("integrations")

_KEY = "aiotensor.request"
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
        with anyio.CancelScope() as cancel_scope:
            request = scope[_KEY] = _Request(cancel_scope, receive, send)
            try:
                await self._app(scope, request.receive, request.send)
            finally:
                await request.end()
        if cancel_scope.cancelled_caught:
            await request.end_response()
            logger.info(
                "a client hung up, and its request was cancelled: %s %s",
                scope["method"],
                scope["path"],
                extra={"event": "request_cancelled", "method": scope["method"], "path": scope["path"]},
            )


class _Request:
    """One request: what the server says of it goes through here, since only one may ask the server."""

    def __init__(self, cancel_scope: anyio.CancelScope, receive: Receive, send: Send) -> None:
        self._cancel_scope = cancel_scope
        self._receive = receive
        self._send = send
        self._is_watched = self._is_here = self._is_begun = self._is_answered = False
        self._readers = 0  # calls of the application that ask the server
        self._watcher: asyncio.Task[Message] | None = None

    def watch(self) -> None:
        """Cancel the request when its client hangs up."""
        self._is_watched = True
        self._begin()

    async def receive(self) -> Message:
        """Pass on what the server says."""
        if self._watcher is not None:
            return await asyncio.shield(self._watcher)
        self._readers += 1
        try:
            message = await self._receive()
        finally:
            self._readers -= 1
            self._begin()
        if message["type"] == "http.disconnect":
            self._gone()
            await checkpoint()  # cancelled here, the application takes it for no error of its own
        elif not message.get("more_body", False):
            self._is_here = True
            self._begin()
        return message

    async def send(self, message: Message) -> None:
        """Pass on what the application says."""
        self._is_begun = True
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_answered = True  # the client may go now, and what is still to be done be done

    async def end(self) -> None:
        """Watch no more."""
        watcher = self._watcher
        if watcher is not None:
            watcher.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([watcher])

    async def end_response(self) -> None:
        """Say that there is no response: nobody reads it, but other middleware expects to see one."""
        if not self._is_begun:
            await self._send({"type": "http.response.start", "status": _CLIENT_CLOSED_REQUEST, "headers": []})
        if not self._is_answered:
            await self._send({"type": "http.response.body", "body": b""})

    def _begin(self) -> None:
        """Ask the server, if nobody else does and it has nothing to say but that the client is gone."""
        if self._is_watched and self._is_here and self._watcher is None and not self._readers:
            self._watcher = asyncio.get_running_loop().create_task(self._ask())
            self._watcher.add_done_callback(self._heard)

    async def _ask(self) -> Message:
        return await self._receive()

    def _heard(self, watcher: "asyncio.Task[Message]") -> None:
        if not watcher.cancelled() and watcher.exception() is None:
            self._gone()

    def _gone(self) -> None:
        if self._is_watched and not self._is_answered:
            self._cancel_scope.cancel()
