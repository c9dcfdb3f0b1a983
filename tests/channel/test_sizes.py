"""Limits of the parts and bodies of messages."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import zmq

from aiotensor import PeerLostError, ProtocolError, RemoteError, TooLargeError
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.codec.payload import Payload
from aiotensor.protocol import exchange
from aiotensor.protocol.exchange import (
    VERSION,
    Ask,
    ClientHello,
    ServerHello,
    read_from_server,
    write,
)
from aiotensor.protocol.frames import Close
from aiotensor.protocol.parts import BODY_BYTES
from tests.channel.parties import Answer, Question, channel, place, said, settled
from tests.channel.rogues import hear, raw
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# `max_part_bytes` and `max_body_bytes`


LIMIT = 50_000
TOO_LARGE: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    ("max_part_bytes", lambda: {"wish": "x" * 60_000}),
    ("max_part_bytes", lambda: {"wish": "x" * 2 * BODY_BYTES}),
    ("max_part_bytes", lambda: {"tensor": torch.zeros(60_000, dtype=torch.uint8)}),
    ("max_part_bytes", lambda: {"tensor": torch.zeros(300, 400, dtype=torch.uint8)[:, ::2]}),
    (
        "max_part_bytes",
        lambda: {"more": {"packed": list(torch.zeros(20, 1024))}},
    ),  # they are sent as one part
    ("max_body_bytes", lambda: {"wish": "x" * 60_000}),
    ("max_body_bytes", lambda: {"more": {str(number): [] for number in range(20_000)}}),
]
too_large = pytest.mark.parametrize(("name", "make"), TOO_LARGE)


@pytest.mark.promise(31)
@too_large
async def test_a_message_that_is_too_large_is_refused_before_it_is_sent(
    name: str, make: Callable[[], dict[str, Any]]
) -> None:
    limits: dict[str, Any] = {name: LIMIT}
    with place() as here:
        async with (
            MessageServer(here.messages, Question, **limits) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            other = asyncio.create_task(client.request(Question(1)))
            request = await anext(server)
            for call in (client.request, client.send):
                with pytest.raises(TooLargeError, match=f"server accepts only {name}={LIMIT}") as caught:
                    await call(Question(2, **make()))
                assert caught.value.limit == LIMIT
                assert caught.value.requested >= 60_000
            assert client.statistics().messages_sent == 1
            await request.reply(Answer(1))
            assert (await other).seed == 1
            assert client.statistics().servers_lost == 0


async def test_a_long_text_or_bytes_beyond_the_limit_are_refused_before_they_are_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("encoding would hold the GIL")

    with place() as here:
        async with (
            MessageServer(here.messages, Any, max_body_bytes=LIMIT) as server,
            MessageClient(here.messages, reply_type=list[Any], max_body_bytes=LIMIT) as client,
        ):
            asking = asyncio.create_task(client.request(1))
            request = await anext(server)
            with monkeypatch.context() as patch:
                patch.setattr(Payload, "encode", fail)
                for message in (
                    b"x" * 200_000,
                    {"name": ["x" * 100_000] * 2},
                    Question(1, wish="x" * 200_000),
                ):
                    for call in (client.request, client.send, request.reply):
                        with pytest.raises(TooLargeError, match=f"accepts only max_body_bytes={LIMIT}"):
                            await call(message)
            await request.reply([2])
            assert await asking == [2]


@too_large
async def test_a_reply_that_is_too_large_can_be_replaced_or_fails_only_its_request(
    name: str, make: Callable[[], dict[str, Any]]
) -> None:
    limits: dict[str, Any] = {name: LIMIT}
    with place() as here, said():
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Question, **limits) as client,
        ):
            others = [asyncio.create_task(client.request(Question(seed))) for seed in range(3)]
            waiting = [await anext(server) for _ in others]
            asking = asyncio.create_task(client.request(Question(7)))
            async with await anext(server) as request:
                with pytest.raises(TooLargeError, match=f"client accepts only {name}={LIMIT}"):
                    await request.reply(Question(7, **make()))
                await request.reply(Question(8))
            assert (await asking).seed == 8
            asking = asyncio.create_task(client.request(Question(9)))
            async with await anext(server) as request:
                await request.reply(Question(9, **make()))
            with pytest.raises(RemoteError, match=rf"bytes.*{name}={LIMIT}") as caught:
                await asking
            assert caught.value.type_name == "TooLargeError"
            for request in waiting:
                await request.reply(request.message)
            assert [(await other).seed for other in others] == [0, 1, 2]
            assert client.statistics().servers_lost == 0


@pytest.mark.parametrize("limit", [None, 60_000])
async def test_a_message_of_exactly_the_limit_is_accepted_in_both_directions(limit: int | None) -> None:
    tensor, text = torch.arange(60_000).to(torch.uint8), "x" * (60_000 - 3)  # and three bytes for its length
    with place() as here:
        async with (
            MessageServer(here.messages, str, max_body_bytes=limit) as texts,
            MessageClient(here.messages, reply_type=str, max_body_bytes=limit) as client,
        ):
            asking = asyncio.create_task(client.request(text))
            request = await anext(texts)
            await request.reply(request.message)
            assert await asking == text
        async with (
            MessageServer(here.messages, torch.Tensor, max_part_bytes=limit) as tensors,
            MessageClient(here.messages, reply_type=torch.Tensor, max_part_bytes=limit) as another,
        ):
            sending = asyncio.create_task(another.request(tensor))
            received = await anext(tensors)
            await received.reply(received.message)
            assert torch.equal(await sending, tensor)


async def test_a_message_that_is_too_large_takes_no_permit_and_leaves_an_open_one_usable() -> None:
    async with channel(max_concurrent_videos=1, server={"max_part_bytes": LIMIT}) as ends:
        tensor = pattern(1, BIG)  # travels by the sender, where the limit does not apply
        with pytest.raises(TooLargeError):
            await ends.client.request(Question(1, tensor, wish="x" * 60_000))
        assert ends.sender.statistics().tensors_sent == 0
        async with ends.sender.message() as permit:
            with pytest.raises(TooLargeError):
                await ends.client.request(Question(1, tensor, wish="x" * 60_000), inside=permit)
            asking = asyncio.create_task(ends.client.request(Question(2, tensor), inside=permit))
            request = await anext(ends.server)
            assert request.message.tensor is not None
            assert torch.equal(request.message.tensor, tensor)
            await request.reply(Answer(2))
            assert (await asking).seed == 2
        del request
        await settled(ends)


async def test_an_error_whose_text_is_longer_than_the_limit_arrives() -> None:
    with place() as here, said():
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Answer, max_part_bytes=100) as client,
        ):
            asking = asyncio.create_task(client.request(Question(1)))
            async with await anext(server):
                raise ValueError("x" * 10_000)
            with pytest.raises(RemoteError, match=r"x{10000}"):
                await asking
            assert client.statistics().servers_lost == 0


async def test_more_large_tensors_than_a_message_may_have_are_refused_before_it_is_sent() -> None:
    many = list(torch.zeros(1025, 9_000, dtype=torch.uint8))
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Question) as client,
        ):
            other = asyncio.create_task(client.request(Question(1)))
            request = await anext(server)
            with pytest.raises(TooLargeError, match="1025") as caught:
                await client.request(Question(2, more={"x": many}))
            assert (caught.value.limit, caught.value.requested) == (1024, 1025)
            with pytest.raises(TooLargeError, match="1025"):
                await request.reply(Question(2, more={"x": many}))
            await request.reply(Question(3, more={"x": many[1:]}))
            assert len((await other).more["x"]) == 1024


decoded: list[object] = []


@pytest.fixture(autouse=True)
def nothing_decoded() -> None:
    decoded.clear()


class Seen(msgspec.Struct):
    """A message that records its decoding."""

    data: Any = None

    def __post_init__(self) -> None:
        decoded.append(self)


@pytest.mark.promise(24, 26)
async def test_a_client_that_ignores_the_limit_is_disconnected_and_its_body_is_never_decoded() -> None:
    with place() as here, said() as texts:
        async with (
            MessageServer(here.messages, Seen, max_body_bytes=10_000) as server,
            MessageClient(here.messages, reply_type=int) as client,
            raw(zmq.DEALER, here.messages) as rogue,
        ):
            await rogue.send_multipart([write(ClientHello(VERSION, 1))])
            hello = read_from_server((await rogue.recv_multipart())[0])
            assert isinstance(hello, ServerHello)
            assert hello.max_body_bytes == 10_000
            body = msgspec.msgpack.encode({"data": bytes(10_000)})
            await rogue.send_multipart([write(Ask(0, None)), body])
            close = read_from_server((await rogue.recv_multipart())[0])
            assert isinstance(close, Close)
            assert "more than the announced max_body_bytes=10000" in close.reason
            await until(lambda: server.statistics().clients <= 1)
            assert server.statistics().messages_received == 0
            asking = asyncio.create_task(client.request(Seen(1)))
            await (await anext(server)).reply(2)
            assert await asking == 2
            assert [seen.data for seen in decoded if isinstance(seen, Seen)] == [1, 1]  # made here, and there
        assert any("broke the protocol" in text and "it sent a body of" in text for text in texts)


async def test_a_server_that_ignores_the_limit_is_lost_and_its_body_is_never_decoded() -> None:
    body = msgspec.msgpack.encode({"data": bytes(10_000)})
    with place() as here, said():
        async with (
            raw(zmq.ROUTER, here.messages, binds=True) as rogue,
            MessageClient(here.messages, reply_type=Seen, max_body_bytes=10_000) as client,
        ):
            identity, hello = await hear(rogue)
            assert isinstance(hello, ClientHello)
            assert hello.max_body_bytes == 10_000
            await rogue.send_multipart([identity, write(ServerHello(VERSION, 77))])
            asking = asyncio.create_task(client.request(1))
            await hear(rogue)
            await rogue.send_multipart([identity, write(exchange.Answer(0, None)), body])
            with pytest.raises(PeerLostError, match="more than the announced max_body_bytes=10000") as caught:
                await asking
            assert isinstance(caught.value.__cause__, ProtocolError)
            assert not decoded


TENSORS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "many of one number": lambda: [torch.tensor(float(number)) for number in range(6000)],
    "as many large ones as there may be, and small and empty ones": lambda: [
        *torch.zeros(1024, 9000, dtype=torch.uint8),
        *torch.ones(300, 1024),
        *torch.zeros(4000, 0),
    ],
}


@pytest.mark.promise(27)
@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
async def test_tensors_do_not_count_towards_max_body_bytes(make: Callable[[], list[torch.Tensor]]) -> None:
    tensors = make()
    total = sum(float(tensor.sum()) for tensor in tensors)
    with place() as here:
        async with (
            MessageServer(here.messages, list[torch.Tensor], max_body_bytes=120_000) as server,
            MessageClient(here.messages, reply_type=list[torch.Tensor], max_body_bytes=120_000) as client,
        ):
            asking = asyncio.create_task(client.request(tensors))
            async with await anext(server) as request:
                assert [len(tensor) for tensor in request.message if tensor.dim()] == [
                    len(tensor) for tensor in tensors if tensor.dim()
                ]
                assert sum(float(tensor.sum()) for tensor in request.message) == total
                await request.reply(request.message)
            assert sum(float(tensor.sum()) for tensor in await asking) == total


async def test_a_message_that_contains_itself_raises_recursion_error() -> None:
    endless: list[object] = []
    endless.append(endless)
    with place() as here:
        async with (
            MessageServer(here.messages, Any),
            MessageClient(here.messages, reply_type=Any) as client,
        ):
            with pytest.raises(RecursionError):
                await client.request(endless)
