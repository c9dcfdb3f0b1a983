"""A server without descriptors answers 503, and other errors of the application stay as they are.

Each test exhausts the descriptors of a separate process with `RLIMIT_NOFILE`.
"""

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

import httpx
import pytest
from aiohttp import ClientSession, web
from fastapi import Depends, FastAPI, WebSocket
from fastapi.responses import StreamingResponse

from aiotensor import OpenMessage, TensorReceiver, TensorSender
from aiotensor.channel import MessageClient
from aiotensor.integrations.aiohttp import problem_middleware, sender_context
from aiotensor.integrations.fastapi import TensorLifespan
from aiotensor.integrations.problems import problem_of
from tests.integrations.test_aiohttp import SENDER, serving
from tests.integrations.test_fastapi import http, visit_socket
from tests.transports.unix_ends import no_descriptors
from verification.patterns import BIG, pattern
from verification.processes import peers

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

Answer = tuple[int, str | None, str]


async def _in_child(address: str, work: Callable[[peers.State], Awaitable[Any]]) -> Any:
    async with peers.peers(address, 1) as [child]:
        return await child.call(work)


async def _send_without_descriptors(sender: TensorSender) -> None:
    await sender.ready()  # without descriptors it could not connect, and would wait for that
    with no_descriptors():
        await sender.send(pattern(0, BIG))  # whose memory needs one


def _of(answer: httpx.Response) -> Answer:
    return answer.status_code, answer.headers.get("retry-after"), answer.json()["reason"]


async def test_fastapi_answers_503_when_a_call_of_the_library_finds_no_descriptors(address: str) -> None:
    handler, dependency, socket, accepted = await _in_child(address, _ask_fastapi)
    assert handler == dependency == (503, "7", "exhausted")
    assert socket == 503
    assert accepted == (1013, "exhausted")


async def _ask_fastapi(state: peers.State) -> tuple[Answer, Answer, int, tuple[int, str]]:
    engine = TensorLifespan(lambda: TensorSender(state.endpoint), retry_after_s=7)
    app = FastAPI(lifespan=engine.lifespan)
    engine.install(app)

    async def sent(sender: Annotated[TensorSender, Depends(engine.sender)]) -> None:
        await _send_without_descriptors(sender)

    @app.post("/handler")
    async def handler(permit: Annotated[OpenMessage, Depends(engine.permit, scope="function")]) -> None:
        await engine.opened_sender.ready()
        with no_descriptors():
            await permit.send(pattern(0, BIG))

    @app.post("/dependency", dependencies=[Depends(sent)])
    async def dependency() -> None:
        raise AssertionError("its dependency fails")

    @app.websocket("/before")
    async def before(socket: WebSocket) -> None:
        await _send_without_descriptors(engine.opened_sender)

    @app.websocket("/after")
    async def after(socket: WebSocket) -> None:
        await socket.accept()
        await _send_without_descriptors(engine.opened_sender)

    async with TensorReceiver(state.endpoint), app.router.lifespan_context(app), http(app) as client:
        answers = [_of(await client.post(path)) for path in ("/handler", "/dependency")]
        start, _ = await visit_socket(app, "/before")
        _, closed = await visit_socket(app, "/after")
        await engine.opened_sender.send(pattern(0, BIG))  # there are some again
        assert engine.opened_sender.discard_all()
    return answers[0], answers[1], start["status"], (closed["code"], closed["reason"])


async def test_fastapi_leaves_errors_of_the_application_as_they_are(address: str) -> None:
    assert await _in_child(address, _ask_for_errors) == [
        ("OSError", errno.EMFILE),
        ("FileNotFoundError", errno.ENOENT),
        ("OSError", errno.EMFILE),
        ("OSError", errno.EMFILE),
    ]


async def _ask_for_errors(state: peers.State) -> list[tuple[str, int | None]]:
    engine = TensorLifespan(lambda: TensorSender(state.endpoint))
    app = FastAPI(lifespan=engine.lifespan)
    engine.install(app)

    @app.post("/own")
    async def own(permit: Annotated[OpenMessage, Depends(engine.permit, scope="function")]) -> None:
        with no_descriptors():
            os.close(os.open("/dev/null", os.O_RDONLY))

    @app.post("/missing")
    async def missing() -> None:
        os.close(os.open("/no/such/file", os.O_RDONLY))

    @app.post("/streamed")
    async def streamed() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"begun"
            with no_descriptors():
                os.close(os.open("/dev/null", os.O_RDONLY))

        return StreamingResponse(parts())

    @app.post("/begun")
    async def begun() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"begun"
            await _send_without_descriptors(engine.opened_sender)

        return StreamingResponse(parts())

    raised: list[tuple[str, int | None]] = []
    async with app.router.lifespan_context(app), TensorReceiver(state.endpoint), http(app) as client:
        for path in ("/own", "/missing", "/streamed", "/begun"):
            try:
                await client.post(path)
            except OSError as error:
                raised.append((type(error).__name__, error.errno))
    return raised


async def test_aiohttp_answers_503_when_a_call_of_the_library_finds_no_descriptors(address: str) -> None:
    assert await _in_child(address, _ask_aiohttp) == [(503, "7", "exhausted"), 500, 200]


async def _ask_aiohttp(state: peers.State) -> list[object]:
    app = web.Application(middlewares=[problem_middleware(retry_after_s=7)])
    app.cleanup_ctx.append(sender_context(SENDER, lambda: TensorSender(state.endpoint), drain_s=0.01))

    async def sent(request: web.Request) -> web.Response:
        await _send_without_descriptors(request.app[SENDER])
        return web.Response()

    async def own(request: web.Request) -> web.Response:
        with no_descriptors():
            os.close(os.open("/dev/null", os.O_RDONLY))
        return web.Response()

    async def later(request: web.Request) -> web.Response:
        await request.app[SENDER].send(pattern(0, BIG))
        return web.Response()

    for path, handler in (("/sent", sent), ("/own", own), ("/later", later)):
        app.router.add_get(path, handler)
    answers: list[object] = []
    async with TensorReceiver(state.endpoint), serving(app) as port, ClientSession() as client:
        here = f"http://127.0.0.1:{port}"
        async with client.get(f"{here}/sent") as answer:
            told = await answer.json(content_type=None)
            answers.append((answer.status, answer.headers.get("retry-after"), told["reason"]))
        for path in ("/own", "/later"):
            async with client.get(here + path) as answer:
                answers.append(answer.status)
    return answers


async def test_opening_a_client_without_descriptors_is_answered_with_503(address: str) -> None:
    assert await _in_child(address, _open_client) == (503, "exhausted")


async def _open_client(state: peers.State) -> tuple[int, str] | None:
    client = MessageClient("ipc:///tmp/nobody", reply_type=dict)
    try:
        with no_descriptors():
            await client.__aenter__()
    except OSError as error:
        problem = problem_of(error, 1)
        return None if problem is None else (problem.status, problem.reason)
    return None
