"""Web servers with a wrong key: each request gets a problem, and the servers end without an error."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
import pytest
import zmq
from aiohttp import web
from fastapi import Depends, FastAPI

from aiotensor import ClosedError, TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.integrations.aiohttp import client_context, problem_middleware
from aiotensor.integrations.fastapi import MessageLifespan
from aiotensor.integrations.serving import serving
from tests.channel.parties import Answer, Question
from verification.patterns import pattern
from verification.places import free_port

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

CLIENT = web.AppKey("client", MessageClient[Answer])


@asynccontextmanager
async def client_with_a_wrong_key() -> AsyncIterator[Callable[[], MessageClient[Answer]]]:
    """Open a server, and yield a function that makes a client whose key the server does not accept."""
    (key, secret), (accepted, _), (_, wrong) = (zmq.curve_keypair() for _ in range(3))
    async with MessageServer(
        "tcp://127.0.0.1:0", Question, secret_key=secret, client_keys=[accepted]
    ) as server:
        address = server.address
        yield lambda: MessageClient(address, reply_type=Answer, secret_key=wrong, server_key=key)


async def check_answers(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiotensor.integrations")
    for _ in range(2):
        caplog.clear()
        answer = await http.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (500, "refused")
        assert answer.headers["content-type"] == "application/problem+json"
        assert "retry-after" not in answer.headers
        [record] = [record for record in caplog.records if record.name == "aiotensor.integrations"]
        assert record.levelno == logging.ERROR
        assert record.getMessage().startswith(
            "a request was answered with 500 because of AccessDeniedError: the keys of this client"
        )
        assert record.exc_info is None


async def test_a_fastapi_server_with_a_wrong_key_answers_with_problems(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client_with_a_wrong_key() as make_client:
        engine = MessageLifespan(make_client)
        app = FastAPI(lifespan=engine.lifespan)
        engine.install(app)

        @app.get("/ready")
        async def ready(client: Annotated[MessageClient[Answer], Depends(engine.client)]) -> None:
            await client.ready()

        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http,
        ):
            await check_answers(http, caplog)


async def test_an_aiohttp_server_with_a_wrong_key_answers_with_problems(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ready(request: web.Request) -> web.Response:
        await request.app[CLIENT].ready()
        raise AssertionError("the server does not accept the key")

    async with client_with_a_wrong_key() as make_client:
        app = web.Application(middlewares=[problem_middleware()])
        app.cleanup_ctx.append(client_context(CLIENT, make_client))
        app.router.add_get("/ready", ready)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
                await check_answers(http, caplog)
        finally:
            await runner.cleanup()


async def test_a_server_whose_key_is_not_accepted_while_it_drains_ends_without_an_error() -> None:
    (key, secret), (accepted, _), (_, wrong) = (zmq.curve_keypair() for _ in range(3))
    address = f"tcp://127.0.0.1:{free_port()}"

    def make() -> TensorSender:
        return TensorSender(address, secret_key=wrong, server_key=key)

    async with TensorReceiver(address, secret_key=secret, client_keys=[accepted]):
        async with serving(make, 3600.0, "sender_context", "client_context") as sender:
            message = await sender.message().__aenter__()  # in flight while the server drains
        with pytest.raises(ClosedError):
            await message.send(pattern(1, 5))
