"""Permits of a client, which are acquired before the tensors of a request exist."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import pytest
import torch

from aiotensor import ClosedError, TensorReceiver, TensorSender, UnavailableError, UsageError, WouldBlockError
from aiotensor.channel import MessageClient, MessageServer, Permit
from tests.channel.parties import Answer, Question, answer, place
from tests.channel.peers import listening, open_server, process
from verification.patterns import BIG, pattern
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

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


async def test_requests_with_permits_are_distributed_when_their_tensors_exist() -> None:
    served: Counter[int] = Counter()
    go_on = asyncio.Event()

    async with _ends(2, 4) as ends, AsyncExitStack() as stack:
        for number, server in enumerate(ends.servers):

            async def handle(question: Question, number: int = number) -> Answer:
                served[number] += 1
                await go_on.wait()
                return await answer(question)

            await stack.enter_async_context(_serving([server], handle))
        permits = [await stack.enter_async_context(ends.client.permit()) for _ in range(8)]
        asking = [
            asyncio.create_task(ends.client.request(Question(seed, pattern(seed, BIG)), inside=permit))
            for seed, permit in enumerate(permits)
        ]
        await until(lambda: served.total() == 8)
        assert served == {0: 4, 1: 4}
        go_on.set()
        assert [got.seed for got in await asyncio.gather(*asking)] == list(range(8))


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


async def test_permits_from_before_the_death_of_a_server_are_used_at_the_others() -> None:
    with place() as here, place() as there:
        async with process(here) as dying, listening(there) as (other, _):
            await dying.call(open_server, here)
            senders = [TensorSender(here.tensors, 2), TensorSender(there.tensors, 2)]
            addresses = [here.messages, there.messages]
            async with (
                MessageClient(addresses, sender=senders, reply_type=Answer) as client,
                _serving([other]),
                AsyncExitStack() as stack,
            ):
                await until(lambda: client.statistics().servers == 2)
                for sender in senders:
                    await sender.ready()
                permits = [await stack.enter_async_context(client.permit()) for _ in range(4)]
                dying.kill()
                await until(lambda: client.statistics().servers == 1)

                # Two at a time, since only the permits of the other server are left.
                async def ask(seed: int, permit: Permit) -> int:
                    got = await client.request(Question(seed, pattern(seed, BIG)), inside=permit)
                    return got.seed

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


async def test_a_client_opens_and_closes_new_senders_but_not_those_that_are_open() -> None:
    with place() as here, place() as there:
        async with TensorSender(here.tensors) as opened:
            new = TensorSender(there.tensors)
            client = MessageClient([here.messages, there.messages], sender=[opened, new], reply_type=Answer)
            async with client:
                assert client.senders == (opened, new)
                assert repr(new).startswith("<TensorSender open")
            assert repr(new).startswith("<TensorSender closed")
            assert repr(opened).startswith("<TensorSender open")


async def test_a_sender_that_cannot_be_opened_closes_the_others() -> None:
    with place() as here:
        first, second = TensorSender(here.tensors), TensorSender("unix:///root/../dev/null/socket")
        client = MessageClient([here.messages] * 2, sender=[first, second], reply_type=Answer)
        with pytest.raises(UsageError):
            await client.__aenter__()
        assert repr(first).startswith("<TensorSender closed")
        with pytest.raises(ClosedError):
            await client.request(Question(1))
