"""Permits of a client, which are acquired before the tensors of a request exist, and waits for them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import pytest
import torch

from aiotensor import ClosedError, TensorReceiver, TensorSender, UnavailableError, UsageError, WouldBlockError
from aiotensor.channel import MessageClient, MessageServer, Permit
from tests.cancelling import Attempt, cancel_everywhere
from tests.channel.parties import Answer, Question, answer, place
from tests.channel.peers import listening
from verification.patterns import BIG, pattern
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SHORT_S = 0.02

one_or_two = pytest.mark.parametrize("servers", [1, 2])


class Ends(NamedTuple):
    """A client with its own senders, and its servers."""

    client: MessageClient[Answer]
    servers: list[MessageServer[Question]]
    receivers: list[TensorReceiver]


@asynccontextmanager
async def _ends(servers: int, permits: int, max_wait_s: float | None = None) -> AsyncIterator[Ends]:
    async with AsyncExitStack() as stack:
        places = [stack.enter_context(place()) for _ in range(servers)]
        ends = [await stack.enter_async_context(listening(here)) for here in places]
        client = MessageClient(
            [here.messages for here in places],
            sender=[TensorSender(here.tensors, permits, max_wait_s=max_wait_s) for here in places],
            reply_type=Answer,
        )
        await stack.enter_async_context(client)
        await until(lambda: client.statistics().servers == servers)
        for sender in client.senders:
            await sender.ready()
        yield Ends(client, [server for server, _ in ends], [receiver for _, receiver in ends])
        for sender in client.senders:
            await settled(sender)


@asynccontextmanager
async def _serving(
    servers: list[MessageServer[Question]], handler: Callable[[Question], Awaitable[object]] = answer
) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(server.serve(handler)) for server in servers]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@one_or_two
async def test_a_request_with_a_permit_is_answered(servers: int) -> None:
    async with _ends(servers, 1) as ends, _serving(ends.servers):
        for seed in range(4):
            async with ends.client.permit() as permit:
                got = await ends.client.request(Question(seed, pattern(seed, BIG)), inside=permit)
            assert (got.seed, got.total) == (seed, int(pattern(seed, BIG).sum()))


@one_or_two
async def test_memory_for_the_request_is_allocated_where_it_is_sent_from(servers: int) -> None:
    async with _ends(servers, 1) as ends, _serving(ends.servers):
        async with ends.client.permit() as permit:
            first, second = await asyncio.gather(
                permit.allocate((BIG,), torch.int64), permit.allocate((3,), torch.int64)
            )
            first.copy_(pattern(1, BIG))
            second.copy_(pattern(2, 3))
            in_use = [sender.statistics().bytes_in_use for sender in ends.client.senders]
            assert sorted(in_use)[-1] >= BIG * 8
            assert sum(amount > 0 for amount in in_use) == 1
            got = await ends.client.request(Question(5, first, {"more": [second]}), inside=permit)
            assert got.total == int(pattern(1, BIG).sum() + pattern(2, 3).sum())
            assert sum(sender.statistics().tensors_copied for sender in ends.client.senders) == 0
        del first, second


@pytest.mark.parametrize("count", [3, BIG])
async def test_a_permit_is_for_one_request_in_its_block(count: int) -> None:
    async with _ends(2, 1) as ends, _serving(ends.servers):
        async with ends.client.permit() as permit:
            await ends.client.request(Question(1, pattern(1, count)), inside=permit)
            with pytest.raises(UsageError, match="begin another one for each request"):
                await ends.client.request(Question(2, pattern(2, count)), inside=permit)
        with pytest.raises(UsageError, match="its block has ended"):
            await ends.client.request(Question(3, pattern(3, count)), inside=permit)


@pytest.mark.promise(14)
@one_or_two
async def test_there_are_as_many_permits_as_the_senders_have(servers: int) -> None:
    async with _ends(servers, 2, max_wait_s=0.1) as ends, AsyncExitStack() as held:
        for _ in range(2 * servers):
            await held.enter_async_context(ends.client.permit())
        with pytest.raises(WouldBlockError):
            await ends.client.permit().__aenter__()
        with pytest.raises(WouldBlockError):
            await ends.client.request(Question(1, pattern(1, BIG)))
        await held.aclose()
        async with ends.client.permit():
            pass


async def test_a_message_without_tensors_needs_no_permit() -> None:
    async with _ends(2, 1) as ends, _serving(ends.servers), ends.client.permit(), ends.client.permit():
        assert (await ends.client.request(Question(3))).seed == 3


async def test_a_permit_is_used_at_the_server_that_is_idle_by_then() -> None:
    async with _ends(2, 4) as ends, ends.client.permit() as permit:
        busy = [
            asyncio.create_task(ends.client.request(Question(seed, pattern(seed, 3)), target=0))
            for seed in range(3)
        ]
        await until(lambda: ends.servers[0].statistics().waiting == 3)
        asking = asyncio.create_task(ends.client.request(Question(7, pattern(7, 3)), inside=permit))
        await until(lambda: ends.servers[1].statistics().waiting == 1)
        async with _serving(ends.servers):
            assert (await asking).seed == 7
            await asyncio.gather(*busy)


async def test_permits_from_before_the_end_of_a_server_are_used_at_the_others() -> None:
    async with _ends(2, 2) as ends, AsyncExitStack() as stack:
        permits = [await stack.enter_async_context(ends.client.permit()) for _ in range(4)]
        await ends.servers[0].aclose()
        await ends.receivers[0].aclose()
        await until(lambda: ends.client.statistics().servers == 1)

        # Two at a time, since only the permits of the other server are left.
        async def ask(seed: int, permit: Permit) -> int:
            got = await ends.client.request(Question(seed, pattern(seed, BIG)), inside=permit)
            return got.seed

        async with _serving(ends.servers[1:]):
            asking = [ask(seed, permit) for seed, permit in enumerate(permits)]
            assert await asyncio.gather(*asking) == [0, 1, 2, 3]


@pytest.mark.promise(15)
@one_or_two
async def test_a_permit_that_is_released_goes_to_the_call_that_has_waited_longest(servers: int) -> None:
    async with _ends(servers, 1) as ends, AsyncExitStack() as held:
        permits = [ends.client.permit() for _ in range(servers)]
        for permit in permits:
            await permit.__aenter__()
        order = []

        async def wait(number: int) -> None:
            async with ends.client.permit():
                order.append(number)

        waiting = [asyncio.create_task(wait(number)) for number in range(3)]
        await asyncio.sleep(0)
        cancelled = asyncio.create_task(wait(9))
        for _ in range(3):
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        for permit in permits:
            held.push_async_exit(permit)
        await held.aclose()
        await asyncio.gather(*waiting)
        assert order == [0, 1, 2]


async def test_an_exception_in_the_block_of_a_permit_releases_it() -> None:
    async with _ends(2, 1, max_wait_s=5) as ends:
        for _ in range(6):
            with pytest.raises(KeyError):
                async with ends.client.permit() as permit:
                    await permit.allocate((BIG,), torch.int64)
                    raise KeyError
            with pytest.raises(KeyError):
                async with ends.client.permit():
                    raise KeyError


async def test_a_permit_without_a_server_raises_unavailable_error() -> None:
    with place() as one, place() as another:
        places = [one, another]
        async with MessageClient(
            [here.messages for here in places],
            sender=[TensorSender(here.tensors) for here in places],
            reply_type=Answer,
            grace_s=0,
        ) as client:
            with pytest.raises(UnavailableError):
                async with client.permit():
                    raise AssertionError("no server is there")
            assert client.statistics().errors == {"UnavailableError": 1}


async def test_a_permit_is_used_once_and_needs_a_sender() -> None:
    async with _ends(2, 1) as ends:
        async with ends.client.permit() as permit:
            with pytest.raises(UsageError, match="already entered"):
                await permit.__aenter__()
        with pytest.raises(UsageError, match="not in use"):
            await permit.allocate((3,), torch.int64)
        with pytest.raises(UsageError, match="not in use"):
            await ends.client.request(Question(1, pattern(1, 3)), inside=permit)
    with pytest.raises(ClosedError):
        ends.client.permit()
    with place() as here:
        async with MessageClient(here.messages, reply_type=Answer) as client:
            with pytest.raises(UsageError, match="has no sender"):
                client.permit()


# `ready` waits for a permit, and takes none


async def _still_waits(task: "asyncio.Task[None]") -> bool:
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


async def _answer_one(server: MessageServer[Question]) -> None:
    request = await anext(server)
    async with request:
        await request.reply(await answer(request.message))


@one_or_two
async def test_ready_waits_for_a_permit_of_any_server_and_takes_none(servers: int) -> None:
    async with _ends(servers, 1) as ends:
        await ends.client.ready()
        asking = [
            asyncio.create_task(ends.client.request(Question(seed, pattern(seed, BIG))))
            for seed in range(servers)
        ]
        for server in ends.servers:
            await server.arrived()
        first, second = (asyncio.create_task(ends.client.ready()) for _ in range(2))
        assert await _still_waits(first)
        await _answer_one(ends.servers[-1])
        await asyncio.gather(first, second)
        assert sum(sender.statistics().in_flight for sender in ends.client.senders) == servers - 1
        for server in ends.servers[:-1]:
            await _answer_one(server)
        await asyncio.gather(*asking)


@one_or_two
async def test_ready_returns_the_capacity_to_a_request_that_waits_behind_it(servers: int) -> None:
    async with _ends(servers, 1) as ends, AsyncExitStack() as held:
        for _ in range(servers):
            permit = await held.enter_async_context(ends.client.permit())
            await permit.allocate((1,), pattern(0, 1).dtype)
        ready = asyncio.create_task(ends.client.ready())
        assert await _still_waits(ready)
        asking = asyncio.create_task(ends.client.request(Question(5, pattern(5, BIG))))
        await asyncio.sleep(0)
        await held.aclose()
        serving = [asyncio.create_task(server.serve(answer)) for server in ends.servers]
        assert (await asking).seed == 5
        await ready
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)


async def test_ready_of_a_client_without_a_sender_waits_for_a_server() -> None:
    with place() as here:
        async with MessageClient(here.messages, reply_type=Answer) as client:
            ready = asyncio.create_task(client.ready())
            assert await _still_waits(ready)
            async with MessageServer(here.messages, Question):
                await ready
                await client.ready()


async def test_ready_times_out_after_max_wait_s() -> None:
    async with _ends(2, 1, max_wait_s=SHORT_S) as ends, AsyncExitStack() as held:
        for _ in range(2):
            permit = await held.enter_async_context(ends.client.permit())
            await permit.allocate((1,), pattern(0, 1).dtype)
        with pytest.raises(WouldBlockError):
            await ends.client.ready()
        assert ends.client.statistics().errors == {"WouldBlockError": 1}


async def test_closing_ends_ready() -> None:
    with place() as one, place() as another:
        async with MessageClient([one.messages, another.messages], reply_type=Answer) as client:
            ready = asyncio.create_task(client.ready())
            assert await _still_waits(ready)
        with pytest.raises(ClosedError):
            await ready


@one_or_two
async def test_a_cancelled_ready_holds_nothing(servers: int) -> None:
    async with _ends(servers, 1) as ends:
        client = ends.client
        serving = [asyncio.create_task(server.serve(answer)) for server in ends.servers]

        async def attempt(attempt: Attempt) -> None:
            held = AsyncExitStack()
            for _ in range(servers):
                permit = await held.enter_async_context(client.permit())
                await permit.allocate((1,), pattern(0, 1).dtype)
            ready = attempt.start(client.ready())
            releasing: list[asyncio.Task[None]] = []
            await ready.bring(lambda: releasing.append(asyncio.create_task(held.aclose())))
            await ready.completed()
            await releasing[0]
            await client.ready()
            answers = [client.request(Question(seed, pattern(seed, BIG))) for seed in range(4)]
            assert [got.seed for got in await asyncio.gather(*answers)] == [0, 1, 2, 3]

        assert await cancel_everywhere(attempt, *client.senders, *ends.receivers, client, *ends.servers)
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)
