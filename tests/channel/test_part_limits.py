"""A message with a part larger than its receiver accepts fails alone, where it is sent."""

import asyncio
from collections.abc import Callable

import pytest
import torch
import zmq

from aiotensor import RemoteError, TooLargeError
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.integrations.problems import problem_of
from aiotensor.protocol.exchange import MAX_HEADER_BYTES, VERSION, Ask, ClientHello, write
from aiotensor.protocol.parts import BODY_BYTES
from tests.channel.parties import Answer, Question, channel, place, said, settled
from tests.channel.rogues import raw
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_LIMIT = 50_000

TOO_LARGE: dict[str, Callable[[], dict[str, object]]] = {
    "a body": lambda: {"wish": "x" * 60_000},
    "a body of its own part": lambda: {"wish": "x" * 2 * BODY_BYTES},
    "a tensor": lambda: {"tensor": torch.zeros(60_000, dtype=torch.uint8)},
    "a tensor that has to be gathered": lambda: {"tensor": torch.zeros(300, 200, dtype=torch.uint8).t()},
}


@pytest.mark.parametrize("fields", TOO_LARGE.values(), ids=TOO_LARGE)
async def test_a_too_large_reply_can_be_replaced_and_affects_no_other_request(
    fields: Callable[[], dict[str, object]],
) -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Question, max_part_bytes=_LIMIT) as client,
        ):
            others = [asyncio.create_task(client.request(Question(seed))) for seed in range(3)]
            waiting = [await anext(server) for _ in others]
            asking = asyncio.create_task(client.request(Question(7)))
            async with await anext(server) as request:
                with pytest.raises(
                    TooLargeError, match=f"client accepts only max_part_bytes={_LIMIT}"
                ) as caught:
                    await request.reply(Question(7, **fields()))  # type: ignore[arg-type]
                assert caught.value.limit == _LIMIT
                assert caught.value.requested >= 60_000
                await request.reply(Question(8))
            assert (await asking).seed == 8
            for request in waiting:
                await request.reply(request.message)
            assert [(await other).seed for other in others] == [0, 1, 2]
            assert client.statistics().servers_lost == 0


async def test_a_too_large_reply_raises_remote_error_with_sizes_and_maps_to_502() -> None:
    with place() as here, said():
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Answer, max_part_bytes=_LIMIT) as client,
        ):
            begun = asyncio.Event()

            async def answer(question: Question) -> Answer:
                if question.seed == 0:
                    await begun.wait()
                    return Answer(0)
                begun.set()
                return Answer(question.seed, tensor=torch.zeros(60_000, dtype=torch.uint8))

            serving = asyncio.create_task(server.serve(answer))
            other = asyncio.create_task(client.request(Question(0)))
            with pytest.raises(RemoteError, match=rf"60000 bytes.*max_part_bytes={_LIMIT}") as caught:
                await client.request(Question(1))
            assert caught.value.type_name == "TooLargeError"
            problem = problem_of(caught.value, 1)
            assert problem is not None
            assert problem.status == 502
            assert (await other).seed == 0
            assert client.statistics().servers_lost == 0
            await server.aclose()
            await serving


@pytest.mark.parametrize("fields", TOO_LARGE.values(), ids=TOO_LARGE)
@pytest.mark.parametrize("how", ["request", "send"])
async def test_a_message_that_is_too_large_is_refused_before_it_is_sent(
    how: str, fields: Callable[[], dict[str, object]]
) -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question, max_part_bytes=_LIMIT) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            other = asyncio.create_task(client.request(Question(1)))
            request = await anext(server)
            call = client.request if how == "request" else client.send
            with pytest.raises(TooLargeError, match=f"server accepts only max_part_bytes={_LIMIT}") as caught:
                await call(Question(2, **fields()))  # type: ignore[arg-type]
            assert caught.value.limit == _LIMIT
            assert caught.value.requested >= 60_000
            assert client.statistics().messages_sent == 1
            await request.reply(Answer(1))
            assert (await other).seed == 1
            assert client.statistics().servers_lost == 0


async def test_a_message_that_is_too_large_takes_no_permit_and_leaves_an_open_one_usable() -> None:
    async with channel(max_concurrent_videos=1, server={"max_part_bytes": _LIMIT}) as ends:
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


@pytest.mark.parametrize("limit", [None, 2**70, 60_000])
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


async def test_a_client_that_exceeds_max_part_bytes_is_disconnected() -> None:
    async with channel(server={"max_part_bytes": _LIMIT}) as ends:
        async with raw(zmq.DEALER, ends.place.messages) as rogue:
            await rogue.send_multipart([write(ClientHello(VERSION, 1))])
            await until(lambda: ends.server.statistics().clients == 2)
            body = bytes(_LIMIT + MAX_HEADER_BYTES + 1)
            await rogue.send_multipart([write(Ask(0, None)), body])
            await until(lambda: ends.server.statistics().clients == 1)
        asking = asyncio.create_task(ends.client.request(Question(2)))
        await (await anext(ends.server)).reply(Answer(2))
        assert (await asking).seed == 2
