"""Answer a request that found no descriptors or memory left: an ASGI middleware.

An exception handler of Starlette for `OSError` would also handle the application's own errors, and would
replace the errors that are raised after the response has begun.
"""

from collections.abc import Callable

from starlette.responses import Response
from starlette.status import WS_1013_TRY_AGAIN_LATER
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiotensor.integrations.problems import MEDIA_TYPE, Problem

__all__ = ["Exhaustion"]


class Exhaustion:
    """Answer an `OSError` that a call of this library raised; propagate all others.

    Args:
        app: the application.
        problem_of: returns the answer to an error, or None for an error of the application.
    """

    def __init__(self, app: ASGIApp, problem_of: Callable[[OSError], Problem | None]) -> None:
        self._app = app
        self._problem_of = problem_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or web socket."""
        last_sent = ""

        async def note(message: Message) -> None:
            nonlocal last_sent
            last_sent = message["type"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        except OSError as error:
            is_answerable = not last_sent or last_sent in ("websocket.accept", "websocket.send")
            problem = self._problem_of(error) if is_answerable else None
            if problem is None:
                raise
            if last_sent:
                code = WS_1013_TRY_AGAIN_LATER
                await send({"type": "websocket.close", "code": code, "reason": problem.reason})
            else:
                response = Response(problem.body, problem.status, problem.headers, MEDIA_TYPE)
                await response(scope, receive, send)
