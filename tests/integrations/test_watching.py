"""Watched requests are cancelled when their clients disconnect, or upload too slowly."""

import asyncio
import concurrent.futures
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
import pytest
from anyio.lowlevel import checkpoint
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Scope

from aiotensor import UsageError
from aiotensor.integrations import watching
from aiotensor.integrations.watching import WatchRequests
from aiotensor.integrations.web import UploadLimits

Handler = Callable[[Request], Awaitable[Response]]

UNLIMITED = UploadLimits(None, 10)
watch = partial(watching.watch, limits=UNLIMITED)


class Visit:
    """One request to an application, and the actions of its client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._said: asyncio.Queue[Message] = asyncio.Queue()
        self.readers = 0
        self.heard: list[Message] = []

    def say(self, body: bytes = b"", *, more: bool = False) -> None:
        self._said.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def hang_up(self) -> None:
        self._said.put_nowait({"type": "http.disconnect"})

    @property
    def unsaid(self) -> int:
        return self._said.qsize()

    async def _receive(self) -> Message:
        self.readers += 1
        assert self.readers == 1, "only one may ask the server"
        try:
            return await self._said.get()
        finally:
            self.readers -= 1

    async def _send(self, message: Message) -> None:
        self.heard.append(message)

    def begin(self, **more: object) -> "asyncio.Task[None]":
        scope: Scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b""}
        scope.update({"headers": [], "http_version": "1.1", "scheme": "http", "root_path": "", **more})

        async def run() -> None:
            await self._app(scope, self._receive, self._send)

        return asyncio.create_task(run())

    async def hang_up_after(self, begun: asyncio.Event) -> None:
        """Ask, hang up once the handler has begun, and wait for the end."""
        running = self.begin()
        self.say()
        await begun.wait()
        self.hang_up()
        await running

    @property
    def status(self) -> int:
        return int(self.heard[0]["status"])


def visit(handler: Handler, *, is_installed: bool = True) -> Visit:
    app = Starlette(routes=[Route("/", handler, methods=["POST"])])
    if is_installed:
        app.add_middleware(WatchRequests)
    return Visit(app)


class Work:
    """A handler that never ends, and records its cancellation."""

    def __init__(self, *, reads: bool = True) -> None:
        self.begun = asyncio.Event()
        self.was_cancelled = False
        self._reads = reads

    async def handle(self, request: Request) -> Response:
        watch(request.scope)
        if self._reads:
            await request.body()
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        raise AssertionError("it was cancelled")


@pytest.mark.parametrize("reads", [True, False])
async def test_a_request_is_cancelled_when_its_client_disconnects(reads: bool) -> None:
    work = Work(reads=reads)
    visitor = visit(work.handle)
    await visitor.hang_up_after(work.begun)
    assert work.was_cancelled
    assert visitor.status == 499
    assert visitor.readers == 0


@pytest.mark.parametrize(
    "response", [PlainTextResponse("done"), FileResponse(__file__)], ids=["text", "file"]
)
async def test_background_tasks_after_the_response_are_not_cancelled(response: Response) -> None:
    answered, done = asyncio.Event(), asyncio.Event()

    async def later() -> None:
        answered.set()
        while visitor.unsaid:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        done.set()

    async def handler(request: Request) -> Response:
        watch(request.scope)
        await request.body()
        response.background = BackgroundTask(later)
        return response

    visitor = visit(handler)
    running = visitor.begin(extensions={"http.response.pathsend": {}})  # the server sends files itself
    visitor.say()
    await answered.wait()
    visitor.hang_up()
    await running
    assert done.is_set()
    assert len(visitor.heard) == 2


async def test_a_disconnect_ends_a_streaming_response() -> None:
    ended = asyncio.Event()

    async def parts() -> AsyncIterator[str]:
        try:
            while True:
                yield "part"
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def handler(request: Request) -> Response:
        watch(request.scope)
        await request.body()
        return StreamingResponse(parts())

    visitor = visit(handler)
    running = visitor.begin()
    visitor.say()
    while len(visitor.heard) < 3:
        await asyncio.sleep(0)
    visitor.hang_up()
    await running
    await ended.wait()


async def test_at_most_one_chunk_is_read_ahead_and_the_body_arrives_complete() -> None:
    bodies: list[bytes] = []
    begun, go = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        watch(request.scope)
        begun.set()
        await go.wait()
        async for piece in request.stream():
            bodies.append(piece)
            await asyncio.sleep(0)
        return PlainTextResponse("done")

    visitor = visit(handler)
    running = visitor.begin()
    for number in range(5):
        visitor.say(b"%d" % number, more=True)
    visitor.say(b"last")
    await begun.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert visitor.unsaid == 5
    go.set()
    await running
    assert b"".join(bodies) == b"01234last"


async def test_cancelling_the_server_cancels_its_request_and_leaves_no_task() -> None:
    work = Work()
    visitor = visit(work.handle)
    running = visitor.begin()
    visitor.say()
    await work.begun.wait()
    before = asyncio.all_tasks() - {running}
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() <= before
    assert visitor.readers == 0


async def test_watching_without_the_middleware_raises_usage_error() -> None:
    visitor = visit(Work().handle, is_installed=False)
    with pytest.raises(UsageError, match=r"call install\(app\)"):
        await visitor.begin()


async def test_a_thread_of_a_handler_and_what_it_awaits_are_cancelled() -> None:
    begun, awaited = asyncio.Event(), asyncio.Event()
    outcomes: list[str] = []

    async def never() -> None:
        begun.set()
        await awaited.wait()

    def work() -> None:
        for wait in (partial(anyio.from_thread.run, never), anyio.from_thread.check_cancelled):
            try:
                wait()
            except (asyncio.CancelledError, concurrent.futures.CancelledError) as error:
                outcomes.append(type(error).__name__)

    async def handler(request: Request) -> Response:
        watch(request.scope)
        await request.body()
        await anyio.to_thread.run_sync(work)
        await checkpoint()
        raise AssertionError("it was cancelled")

    await visit(handler).hang_up_after(begun)
    assert outcomes == ["CancelledError", "CancelledError"]


# Limits


GRACE_S = 0.05
LONGER_S = 0.5  # for handlers that must not exceed it
SLOW = UploadLimits(1 << 20, GRACE_S)


async def test_a_request_whose_upload_stalls_is_cancelled_and_answered_and_none_of_its_objects_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept: list[weakref.ref[object]] = []

    class Frames:
        """Stands for the memory of a handler."""

    async def handler(request: Request) -> Response:
        watch(request.scope, limits=SLOW)
        frames = Frames()
        kept.append(weakref.ref(frames))
        await request.body()
        raise AssertionError(f"it was cancelled with {frames}")

    caplog.set_level("INFO", "aiotensor.integrations")
    visitor = visit(handler)
    visitor.say(b"half", more=True)
    gc.disable()
    try:
        await visitor.begin()
        assert kept[0]() is None
    finally:
        gc.enable()
    start, *parts = visitor.heard
    assert (b"content-type", b"application/problem+json") in start["headers"]
    problem = msgspec.json.decode(b"".join(part["body"] for part in parts))
    assert (b"connection", b"close") in start["headers"]
    assert (visitor.status, problem["status"], problem["reason"]) == (408, 408, "slow_upload")
    [record] = caplog.records
    assert "after 4 bytes" in record.getMessage()
    assert (record.levelname, visitor.readers) == ("INFO", 0)


async def test_the_time_in_which_a_handler_does_not_read_is_not_counted() -> None:
    async def handler(request: Request) -> Response:
        watch(request.scope, limits=UploadLimits(1 << 20, LONGER_S))
        pieces = request.stream()
        assert await anext(pieces) == b"first"
        await asyncio.sleep(2 * LONGER_S)  # the handler is slow, and not the client
        return PlainTextResponse(str([piece async for piece in pieces]))

    visitor = visit(handler)
    running = visitor.begin()
    visitor.say(b"first", more=True)
    visitor.say(b"last")
    await running
    assert visitor.status == 200


async def test_a_response_whose_upload_stalls_is_cut_off() -> None:
    async def handler(request: Request) -> Response:
        watch(request.scope, limits=SLOW)

        async def echo() -> AsyncIterator[bytes]:
            async for piece in request.stream():
                yield piece

        return StreamingResponse(echo())

    visitor = visit(handler)
    running = visitor.begin()
    visitor.say(b"half", more=True)
    with pytest.raises(TimeoutError, match="after 4 bytes"):  # so no outer middleware completes the response
        await running
    assert visitor.status == 200
    assert [message for message in visitor.heard[1:] if not message["more_body"]] == []


async def _time_out(request: Request) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()


async def _ask(request: Request) -> None:
    assert not await request.is_disconnected()


@pytest.mark.parametrize(
    ("before", "end"),
    [
        (_time_out, "stall"),
        (_time_out, "disconnect"),
        (_ask, "disconnect"),
    ],
)
async def test_a_request_is_cancelled_despite_earlier_cancellations(
    before: Callable[[Request], Awaitable[None]], end: str
) -> None:
    begun = asyncio.Event()
    limits = SLOW if end == "stall" else UNLIMITED

    async def handler(request: Request) -> Response:
        watch(request.scope, limits=limits)
        await before(request)
        begun.set()
        await (request.body() if end == "stall" else asyncio.Event().wait())
        raise AssertionError("it was cancelled")

    visitor = visit(handler)
    running = visitor.begin()
    if end == "disconnect":
        await begun.wait()
        visitor.hang_up()
    await running
    assert visitor.status == (408 if end == "stall" else 499)
