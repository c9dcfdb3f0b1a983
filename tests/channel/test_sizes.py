"""Large messages: limits of parts and bodies, and work that is left to threads."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
import torch
import zmq

from aiotensor import PeerLostError, ProtocolError, RemoteError, TooLargeError
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.protocol import exchange
from aiotensor.protocol.connection import Close
from aiotensor.protocol.exchange import (
    MAX_HEADER_BYTES,
    VERSION,
    Ask,
    ClientHello,
    ServerHello,
    read_from_server,
    write,
)
from aiotensor.protocol.parts import BODY_BYTES
from tests.channel.parties import Answer, Question, channel, place, said, settled
from tests.channel.rogues import hear, raw
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# `max_part_bytes`


_PART_BYTES = 50_000


TOO_LARGE: dict[str, Callable[[], dict[str, object]]] = {
    "a body": lambda: {"wish": "x" * 60_000},
    "a body of its own part": lambda: {"wish": "x" * 2 * BODY_BYTES},
    "a tensor": lambda: {"tensor": torch.zeros(60_000, dtype=torch.uint8)},
    "a tensor that has to be gathered": lambda: {"tensor": torch.zeros(300, 200, dtype=torch.uint8).t()},
}


@pytest.mark.promise(31)
@pytest.mark.parametrize("fields", TOO_LARGE.values(), ids=TOO_LARGE)
async def test_a_message_that_is_too_large_is_refused_before_it_is_sent(
    fields: Callable[[], dict[str, Any]],
) -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question, max_part_bytes=_PART_BYTES) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            other = asyncio.create_task(client.request(Question(1)))
            request = await anext(server)
            for call in (client.request, client.send):
                with pytest.raises(
                    TooLargeError, match=f"server accepts only max_part_bytes={_PART_BYTES}"
                ) as caught:
                    await call(Question(2, **fields()))
                assert caught.value.limit == _PART_BYTES
                assert caught.value.requested >= 60_000
            assert client.statistics().messages_sent == 1
            await request.reply(Answer(1))
            assert (await other).seed == 1
            assert client.statistics().servers_lost == 0


@pytest.mark.parametrize("kind", ["a body", "a tensor that has to be gathered"])
async def test_a_reply_that_is_too_large_can_be_replaced_or_fails_only_its_request(kind: str) -> None:
    fields = TOO_LARGE[kind]
    with place() as here, said():
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Question, max_part_bytes=_PART_BYTES) as client,
        ):
            others = [asyncio.create_task(client.request(Question(seed))) for seed in range(3)]
            waiting = [await anext(server) for _ in others]
            asking = asyncio.create_task(client.request(Question(7)))
            async with await anext(server) as request:
                with pytest.raises(
                    TooLargeError, match=f"client accepts only max_part_bytes={_PART_BYTES}"
                ) as caught:
                    await request.reply(Question(7, **fields()))
                assert caught.value.limit == _PART_BYTES
                assert caught.value.requested >= 60_000
                await request.reply(Question(8))
            assert (await asking).seed == 8
            asking = asyncio.create_task(client.request(Question(9)))
            async with await anext(server) as request:
                await request.reply(Question(9, **fields()))
            with pytest.raises(RemoteError, match=rf"6\d{{4}} bytes.*max_part_bytes={_PART_BYTES}") as remote:
                await asking
            assert remote.value.type_name == "TooLargeError"
            for request in waiting:
                await request.reply(request.message)
            assert [(await other).seed for other in others] == [0, 1, 2]
            assert client.statistics().servers_lost == 0


async def test_a_message_that_is_too_large_takes_no_permit_and_leaves_an_open_one_usable() -> None:
    async with channel(max_concurrent_videos=1, server={"max_part_bytes": _PART_BYTES}) as ends:
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


@pytest.mark.parametrize("limit", [None, 60_000])
async def test_a_part_of_exactly_max_part_bytes_is_accepted_in_both_directions(limit: int | None) -> None:
    tensor = torch.arange(60_000).to(torch.uint8)
    with place() as here:
        async with (
            MessageServer(here.messages, Question, max_part_bytes=limit) as server,
            MessageClient(here.messages, reply_type=Answer, max_part_bytes=limit) as client,
        ):
            asking = asyncio.create_task(client.request(Question(1, tensor)))
            request = await anext(server)
            assert request.message.tensor is not None
            assert torch.equal(request.message.tensor, tensor)
            await request.reply(Answer(1, tensor=tensor))
            got = await asking
            assert got.tensor is not None
            assert torch.equal(got.tensor, tensor)


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
    many = [torch.zeros(9_000, dtype=torch.uint8)] * 1025
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


@pytest.mark.promise(26)
async def test_a_client_that_exceeds_max_part_bytes_is_disconnected() -> None:
    async with channel(server={"max_part_bytes": _PART_BYTES}) as ends:
        async with raw(zmq.DEALER, ends.place.messages) as rogue:
            await rogue.send_multipart([write(ClientHello(VERSION, 1))])
            await until(lambda: ends.server.statistics().clients == 2)
            body = bytes(_PART_BYTES + MAX_HEADER_BYTES + 1)
            await rogue.send_multipart([write(Ask(0, None)), body])
            await until(lambda: ends.server.statistics().clients == 1)
        asking = asyncio.create_task(ends.client.request(Question(2)))
        await (await anext(ends.server)).reply(Answer(2))
        assert (await asking).seed == 2


# `max_body_bytes`


decoded: list[object] = []


class Seen(msgspec.Struct):
    """A message that records its decoding."""

    data: Any = None

    def __post_init__(self) -> None:
        decoded.append(self)


_BODY_BYTES = 1 << 20  # the default limit
LARGE_BODIES: dict[str, Callable[[], object]] = {
    "floats": lambda: [0.5] * 120_000,
    "bytes": lambda: bytes(_BODY_BYTES),
    "a text": lambda: "x" * _BODY_BYTES,
}


@pytest.mark.parametrize("make", LARGE_BODIES.values(), ids=LARGE_BODIES)
async def test_a_message_with_a_large_body_is_refused_before_it_is_sent(make: Callable[[], object]) -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Any) as server,
            MessageClient(here.messages, reply_type=int) as client,
        ):
            other = asyncio.create_task(client.request(1))
            request = await anext(server)
            for call in (client.request, client.send):
                with pytest.raises(
                    TooLargeError,
                    match=f"the server accepts only max_body_bytes={_BODY_BYTES}: put large data into "
                    "tensors or arrays, which are sent beside it, or raise this limit",
                ) as caught:
                    await call(make())
                assert caught.value.limit == _BODY_BYTES
                assert _BODY_BYTES < caught.value.requested < 2 * _BODY_BYTES
            assert client.statistics().messages_sent == 1
            await request.reply(2)
            assert await other == 2
            assert client.statistics().servers_lost == 0


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


@pytest.mark.parametrize("limit", [None, 3 << 20])
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
            await rogue.send_multipart([identity, write(exchange.Answer(0, None)), body])
            with pytest.raises(PeerLostError, match="more than the announced max_body_bytes=10000") as caught:
                await asking
            assert isinstance(caught.value.__cause__, ProtocolError)
            assert not decoded


TENSORS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "many of one number": lambda: [torch.tensor(float(number)) for number in range(6000)],
    "as many large ones as there may be, and small and empty ones": lambda: [
        *[torch.zeros(9000, dtype=torch.uint8)] * 1024,
        *[torch.full((1024,), 1.0)] * 300,
        *[torch.zeros(0)] * 4000,
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


# Threads


encoded_in: list[int] = []  # the threads, one for each probe


decoded_in: list[int] = []


freed_in: list[int] = []


@pytest.fixture(autouse=True)
def nothing_recorded() -> None:
    for records in (decoded, encoded_in, decoded_in, freed_in):
        records.clear()


class Probe(np.ndarray[Any, Any]):
    """An array that records in which thread it is encoded."""

    @property
    def __array_interface__(self) -> Any:  # which the encoder needs for an array that is read-only
        encoded_in.append(threading.get_ident())
        return super().__array_interface__


def probe() -> Probe:
    array = np.zeros(2).view(Probe)
    array.setflags(write=False)
    return array


class Mark(msgspec.Struct, weakref=True):
    """An object that records the threads in which it is made and freed."""

    note: str = ""

    def __post_init__(self) -> None:
        decoded_in.append(threading.get_ident())
        weakref.finalize(self, lambda: freed_in.append(threading.get_ident())).atexit = False


class Envelope(msgspec.Struct):
    data: Any = None
    mark: Mark | None = None
    probe: torch.Tensor | Any = None


class Plain(msgspec.Struct):
    value: Any


@attrs.define
class Attrs:
    value: Any


MANY = list(range(50_000))


# `tests/codec/test_cost.py` tests the estimates for all types.
LARGE: dict[str, Callable[[], object]] = {
    "bytes": lambda: bytes(1 << 20),
    "many short texts": lambda: ["x" * 1000] * 1000,
    "a dict": lambda: dict.fromkeys(map(str, MANY), 1),
    "many structs": lambda: [Plain(1)] * 5_000,
    "an attrs class": lambda: Attrs(MANY),
    "many tiny tensors": lambda: [torch.zeros(1)] * 300,
    "a tensor that has to be gathered": lambda: torch.zeros(2000, 1000).t(),
}


async def send_both_ways(question: object, reply: object) -> None:
    """Send a message in each direction, and a message without an answer."""
    with place() as here:
        async with (
            MessageServer(here.messages, Envelope, max_body_bytes=None) as server,
            MessageClient(here.messages, reply_type=Envelope, max_body_bytes=None) as client,
        ):
            for number in range(2):
                sending = asyncio.create_task((client.send if number else client.request)(question))
                async with await anext(server) as request:
                    if not number:
                        await request.reply(reply)
                await sending


@pytest.mark.promise(19)
@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
async def test_a_large_message_is_encoded_and_decoded_in_threads(make: Callable[[], object]) -> None:
    question, reply = Envelope(make(), Mark(), probe()), Envelope(make(), Mark(), probe())
    decoded_in.clear()
    await send_both_ways(question, reply)
    assert (len(encoded_in), len(decoded_in)) == (3, 3)
    assert threading.get_ident() not in encoded_in + decoded_in


@pytest.mark.parametrize("data", [[torch.zeros(2000), {"a": [1, 2.0, "b"]}], torch.zeros(200_000)])
async def test_a_small_message_is_encoded_and_decoded_on_the_loop(data: object) -> None:
    message = Envelope(data, Mark(), probe())
    decoded_in.clear()
    await send_both_ways(message, message)
    assert encoded_in == decoded_in == [threading.get_ident()] * 3


async def test_a_body_of_many_tiny_tensors_is_decoded_in_a_thread() -> None:
    empty = torch.zeros(0, dtype=torch.uint8)  # 20 bytes in a body
    few, many = Envelope([empty] * 120, Mark()), Envelope([empty] * 128, Mark())
    decoded_in.clear()
    await send_both_ways(few, few)
    assert decoded_in == [threading.get_ident()] * 3
    decoded_in.clear()
    await send_both_ways(many, many)
    assert len(decoded_in) == 3
    assert threading.get_ident() not in decoded_in


async def test_large_messages_without_other_references_are_freed_in_threads() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Envelope) as server,
            MessageClient(here.messages, reply_type=Envelope) as client,
        ):

            async def answer(message: Envelope) -> Envelope:
                return Envelope(MANY, Mark("answer"))

            serving = asyncio.create_task(server.serve(answer))
            got = await client.request(Envelope(MANY, Mark("question")))
            # The question, its decoded copy, and the answer; the caller has the decoded answer.
            await until(lambda: len(freed_in) == 3)
            assert threading.get_ident() not in freed_in
            del got
            assert freed_in[3:] == [threading.get_ident()]
            await server.aclose()
            await serving


async def test_a_large_message_that_cannot_be_encoded_or_decoded_is_freed_in_a_thread() -> None:
    with place() as here, said():
        async with (
            MessageServer(here.messages, dict[str, Mark]) as server,
            MessageClient(here.messages, reply_type=list[Mark]) as client,
        ):
            with pytest.raises(TypeError, match="cannot contain") as refused:
                await client.request([MANY, Mark(), object()])
            assert len(freed_in) == 1  # although the error is still here
            decoding = asyncio.create_task(anext(server))
            with pytest.raises(RemoteError, match="ProtocolError"):
                await client.request({**{str(number): Mark() for number in range(2000)}, "wrong": 1})
            await until(lambda: len(freed_in) == 4001)
            decoding.cancel()
            asking = asyncio.create_task(client.request({}))
            async with await anext(server) as request:
                await request.reply([*[Mark() for _ in range(2000)], 1])
            with pytest.raises(ProtocolError) as unreadable:
                await asking
            await until(lambda: len(freed_in) == 8001)
            assert threading.get_ident() not in freed_in
            del refused, unreadable
    await asyncio.wait([decoding])


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
