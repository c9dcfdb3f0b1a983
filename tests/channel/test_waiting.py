"""Waiting for servers, requests and capacity: `arrived`, `max_wait_s` and `grace_s`."""

import asyncio

import pytest

from aiotensor import ClosedError, UnavailableError, UsageError, WouldBlockError
from aiotensor.channel import MessageClient, MessageServer
from tests.cancelling import Attempt, cancel_everywhere
from tests.channel.parties import (
    Answer,
    Question,
    answer_one,
    channel,
    place,
    serving,
    settled,
    still_waits,
)
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SHORT_S = 0.02


# `arrived`


async def test_arrived_waits_for_a_request_that_is_there_and_does_not_take_it() -> None:
    async with channel() as ends:
        first, second = (asyncio.create_task(ends.server.arrived()) for _ in range(2))
        assert await still_waits(first)
        asking = asyncio.create_task(ends.client.request(Question(7, pattern(7, BIG))))
        await asyncio.gather(first, second)
        await ends.server.arrived()
        assert (ends.server.statistics().waiting, ends.server.statistics().in_hand) == (1, 0)
        await answer_one(ends.server)
        assert (await asking).seed == 7

        arrived = asyncio.create_task(ends.server.arrived())
        assert await still_waits(arrived)
        asking = asyncio.create_task(ends.client.request(Question(2)))
        await arrived
        asking.cancel()
        await until(lambda: ends.server.statistics().cancelled == 1)
        arrived = asyncio.create_task(ends.server.arrived())
        assert await still_waits(arrived)
        await ends.client.send(Question(3))
        await arrived
        await answer_one(ends.server)
        await settled(ends)


async def test_closing_ends_arrived() -> None:
    with place() as here:
        server = MessageServer(here, Question)
        with pytest.raises(UsageError, match="is not open yet"):
            await server.arrived()
        async with server:
            arrived = asyncio.create_task(server.arrived())
            assert await still_waits(arrived)
        for call in (arrived, server.arrived()):
            with pytest.raises(ClosedError):
                await call


async def test_a_cancelled_arrived_takes_no_request() -> None:
    async with channel() as ends:

        async def attempt(attempt: Attempt) -> None:
            arrived = attempt.start(ends.server.arrived())
            asking: list[asyncio.Task[Answer]] = []
            await arrived.bring(lambda: asking.append(asyncio.create_task(ends.client.request(Question(1)))))
            await arrived.completed()
            await answer_one(ends.server)
            assert (await asking[0]).seed == 1

        assert await cancel_everywhere(attempt, ends.client, ends.server)


# `max_wait_s`


@pytest.mark.promise(10)
async def test_a_request_without_a_server_raises_would_block_error_after_max_wait_s() -> None:
    with place() as here, place() as there:
        async with MessageClient(here, Answer, max_wait_s=SHORT_S) as client:
            for call in (client.request, client.send):
                with pytest.raises(UnavailableError, match=r"no server at .* could be reached for 0.02 s"):
                    await call(Question(1, pattern(1, BIG)))
            assert client.statistics().in_flight == client.statistics().bytes_in_use == 0
            async with MessageServer(here, Question) as server, serving(server):
                await until(lambda: client.statistics().servers == 1)
                assert (await client.request(Question(2))).seed == 2
        async with MessageClient([here, there], Answer, max_wait_s=SHORT_S) as client:
            for waiting in (client.request(Question(1)), client.ready()):
                with pytest.raises(
                    WouldBlockError, match=r"none of the 2 servers could be reached for 0.02 s"
                ):
                    await waiting


@pytest.mark.parametrize("what", ["capacity", "permit"])
async def test_a_request_that_has_waited_for_too_long_is_never_sent(what: str) -> None:
    limits = {"max_waiting": 2} if what == "capacity" else {}
    async with channel(2 if what == "permit" else 8, client={"max_wait_s": SHORT_S}, server=limits) as ends:
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(2)]
        await until(lambda: ends.server.statistics().waiting == 2)
        text = r"has had capacity for this message for 0.02 s" if limits else "no permit was free for 0.02 s"
        with pytest.raises(WouldBlockError, match=text) as caught:
            await ends.client.request(Question(7))
        assert not isinstance(caught.value, UnavailableError)

        async with serving(ends.server):  # the others have waited for their answers for longer than that
            assert [got.seed for got in await asyncio.gather(*asking)] == [0, 1]
            assert (await ends.client.request(Question(8))).seed == 8
            assert ends.server.statistics().messages_received == 3
        await settled(ends)


# `grace_s`


async def test_calls_raise_unavailable_error_after_the_grace_period() -> None:
    with place() as one, place() as another:
        async with MessageClient([one, another], Answer, grace_s=SHORT_S) as client:
            asking = [asyncio.create_task(client.request(Question(seed))) for seed in range(3)]
            for error in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(error, UnavailableError)
            async with asyncio.timeout(0):  # at once
                for call in (client.request(Question(4)), client.request(Question(4), target=1)):
                    with pytest.raises(UnavailableError, match=r"could be reached for the grace period"):
                        await call
            assert client.statistics().in_flight == 0


async def test_without_a_grace_period_no_call_waits_for_a_server() -> None:
    with place() as one, place() as another:
        for addresses in ([one], [one, another]):
            async with MessageClient(addresses, Answer, grace_s=0) as client, asyncio.timeout(0):
                for call in (client.send(Question(4)), client.ready(), client.permit().__aenter__()):
                    with pytest.raises(UnavailableError):
                        await call


async def test_a_server_that_returns_ends_the_outage() -> None:
    with place() as one, place() as another:
        async with MessageClient([one, another], Answer, grace_s=SHORT_S) as client:
            for seed in range(2):
                with pytest.raises(UnavailableError):
                    await client.request(Question(seed))
                async with MessageServer(another, Question) as server, serving(server):
                    await until(lambda: client.statistics().servers == 1)
                    assert (await client.request(Question(seed))).seed == seed
                await until(lambda: client.statistics().servers == 0)
