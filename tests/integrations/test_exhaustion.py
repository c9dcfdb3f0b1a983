"""A server without descriptors answers 503, and other errors of the application stay as they are.

Each test exhausts the descriptors of a separate process with `RLIMIT_NOFILE`.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI, WebSocket

from aiotensor import OpenMessage, TensorReceiver, TensorSender
from aiotensor.channel import MessageClient
from aiotensor.integrations.fastapi import TensorLifespan
from aiotensor.integrations.problems import problem_of
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

    @app.post("/own")
    async def own(permit: Annotated[OpenMessage, Depends(engine.permit, scope="function")]) -> None:
        with no_descriptors():
            os.close(os.open("/dev/null", os.O_RDONLY))

    @app.websocket("/before")
    async def before(socket: WebSocket) -> None:
        await _send_without_descriptors(engine.opened_sender)

    @app.websocket("/after")
    async def after(socket: WebSocket) -> None:
        await socket.accept()
        await _send_without_descriptors(engine.opened_sender)

    async with TensorReceiver(state.endpoint), app.router.lifespan_context(app), http(app) as client:
        answers = [_of(await client.post(path)) for path in ("/handler", "/dependency")]
        with pytest.raises(OSError, match="Too many open files"):  # an error of the application stays
            await client.post("/own")
        start, _ = await visit_socket(app, "/before")
        _, closed = await visit_socket(app, "/after")
        await engine.opened_sender.send(pattern(0, BIG))  # there are some again
        assert engine.opened_sender.discard_all()
    return answers[0], answers[1], start["status"], (closed["code"], closed["reason"])


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
