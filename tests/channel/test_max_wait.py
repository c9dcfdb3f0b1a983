"""A request waits at most `max_wait_s` for its server and for capacity there, but longer for its answer."""

import asyncio
import threading

import pytest
import zmq

from aiotensor import DiscardedError, WouldBlockError
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.protocol.exchange import VERSION, Ask, Credit, ServerHello, write
from tests.channel.parties import Answer, Question, answer, channel, place, settled
from tests.channel.rogues import hear, raw
from verification import inside
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SHORT_S = 0.02


async def test_a_request_without_a_server_raises_would_block_error_after_max_wait_s() -> None:
    with place() as here:
        async with MessageClient(here.messages, reply_type=Answer, max_wait_s=SHORT_S) as client:
            with pytest.raises(WouldBlockError, match=r"could not be reached for 0.02 s"):
                await client.request(Question(1))
            with pytest.raises(WouldBlockError, match=r"could not be reached for 0.02 s"):
                await client.send(Question(1))
            assert client.statistics().in_flight == (0,)
            async with MessageServer(here.messages, Question) as server:
                serving = asyncio.create_task(server.serve(answer))
                await until(lambda: client.statistics().servers == 1)
                assert (await client.request(Question(2))).seed == 2
            await serving


async def test_a_request_without_any_of_several_servers_raises_would_block_error() -> None:
    with place() as one, place() as another:
        addresses = [one.messages, another.messages]
        async with MessageClient(addresses, reply_type=Answer, max_wait_s=SHORT_S) as client:
            with pytest.raises(WouldBlockError, match=r"none of the 2 servers could be reached for 0.02 s"):
                await client.request(Question(1))


@pytest.mark.parametrize("servers", [1, 2])
async def test_a_server_that_connects_in_the_iteration_of_the_timeout_is_used(
    servers: int,
) -> None:
    with place() as here, place() as there:
        async with (
            raw(zmq.ROUTER, here.messages, binds=True) as server,
            MessageClient(
                [here.messages, there.messages][:servers], reply_type=Answer, max_wait_s=SHORT_S
            ) as client,
        ):
            await hear(server)
            asking = asyncio.create_task(client.request(Question(5)))
            await asyncio.sleep(0)
            threading.Event().wait(2 * SHORT_S)  # the loop is held up until the wait is overdue
            hello = [zmq.Frame(write(ServerHello(VERSION, 77, "", 1, 1000)))]
            asyncio.get_running_loop().call_soon(inside.servers_of(client)[0].message_arrived, hello)
            await until(lambda: asking.done() or client.statistics().messages_sent == 1)
            assert not asking.done()
            _, question = await hear(server)
            assert isinstance(question, Ask)
            asking.cancel()
            await asyncio.wait([asking])


async def test_the_error_of_a_wait_for_capacity_concerns_only_its_message() -> None:
    with place() as here:
        async with (
            raw(zmq.ROUTER, here.messages, binds=True) as server,
            MessageClient(here.messages, reply_type=Answer, max_wait_s=SHORT_S) as client,
        ):
            identity, _ = await hear(server)
            await server.send_multipart([identity, write(ServerHello(VERSION, 77, "", 1, 1000))])
            await until(lambda: client.statistics().servers == 1)
            sending = [asyncio.create_task(client.send(Question(number))) for number in range(3)]
            # In the turn in which all of them begin: in a later one, the second might be overdue.
            taken = [zmq.Frame(write(Credit(1, 0)))]
            asyncio.get_running_loop().call_soon(inside.servers_of(client)[0].message_arrived, taken)
            ends = await asyncio.gather(*sending, return_exceptions=True)
            assert ends[:2] == [None, None]
            assert isinstance(ends[2], WouldBlockError)
            assert "has had no capacity for this message for 0.02 s" in str(ends[2])


async def test_a_request_whose_wait_for_capacity_timed_out_is_never_sent() -> None:
    async with channel(server={"max_waiting": 2}, client={"max_wait_s": SHORT_S}) as ends:
        await until(lambda: ends.client.statistics().servers == 1)
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(2)]
        await until(lambda: ends.server.statistics().waiting == 2)
        with pytest.raises(WouldBlockError, match=r"has had no capacity for this message for 0.02 s"):
            await ends.client.request(Question(7))

        serving = asyncio.create_task(ends.server.serve(answer))
        # They waited for their answers for longer than that.
        assert [got.seed for got in await asyncio.gather(*asking)] == [0, 1]
        assert (await ends.client.request(Question(8))).seed == 8
        assert ends.server.statistics().messages_received == 3
        await settled(ends)
        await ends.server.aclose()
        await serving


async def test_a_failed_request_inside_a_message_discards_the_sent_tensors() -> None:
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


async def test_a_request_that_times_out_does_not_affect_other_requests() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question, max_waiting=1) as server,
            MessageClient(here.messages, reply_type=Answer, max_wait_s=0.1) as client,
        ):
            await until(lambda: client.statistics().servers == 1)
            first = asyncio.create_task(client.request(Question(1)))
            await until(lambda: server.statistics().waiting == 1)
            second = asyncio.create_task(client.request(Question(2)))
            with pytest.raises(WouldBlockError):
                await second
            request = await anext(server)
            await request.reply(Answer(1))
            assert (await first).seed == 1
            assert (server.statistics().messages_received, server.statistics().cancelled) == (1, 0)
