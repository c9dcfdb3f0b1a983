"""Without a server, calls wait at most for the grace period, and then fail at once."""

import asyncio

import pytest

from aiotensor import RefusedError, UnavailableError
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Question, answer, place
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SHORT_S = 0.02

several = pytest.mark.parametrize("servers", [1, 2])


@several
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


@several
async def test_without_a_grace_period_no_request_waits_for_a_server(servers: int) -> None:
    with place() as one, place() as another:
        addresses = [one.messages, another.messages][:servers]
        async with MessageClient(addresses, reply_type=Answer, grace_s=0) as client, asyncio.timeout(0):
            with pytest.raises(UnavailableError):
                await client.send(Question(4))


@several
async def test_a_server_that_returns_ends_the_outage(servers: int) -> None:
    with place() as one, place() as another:
        addresses = [one.messages, another.messages][:servers]
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


async def test_requests_are_answered_while_one_of_several_servers_is_available() -> None:
    with place() as one, place() as another:
        addresses = [one.messages, another.messages]
        async with (
            MessageClient(addresses, reply_type=Answer, grace_s=SHORT_S) as client,
            MessageServer(another.messages, Question) as server,
        ):
            serving = asyncio.create_task(server.serve(answer))
            await until(lambda: client.statistics().servers == 1)
            with pytest.raises(UnavailableError):
                await client.request(Question(0), target=0)
            assert (await client.request(Question(1))).seed == 1
        await serving


async def test_requests_wait_for_the_next_server_during_the_grace_period() -> None:
    with place() as here:
        async with MessageClient(here.messages, reply_type=Answer, grace_s=60) as client:
            asking = asyncio.create_task(client.request(Question(3)))
            async with MessageServer(here.messages, Question) as server:
                serving = asyncio.create_task(server.serve(answer))
                assert (await asking).seed == 3
            await serving


async def test_the_error_of_a_refused_client_is_the_refusal() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question, max_clients=1),
            MessageClient(here.messages, reply_type=Answer) as admitted,
        ):
            await until(lambda: admitted.statistics().servers == 1)
            async with MessageClient(here.messages, reply_type=Answer, grace_s=60) as client:
                for _ in range(2):
                    with pytest.raises(RefusedError):
                        await client.request(Question(1))


@pytest.mark.parametrize("grace_s", [-1.0, float("nan")])
def test_an_invalid_grace_period_raises_value_error(grace_s: float) -> None:
    with place() as here, pytest.raises(ValueError, match="grace_s must be at least 0, or None"):
        MessageClient(here.messages, reply_type=Answer, grace_s=grace_s)
