"""The lifespan opens, drains and closes its objects, answers their errors, and reports misuse."""

import asyncio
import json
import logging
from typing import Annotated, TypeAlias

import httpx
import pytest
import torch
from fastapi import Depends, FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.types import Message, Scope

from aiotensor import (
    AioTensorError,
    OpenMessage,
    RemoteError,
    TensorReceiver,
    TensorSender,
    UsageError,
    WouldBlockError,
)
from aiotensor.channel import MessageClient, MessageServer, Permit
from aiotensor.integrations.fastapi import MessageLifespan, TensorLifespan
from aiotensor.integrations.web import serving
from tests.channel.parties import Answer, Question
from tests.channel.parties import serving as answering
from tests.pairs import endpoint
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def http(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


async def test_a_permit_is_acquired_before_the_handler_and_released_by_its_error() -> None:
    with endpoint() as place:
        engine = TensorLifespan(lambda: TensorSender(place, 1, max_wait_s=0.02))
        FreePermit: TypeAlias = Annotated[OpenMessage, Depends(engine.permit, scope="function")]
        app = FastAPI(lifespan=engine.lifespan)
        engine.install(app)
        go = asyncio.Event()

        @app.get("/wait")
        async def wait(permit: FreePermit) -> None:
            await permit.send(pattern(1, 5))
            await go.wait()
            raise ValueError("the handler fails")

        async with TensorReceiver(place) as receiver, app.router.lifespan_context(app), http(app) as client:
            waiting = asyncio.create_task(client.get("/wait"))
            await until(lambda: engine.opened_sender.statistics().tensors_sent == 1)
            refused = await client.get("/wait")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            go.set()
            with pytest.raises(ValueError, match="the handler fails"):
                await waiting
            await until(lambda: engine.opened_sender.statistics().in_flight == 0)
            await until(lambda: receiver.statistics().messages_discarded == 1)


async def test_a_handler_with_a_permit_fills_its_memory_and_gets_the_answer() -> None:
    with endpoint("unix") as place:
        engine: MessageLifespan[Answer] = MessageLifespan(lambda: MessageClient(place, Answer, 1))
        app = FastAPI(lifespan=engine.lifespan)
        engine.install(app)

        @app.get("/")
        async def handler(
            client: Annotated[MessageClient[Answer], Depends(engine.client)],
            permit: Annotated[Permit, Depends(engine.permit, scope="function")],
        ) -> int:
            assert client is engine.opened_client
            tensor = await permit.allocate((BIG,), torch.int64)
            tensor.copy_(pattern(1, BIG))
            return (await client.request(Question(1, tensor), inside=permit)).total

        async with (
            MessageServer(place, Question) as server,
            answering(server),
            app.router.lifespan_context(app),
            http(app) as client,
        ):
            assert (await client.get("/")).json() == int(pattern(1, BIG).sum())
            statistics = engine.opened_client.statistics()
            assert (statistics.in_flight, statistics.tensors_copied) == (0, 0)
            await until(lambda: engine.opened_client.statistics().bytes_in_use == 0)


async def test_a_request_without_the_lifespan_raises_usage_error() -> None:
    engine = TensorLifespan(lambda: TensorSender("unix:///tmp/nobody"))
    app = FastAPI()
    engine.install(app)

    @app.get("/")
    async def handler(sender: Annotated[TensorSender, Depends(engine.sender)]) -> None:
        raise AssertionError("there is no sender")

    async with http(app) as client:
        with pytest.raises(UsageError, match="pass it the lifespan"):
            await client.get("/")


async def visit_socket(app: Starlette, path: str) -> list[Message]:
    """Open a web socket, and return the messages that it receives."""
    heard: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        heard.append(message)

    scope: Scope = {
        "type": "websocket",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "scheme": "ws",
        "root_path": "",
        "subprotocols": [],
        "extensions": {"websocket.http.response": {}},
    }
    await app(scope, receive, send)
    return heard


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (WouldBlockError("busy"), 503, 1013),
        (RemoteError("a bug", type_name="ValueError"), 502, 1011),
    ],
    ids=["busy", "failed"],
)
async def test_an_error_refuses_a_web_socket_or_closes_an_accepted_one(
    error: AioTensorError, status: int, code: int
) -> None:
    engine = TensorLifespan(lambda: TensorSender("unix:///tmp/nobody"))
    app = FastAPI()
    engine.install(app)

    @app.websocket("/before")
    async def before(socket: WebSocket) -> None:
        raise error

    @app.websocket("/after")
    async def after(socket: WebSocket) -> None:
        await socket.accept()
        raise error

    start, body = await visit_socket(app, "/before")
    assert (start["type"], start["status"]) == ("websocket.http.response.start", status)
    reason = json.loads(body["body"])["reason"]
    accepted, closed = await visit_socket(app, "/after")
    assert accepted["type"] == "websocket.accept"
    assert closed == {"type": "websocket.close", "code": code, "reason": reason}


# The end of a server


async def test_a_receiver_lost_while_a_server_ends_is_neither_logged_nor_awaited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with endpoint() as place:
        async with (
            TensorReceiver(place) as receiver,
            serving(lambda: TensorSender(place), 3600.0) as sender,
        ):
            await sender.send(pattern(1, 5))
            await until(lambda: receiver.statistics().unclaimed_tensors == 1)
            closing = asyncio.create_task(receiver.aclose())
        await closing
    told = [record for record in caplog.records if record.name == "aiotensor.integrations"]
    assert told == []


async def test_messages_not_taken_within_the_drain_time_are_discarded_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with endpoint() as place:
        async with TensorReceiver(place) as receiver:
            async with serving(lambda: TensorSender(place), 0.01) as sender:
                for seed in range(3):
                    await sender.send(pattern(seed, 5))
                await until(lambda: receiver.statistics().unclaimed_tensors == 3)
            await until(lambda: receiver.statistics().messages_discarded == 3)
    [record] = [record for record in caplog.records if record.name == "aiotensor.integrations"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("3 messages were not taken within 0.01 s")
