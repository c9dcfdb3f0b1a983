"""Waiting for servers, requests and capacity: `arrived`, `max_wait_s` and `grace_s`."""

import asyncio
import threading

import pytest
import zmq

from aiotensor import (
    ClosedError,
    UnavailableError,
    UsageError,
    WouldBlockError,
)
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.protocol.exchange import VERSION, Ask, ServerHello, write
from tests.cancelling import Attempt, cancel_everywhere
from tests.channel.parties import Answer, Question, answer, channel, place, settled
from tests.channel.rogues import hear, raw
from verification import inside
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SHORT_S = 0.02

one_or_two = pytest.mark.parametrize("servers", [1, 2])


async def _still_waits(task: "asyncio.Task[None]") -> bool:
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


async def _answer_one(server: MessageServer[Question]) -> None:
    request = await anext(server)
    async with request:
        await request.reply(await answer(request.message))


# `arrived`


async def test_arrived_returns_once_a_request_has_arrived_and_does_not_take_it() -> None:
    async with channel() as ends:
        first, second = (asyncio.create_task(ends.server.arrived()) for _ in range(2))
        assert await _still_waits(first)
        asking = asyncio.create_task(ends.client.request(Question(7, pattern(7, BIG))))
        await asyncio.gather(first, second)
        await ends.server.arrived()
        assert (ends.server.statistics().waiting, ends.server.statistics().in_hand) == (1, 0)
        await _answer_one(ends.server)
        assert (await asking).seed == 7
        await settled(ends)


async def test_arrived_waits_for_the_next_request_after_one_was_taken_or_cancelled() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        await ends.server.arrived()
        await _answer_one(ends.server)
        await asking
        arrived = asyncio.create_task(ends.server.arrived())
        assert await _still_waits(arrived)
        asking = asyncio.create_task(ends.client.request(Question(2)))
        await arrived
        asking.cancel()
        await until(lambda: ends.server.statistics().cancelled == 1)
        arrived = asyncio.create_task(ends.server.arrived())
        assert await _still_waits(arrived)
        await ends.client.send(Question(3))
        await arrived
        await _answer_one(ends.server)
        await settled(ends)


async def test_closing_ends_arrived() -> None:
    with place() as here:
        server = MessageServer(here.messages, Question)
        with pytest.raises(UsageError, match="is not open yet"):
            await server.arrived()
        async with server:
            arrived = asyncio.create_task(server.arrived())
            assert await _still_waits(arrived)
        with pytest.raises(ClosedError):
            await arrived
        with pytest.raises(ClosedError):
            await server.arrived()


async def test_a_cancelled_arrived_takes_no_request() -> None:
    async with channel() as ends:

        async def attempt(attempt: Attempt) -> None:
            arrived = attempt.start(ends.server.arrived())
            asking: list[asyncio.Task[Answer]] = []
            await arrived.bring(lambda: asking.append(asyncio.create_task(ends.client.request(Question(1)))))
            await arrived.completed()
            await _answer_one(ends.server)
            assert (await asking[0]).seed == 1

        assert await cancel_everywhere(attempt, ends.sender, ends.receiver, ends.client, ends.server)


# `max_wait_s`


@pytest.mark.promise(10)
async def test_a_request_without_a_server_raises_would_block_error_after_max_wait_s() -> None:
    with place() as here, place() as there:
        async with MessageClient(here.messages, reply_type=Answer, max_wait_s=SHORT_S) as client:
            for call in (client.request, client.send):
                with pytest.raises(WouldBlockError, match=r"could not be reached for 0.02 s"):
                    await call(Question(1))
            assert client.statistics().in_flight == (0,)
            async with MessageServer(here.messages, Question) as server:
                serving = asyncio.create_task(server.serve(answer))
                await until(lambda: client.statistics().servers == 1)
                assert (await client.request(Question(2))).seed == 2
            await serving
        addresses = [here.messages, there.messages]
        async with MessageClient(addresses, reply_type=Answer, max_wait_s=SHORT_S) as client:
            with pytest.raises(WouldBlockError, match=r"none of the 2 servers could be reached for 0.02 s"):
                await client.request(Question(1))


async def test_a_server_that_connects_in_the_iteration_of_the_timeout_is_used() -> None:
    with place() as here:
        async with (
            raw(zmq.ROUTER, here.messages, binds=True) as server,
            MessageClient(here.messages, reply_type=Answer, max_wait_s=SHORT_S) as client,
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


# `grace_s`


@one_or_two
async def test_a_request_raises_unavailable_error_after_the_grace_period(servers: int) -> None:
    with place() as one, place() as another:
        addresses = [one.messages, another.messages][:servers]
        async with MessageClient(addresses, reply_type=Answer, grace_s=SHORT_S) as client:
            asking = [asyncio.create_task(client.request(Question(seed))) for seed in range(3)]
            for error in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(error, UnavailableError)
            async with asyncio.timeout(0):  # at once
                with pytest.raises(UnavailableError, match="grace period"):
                    await client.request(Question(4))
                with pytest.raises(UnavailableError, match="grace period"):
                    await client.request(Question(4), target=servers - 1)
            assert client.statistics().in_flight == (0,) * servers


async def test_without_a_grace_period_no_call_waits_for_a_server() -> None:
    with place() as one, place() as another:
        for addresses in ([one.messages], [one.messages, another.messages]):
            async with MessageClient(addresses, reply_type=Answer, grace_s=0) as client, asyncio.timeout(0):
                for call in (client.send(Question(4)), client.ready()):
                    with pytest.raises(UnavailableError):
                        await call


async def test_a_server_that_returns_ends_the_outage() -> None:
    with place() as one, place() as another:
        addresses = [one.messages, another.messages]
        async with MessageClient(addresses, reply_type=Answer, grace_s=SHORT_S) as client:
            for seed in range(2):
                with pytest.raises(UnavailableError):
                    await client.request(Question(seed))
                async with MessageServer(addresses[-1], Question) as server:
                    serving = asyncio.create_task(server.serve(answer))
                    await until(lambda: client.statistics().servers == 1)
                    assert (await client.request(Question(seed))).seed == seed
                await serving
                await until(lambda: client.statistics().servers == 0)


async def test_requests_wait_for_the_next_server_during_the_grace_period() -> None:
    with place() as here:
        async with MessageClient(here.messages, reply_type=Answer, grace_s=60) as client:
            asking = asyncio.create_task(client.request(Question(3)))
            async with MessageServer(here.messages, Question) as server:
                serving = asyncio.create_task(server.serve(answer))
                assert (await asking).seed == 3
            await serving
