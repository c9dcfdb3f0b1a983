"""The lifespan opens, drains and closes its objects, answers their errors, and reports misuse."""

import asyncio
import json
import logging
import os
from typing import Annotated, TypeAlias

import httpx
import pytest
import torch
import zmq
from fastapi import Depends, FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
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
from aiotensor.integrations.serving import serving
from tests.channel.parties import Answer, Question, channel
from tests.pairs import endpoint
from tests.transports.unix_ends import no_descriptors
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def http(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


async def test_a_starlette_handler_can_use_the_sender_of_its_application() -> None:
    with endpoint() as place:
        engine = TensorLifespan(lambda: TensorSender(place))

        async def handler(request: Request) -> Response:
            handle = await (await engine.sender(request)).send(pattern(1, 5))
            return PlainTextResponse(handle.sender)

        app = Starlette(routes=[Route("/", handler)], lifespan=engine.lifespan)
        engine.install(app)
        async with TensorReceiver(place) as receiver, app.router.lifespan_context(app), http(app) as client:
            asked = await client.get("/")
            assert asked.text == engine.opened_sender.id
            delivery = await anext(receiver)
            assert delivery.handle.sender == asked.text
        with pytest.raises(UsageError, match="the application is not running"):
            _ = engine.opened_sender


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


async def test_a_message_lost_when_its_handler_returned_is_answered_with_503() -> None:
    async with channel() as ends:
        engine: MessageLifespan[Answer] = MessageLifespan(
            lambda: MessageClient(
                ends.place.messages, sender=TensorSender(ends.place.tensors), reply_type=Answer
            )
        )
        app = FastAPI(lifespan=engine.lifespan)
        engine.install(app)

        @app.get("/")
        async def handler(permit: Annotated[Permit, Depends(engine.permit, scope="function")]) -> None:
            await permit.allocate((3,), torch.uint8)
            [sender] = engine.opened_client.senders
            assert sender.discard_all() == 1

        async with app.router.lifespan_context(app), http(app) as client:
            answer = await client.get("/")
            assert (answer.status_code, answer.json()["reason"]) == (503, "engine_lost")


async def test_a_function_for_the_other_lifespan_is_rejected_at_the_start() -> None:
    one = TensorLifespan(lambda: MessageClient("ipc:///tmp/nobody", reply_type=Answer))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="TensorLifespan returned a MessageClient: use MessageLifespan"):
        await one.lifespan(None).__aenter__()
    other: MessageLifespan[Answer] = MessageLifespan(lambda: TensorSender("unix:///tmp/nobody"))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="MessageLifespan returned a TensorSender: use TensorLifespan"):
        await other.lifespan(None).__aenter__()


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


async def test_a_server_with_a_wrong_key_answers_each_request_with_a_problem(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "aiotensor.integrations")
    (key, secret), (accepted, _), (_, wrong) = (zmq.curve_keypair() for _ in range(3))
    async with MessageServer(
        "tcp://127.0.0.1:0", Question, secret_key=secret, client_keys=[accepted]
    ) as server:
        engine: MessageLifespan[Answer] = MessageLifespan(
            lambda: MessageClient(server.address, reply_type=Answer, secret_key=wrong, server_key=key)
        )
        app = FastAPI(lifespan=engine.lifespan)
        engine.install(app)

        @app.get("/ready")
        async def ready(client: Annotated[MessageClient[Answer], Depends(engine.client)]) -> None:
            await client.ready()

        async with app.router.lifespan_context(app), http(app) as client:
            for _ in range(2):
                caplog.clear()
                answer = await client.get("/ready")
                assert (answer.status_code, answer.json()["reason"]) == (500, "refused")
                assert "retry-after" not in answer.headers
                [record] = [one for one in caplog.records if one.name == "aiotensor.integrations"]
                assert record.levelno == logging.ERROR
                assert "AccessDeniedError: the keys of this client" in record.getMessage()
                assert record.exc_info is None


# Exhausted descriptors

Exhausted: TypeAlias = tuple[int, str | None, str]


async def _send_without_descriptors(sender: TensorSender) -> None:
    await sender.ready()  # without descriptors it could not connect, and would wait for that
    with no_descriptors():
        await sender.send(pattern(0, BIG))  # whose memory needs one


def _of(answer: httpx.Response) -> Exhausted:
    return answer.status_code, answer.headers.get("retry-after"), answer.json()["reason"]


async def test_the_status_is_503_when_a_call_of_the_library_finds_no_descriptors(address: str) -> None:
    async with peers.peers(address, 1) as [child]:  # whose descriptors are exhausted
        handler, dependency, socket, accepted = await child.call(_ask_without_descriptors)
    assert handler == dependency == (503, "7", "exhausted")
    assert socket == 503
    assert accepted == (1013, "exhausted")


async def _ask_without_descriptors(state: peers.State) -> tuple[Exhausted, Exhausted, int, tuple[int, str]]:
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


# The end of a server

NAMES = ("TensorLifespan", "MessageLifespan")


async def test_a_receiver_lost_while_a_server_ends_is_neither_logged_nor_awaited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with endpoint() as place:
        async with (
            TensorReceiver(place) as receiver,
            serving(lambda: TensorSender(place), 3600.0, *NAMES) as sender,
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
            async with serving(lambda: TensorSender(place), 0.01, *NAMES) as sender:
                for seed in range(3):
                    await sender.send(pattern(seed, 5))
                await until(lambda: receiver.statistics().unclaimed_tensors == 3)
            await until(lambda: receiver.statistics().messages_discarded == 3)
    [record] = [record for record in caplog.records if record.name == "aiotensor.integrations"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("3 messages were not taken within 0.01 s")
