"""`arrived` of a server and `ready` of a client wait for requests and capacity, and take neither."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import pytest

from aiotensor import ClosedError, TensorReceiver, TensorSender, UnavailableError, UsageError, WouldBlockError
from aiotensor.channel import MessageClient, MessageServer
from tests.cancelling import Attempt, cancel_everywhere
from tests.channel.parties import Answer, Question, answer, channel, place, settled
from tests.channel.peers import ask, listening, open_client, process
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


@pytest.mark.usefixtures("way")
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


async def test_arrived_waits_for_the_tensors_of_a_request() -> None:
    with place() as here:
        async with (
            TensorReceiver(here.tensors) as receiver,
            MessageServer(here.messages, Question, receiver=receiver) as server,
            TensorSender(here.tensors) as sender,
            MessageClient(here.messages, sender=sender, reply_type=Answer) as client,
        ):
            asking = asyncio.create_task(client.request(Question(7, pattern(7, BIG))))
            arrived = asyncio.create_task(server.arrived())
            await arrived
            assert len(inside.ready(server)) == 1
            assert inside.arriving(server) == 0
            await _answer_one(server)
            await asking


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


async def test_arrived_returns_for_a_request_of_another_process() -> None:
    with place() as here:
        async with process(here) as child, listening(here) as (server, _):
            await child.call(open_client, here)
            asking = child.start(ask, 3)
            await server.arrived()
            await _answer_one(server)
            assert await asking


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


# `ready`


class Ends(NamedTuple):
    client: MessageClient[Answer]
    servers: list[MessageServer[Question]]
    receivers: list[TensorReceiver]


@asynccontextmanager
async def _ends(servers: int, max_wait_s: float | None = None) -> AsyncIterator[Ends]:
    """Open a client with one sender for each of its servers, and wait until all are connected."""
    async with AsyncExitStack() as stack:
        places = [stack.enter_context(place()) for _ in range(servers)]
        ends = [await stack.enter_async_context(listening(here)) for here in places]
        client = MessageClient(
            [here.messages for here in places],
            sender=[TensorSender(here.tensors, 1, max_wait_s=max_wait_s) for here in places],
            reply_type=Answer,
        )
        await stack.enter_async_context(client)
        await until(lambda: client.statistics().servers == servers)
        await until(lambda: all(sender.receiver_id for sender in client.senders))
        yield Ends(client, [server for server, _ in ends], [receiver for _, receiver in ends])


@one_or_two
async def test_ready_waits_for_a_permit_of_any_server_and_takes_none(servers: int) -> None:
    async with _ends(servers) as ends:
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
    async with _ends(servers) as ends, AsyncExitStack() as held:
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


@one_or_two
async def test_ready_times_out_after_max_wait_s(servers: int) -> None:
    async with _ends(servers, max_wait_s=SHORT_S) as ends, AsyncExitStack() as held:
        for _ in range(servers):
            permit = await held.enter_async_context(ends.client.permit())
            await permit.allocate((1,), pattern(0, 1).dtype)
        with pytest.raises(WouldBlockError):
            await ends.client.ready()
        assert ends.client.statistics().errors == {"WouldBlockError": 1}


@pytest.mark.parametrize("limit", [{"max_wait_s": SHORT_S}, {"grace_s": 0}])
async def test_ready_without_a_server_raises_unavailable_error(limit: dict[str, float]) -> None:
    with place() as here:
        addresses = [here.messages, here.messages + "2"]
        for count in (1, 2):
            async with MessageClient(addresses[:count], reply_type=Answer, **limit) as client:  # type: ignore[arg-type]
                with pytest.raises(UnavailableError):
                    await client.ready()


@one_or_two
async def test_closing_ends_ready(servers: int) -> None:
    async with AsyncExitStack() as stack:
        places = [stack.enter_context(place()) for _ in range(servers)]
        client = MessageClient([here.messages for here in places], reply_type=Answer)
        async with client:
            ready = asyncio.create_task(client.ready())
            assert await _still_waits(ready)
        with pytest.raises(ClosedError):
            await ready


@one_or_two
async def test_a_cancelled_ready_holds_nothing(servers: int) -> None:
    async with _ends(servers) as ends:
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
