"""A body larger than its receiver accepts is not sent, and never decoded; its tensors do not count."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import zmq

from aiotensor import PeerLostError, ProtocolError, RemoteError, TooLargeError
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.protocol.connection import Close
from aiotensor.protocol.exchange import (
    VERSION,
    Answer,
    Ask,
    ClientHello,
    ServerHello,
    read_from_server,
    write,
)
from aiotensor.protocol.parts import BODY_BYTES
from aiotensor.runtime.worker import in_thread
from tests.channel import parties
from tests.channel.parties import Question, channel, place, said, settled
from tests.channel.rogues import hear, raw
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_LIMIT = 1 << 20  # the default

decoded: list[object] = []


class Seen(msgspec.Struct):
    """A message that records its decoding."""

    data: Any = None

    def __post_init__(self) -> None:
        decoded.append(self)


@pytest.fixture(autouse=True)
def nothing_decoded() -> None:
    decoded.clear()


LARGE: dict[str, Callable[[], object]] = {
    "floats": lambda: [0.5] * 120_000,
    "bytes": lambda: bytes(_LIMIT),
    "a text": lambda: "x" * _LIMIT,
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("how", ["request", "send"])
async def test_a_message_with_a_large_body_is_refused_before_it_is_sent(
    how: str, make: Callable[[], object]
) -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Any) as server,
            MessageClient(here.messages, reply_type=int) as client,
        ):
            other = asyncio.create_task(client.request(1))
            request = await anext(server)
            call = client.request if how == "request" else client.send
            with pytest.raises(
                TooLargeError,
                match=f"the server accepts only max_body_bytes={_LIMIT}: put large data into tensors or "
                "arrays, which are sent beside it, or raise this limit",
            ) as caught:
                await call(make())
            assert caught.value.limit == _LIMIT
            assert _LIMIT < caught.value.requested < 2 * _LIMIT
            assert client.statistics().messages_sent == 1
            await request.reply(2)
            assert await other == 2
            assert client.statistics().servers_lost == 0


async def test_a_message_with_a_large_body_takes_no_permit() -> None:
    async with channel(max_concurrent_videos=1) as ends:
        with pytest.raises(TooLargeError, match="max_body_bytes"):
            await ends.client.request(Question(1, pattern(1, BIG), wish="x" * _LIMIT))
        assert ends.sender.statistics().tensors_sent == 0
        asking = asyncio.create_task(ends.client.request(Question(2, pattern(1, BIG))))
        await (await anext(ends.server)).reply(parties.Answer(2))
        assert (await asking).seed == 2
        await settled(ends)


async def test_a_reply_with_a_large_body_can_be_replaced_or_fails_only_its_request() -> None:
    with place() as here, said():
        async with (
            MessageServer(here.messages, Any) as server,
            MessageClient(here.messages, reply_type=str, max_body_bytes=1000) as client,
        ):
            asking = asyncio.create_task(client.request(1))
            async with await anext(server) as request:
                with pytest.raises(TooLargeError, match="the client accepts only max_body_bytes=1000"):
                    await request.reply("x" * 1000)
                await request.reply("x" * 997)  # and three bytes for its length
            assert await asking == "x" * 997
            asking = asyncio.create_task(client.request(2))
            async with await anext(server) as request:
                await request.reply("x" * 1000)
            with pytest.raises(RemoteError, match=r"1003 bytes.*max_body_bytes=1000") as caught:
                await asking
            assert caught.value.type_name == "TooLargeError"
            assert client.statistics().servers_lost == 0


@pytest.mark.parametrize("limit", [None, 2**70, 3 << 20])
async def test_a_body_of_exactly_max_body_bytes_is_accepted_in_both_directions(limit: int | None) -> None:
    body = bytes((3 << 20) - 5)  # and five for its length
    with place() as here:
        async with (
            MessageServer(here.messages, bytes, max_body_bytes=limit) as server,
            MessageClient(here.messages, reply_type=bytes, max_body_bytes=limit) as client,
        ):
            asking = asyncio.create_task(client.request(body))
            request = await anext(server)
            assert request.message == body
            await request.reply(body)
            assert await asking == body


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
            await rogue.send_multipart([identity, write(Answer(0, None)), body])
            with pytest.raises(PeerLostError, match="more than the announced max_body_bytes=10000") as caught:
                await asking
            assert isinstance(caught.value.__cause__, ProtocolError)
            assert not decoded


TENSORS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "many of one number": lambda: [torch.tensor(float(number)) for number in range(60_000)],
    "some of 4 KiB": lambda: [torch.full((1024,), float(number)) for number in range(600)],
    "empty ones": lambda: [torch.zeros(0)] * 60_000,
    "as many large ones as there may be, and small ones": lambda: [
        *[torch.zeros(9000, dtype=torch.uint8)] * 1024,
        *[torch.full((1024,), 1.0)] * 300,
    ],
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
async def test_tensors_do_not_count_towards_max_body_bytes(make: Callable[[], list[torch.Tensor]]) -> None:
    tensors = make()
    total = sum(float(tensor.sum()) for tensor in tensors)
    with place() as here:
        async with (
            MessageServer(here.messages, list[torch.Tensor]) as server,
            MessageClient(here.messages, reply_type=list[torch.Tensor]) as client,
        ):
            asking = asyncio.create_task(client.request(tensors))
            async with await anext(server) as request:
                assert [len(tensor) for tensor in request.message if tensor.dim()] == [
                    len(tensor) for tensor in tensors if tensor.dim()
                ]
                assert sum(float(tensor.sum()) for tensor in request.message) == total
                await request.reply(request.message)
            assert sum(float(tensor.sum()) for tensor in await asking) == total


async def test_empty_tensors_do_not_count_towards_max_body_bytes_with_a_sender() -> None:
    empty = [torch.zeros(0)] * 60_000
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG), {"empty": empty})))
        request = await anext(ends.server)
        assert len(request.message.more["empty"]) == len(empty)
        assert request.message.tensor is not None
        assert torch.equal(request.message.tensor, pattern(1, BIG))
        await request.reply(parties.Answer(1))
        assert (await asking).seed == 1
        del request
        await settled(ends)


async def test_packed_tensors_count_as_one_part() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, list[torch.Tensor], max_part_bytes=BODY_BYTES * 2) as server,
            MessageClient(here.messages, reply_type=Any) as client,
        ):
            with pytest.raises(
                TooLargeError, match="or all small tensors together, of this message"
            ) as caught:
                await client.request([torch.zeros(1024)] * 300)
            assert caught.value.limit == BODY_BYTES * 2
            sending = asyncio.create_task(client.send([torch.zeros(1024)] * 32))
            assert len((await anext(server)).message) == 32
            await sending


@pytest.mark.parametrize("count", [100, 200])
async def test_packed_tensors_are_decoded_on_the_loop_only_if_there_are_few(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_threads: list[object] = []

    async def noted(work: Callable[..., object], *args: object) -> object:
        in_threads.append(work)
        return await in_thread(work, *args)

    monkeypatch.setattr("aiotensor.codec.payload.in_thread", noted)
    record = msgspec.msgpack.encode(["in", ["uint8", [0]], b""])
    body = msgspec.msgpack.encode([msgspec.msgpack.Ext(84, b"\xa2pk")] * count)
    pack = (len(record).to_bytes(2, "big") + record) * count
    with place() as here:
        async with (
            MessageServer(here.messages, list[torch.Tensor]) as server,
            raw(zmq.DEALER, here.messages) as rogue,
        ):
            await rogue.send_multipart([write(ClientHello(VERSION, 1))])
            await rogue.send_multipart([write(Ask(0, memoryview(body))), pack])
            assert len((await anext(server)).message) == count
    assert bool(in_threads) == (count > 128)
