"""The contexts and the middleware of aiohttp, apart from real servers."""

import asyncio
import gc
import logging
import re
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from aiohttp import web

from aiotensor import TooLargeError, UnsupportedTensorError, WouldBlockError
from aiotensor.integrations.aiohttp import problem_middleware
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@asynccontextmanager
async def serving(app: web.Application, *, handler_cancellation: bool = True) -> AsyncIterator[int]:
    runner = web.AppRunner(app, handler_cancellation=handler_cancellation, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def http(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False)


async def test_errors_are_answered_as_problems_and_bugs_with_status_500() -> None:
    async def busy(request: web.Request) -> web.Response:
        raise WouldBlockError("a secret")

    async def bug(request: web.Request) -> web.Response:
        raise UnsupportedTensorError("a secret")

    app = web.Application(middlewares=[problem_middleware(retry_after_s=7)])
    app.router.add_get("/busy", busy)
    app.router.add_get("/bug", bug)
    async with serving(app) as port, http(port) as client:
        answer = await client.get("/busy")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["reason"] == "busy"
        answer = await client.get("/bug")
        assert (answer.status_code, answer.headers["content-type"]) == (500, "text/plain; charset=utf-8")


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_handler_that_continues_without_its_client_is_logged_once(
    is_cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    begun, ended = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def handler(request: web.Request) -> web.Response:
        begun.release()
        try:
            while request.transport is not None:
                await asyncio.sleep(0)
        finally:
            ended.release()
        return web.Response()

    app = web.Application(middlewares=[problem_middleware()])
    app.router.add_get("/", handler)
    async with serving(app, handler_cancellation=is_cancelled) as port:
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            await begun.acquire()
            writer.close()
            await ended.acquire()
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == (0 if is_cancelled else 1)


async def test_an_error_during_a_response_cuts_it_off(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"part")
        raise TooLargeError("too late", limit=1, requested=2)

    app = web.Application(middlewares=[problem_middleware()])
    app.router.add_get("/", handler)
    async with serving(app) as port, http(port) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/")
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], TooLargeError)


# Limits

GRACE_S = 0.05


async def half_an_upload(port: int) -> tuple[bytes, bytes]:
    """Send a part of a body, and return the head and the body of the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\nhalf")
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    body = await reader.readexactly(int(length[1]))
    writer.close()
    await writer.wait_closed()
    return head, body


async def test_a_handler_whose_upload_stalls_is_cancelled_and_none_of_its_objects_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept: list[weakref.ref[object]] = []

    class Frames:
        """Stands for the memory of a handler."""

    async def handler(request: web.Request) -> web.Response:
        frames = Frames()
        kept.append(weakref.ref(frames))
        await asyncio.Event().wait()
        raise AssertionError(f"it was cancelled with {frames}")

    caplog.set_level("INFO", "aiotensor.integrations")
    app = web.Application(middlewares=[problem_middleware(min_upload_rate=1 << 20, upload_grace_s=GRACE_S)])
    app.router.add_post("/", handler)
    gc.disable()
    try:
        async with serving(app) as port:
            head, body = await half_an_upload(port)
            await until(lambda: kept[0]() is None)
    finally:
        gc.enable()
    assert head.startswith(b"HTTP/1.1 408 ")
    assert msgspec.json.decode(body)["reason"] == "slow_upload"
    assert b"Connection: close" in head
    [record] = [record for record in caplog.records if record.name == "aiotensor.integrations"]
    assert "after 4 bytes" in record.getMessage()


async def test_the_time_in_which_aiohttp_does_not_read_is_not_counted() -> None:
    upload, grace_s = bytes(4 << 20), 1.0  # more than aiohttp reads ahead, and than a busy loop stops

    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(2 * grace_s)  # the handler is slow, and not the client
        return web.Response(text=str(len(await request.read())))

    middleware = problem_middleware(min_upload_rate=1 << 20, upload_grace_s=grace_s)
    app = web.Application(middlewares=[middleware], client_max_size=1 << 30)
    app.router.add_post("/", handler)
    async with serving(app) as port, http(port) as client:
        answer = await client.post("/", content=upload)
    assert (answer.status_code, answer.text) == (200, str(len(upload)))
