"""A request waits for its server, and for room at it, no longer than `max_wait_s`; for its answer it does."""

import asyncio

import pytest

from aiotensor import DiscardedError, WouldBlockError
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Question, answer, channel, place, settled
from tests.pairs import BIG, pattern, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SHORT_S = 0.02


async def test_a_wait_for_a_server_that_is_not_there_ends_and_a_later_one_is_answered() -> None:
    with place() as here:
        async with MessageClient(here.messages, reply_type=Answer, max_wait_s=SHORT_S) as client:
            with pytest.raises(WouldBlockError, match=r"has not been there for 0.02 s"):
                await client.request(Question(1))
            with pytest.raises(WouldBlockError, match=r"has not been there for 0.02 s"):
                await client.send(Question(1))
            assert client.statistics().in_flight == (0,)
            async with MessageServer(here.messages, Question) as server:
                serving = asyncio.create_task(server.serve(answer))
                await until(lambda: client.statistics().servers == 1)
                assert (await client.request(Question(2))).seed == 2
            await serving


async def test_a_wait_for_any_of_several_servers_ends() -> None:
    with place() as one, place() as another:
        addresses = [one.messages, another.messages]
        async with MessageClient(addresses, reply_type=Answer, max_wait_s=SHORT_S) as client:
            with pytest.raises(WouldBlockError, match=r"none of the 2 servers has been there for 0.02 s"):
                await client.request(Question(1))


async def test_a_wait_for_room_at_the_server_ends_and_sends_nothing_later() -> None:
    async with channel(server={"max_waiting": 2}, client={"max_wait_s": SHORT_S}) as ends:
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(2)]
        await until(lambda: ends.server.statistics().waiting == 2)
        with pytest.raises(WouldBlockError, match=r"has taken no message for 0.02 s"):
            await ends.client.request(Question(7))

        serving = asyncio.create_task(ends.server.serve(answer))
        # They waited for their answers for longer than that.
        assert [got.seed for got in await asyncio.gather(*asking)] == [0, 1]
        assert (await ends.client.request(Question(8))).seed == 8
        assert ends.server.statistics().messages_received == 3
        await settled(ends)
        await ends.server.aclose()
        await serving


async def test_a_try_that_sent_only_some_tensors_inside_a_message_leaves_none_behind() -> None:
    async with channel(arena_bytes=BIG * 8 * 3 // 2) as ends:
        parts = {"x": [pattern(1, BIG), pattern(2, BIG)]}
        with pytest.raises(DiscardedError):
            async with ends.sender.message() as permit:
                with pytest.raises(WouldBlockError):
                    await ends.client.request(Question(1, more=parts), inside=permit)
                await ends.client.request(Question(1, more={"x": [pattern(3, BIG)]}), inside=permit)
        await until(lambda: ends.sender.statistics().bytes_in_use == 0)
        assert ends.sender.statistics().in_flight == 0
        await until(lambda: ends.receiver.statistics().unclaimed_tensors == 0)


async def test_a_message_that_cannot_wait_is_no_failure_of_the_others() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question, max_waiting=1) as server,
            MessageClient(here.messages, reply_type=Answer, max_wait_s=0.1) as client,
        ):
            first = asyncio.create_task(client.request(Question(1)))
            await until(lambda: server.statistics().waiting == 1)
            second = asyncio.create_task(client.request(Question(2)))
            with pytest.raises(WouldBlockError):
                await second
            request = await anext(server)
            await request.reply(Answer(1))
            assert (await first).seed == 1
            assert (server.statistics().messages_received, server.statistics().cancelled) == (1, 0)
