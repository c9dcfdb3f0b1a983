"""A client of several servers: equal shares, no message waits for one while another is free, and retries."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch

from aiotensor import PeerLostError
from aiotensor.channel import MessageClient, MessageServer
from tests.channel import peers
from tests.channel.parties import (
    Answer,
    Question,
    channels,
    key_options,
    place,
    serving,
)
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SEVERAL = 3


def _large(seed: int) -> Question:
    """Return a question with a tensor in shared memory."""
    return Question(seed, pattern(seed, BIG))


@asynccontextmanager
async def _asking(
    client: MessageClient[Answer], questions: Iterable[Question], target: int | None = None
) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """Send requests; cancel the unanswered ones at the end of the block."""
    tasks = [asyncio.create_task(client.request(question, target=target)) for question in questions]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_sequential_requests_are_distributed_equally_among_servers() -> None:
    shares: Counter[int] = Counter()

    async def ask(client: MessageClient[Answer]) -> None:
        for seed in range(60):
            shares[(await client.request(Question(seed))).total] += 1

    async with channels(SEVERAL) as (client, servers), AsyncExitStack() as stack:
        for number, server in enumerate(servers):

            async def name(question: Question, number: int = number) -> Answer:
                for _ in range(question.seed % 7):
                    await asyncio.sleep(0)
                return Answer(question.seed, number)

            await stack.enter_async_context(serving(server, handler=name))
        await asyncio.gather(*(ask(client) for _ in range(4)))
    equal = shares.total() / SEVERAL
    assert max(abs(shares[number] - equal) for number in range(SEVERAL)) <= 0.2 * equal


async def test_a_client_chooses_the_server_by_target_or_the_one_with_the_fewest_messages() -> None:
    async with channels(2, 16) as (client, servers), _asking(client, map(_large, range(6))) as asking:
        await until(lambda: all(server.statistics().waiting == 3 for server in servers))
        assert [engine.in_flight for engine in client.statistics().engines] == [3, 3]
        async with _asking(client, [_large(6), Question(7)], target=1) as named:
            await until(lambda: servers[1].statistics().waiting == 5)
            # Of two servers with as few messages to take, the one with fewer messages to answer is next.
            held = [await anext(servers[1]) for _ in range(5)]
            taken = [await anext(servers[0]) for _ in range(3)]
            async with _asking(client, [Question(8)]) as more:
                await until(lambda: servers[0].statistics().waiting == 1)
                for request in (*held, *taken):
                    await request.answer(Answer(request.message.seed))
                async with serving(*servers):
                    got = await asyncio.gather(*asking, *named, *more)
                    assert [one.seed for one in got] == list(range(9))
        with pytest.raises(ValueError, match="must be the index of one of the 2 servers"):
            await client.request(Question(9), target=2)
        assert [engine.answers for engine in client.statistics().engines] == [4, 5]
        del held, taken, request


async def test_a_message_with_a_target_waits_for_that_server_and_delays_no_other() -> None:
    async with (
        channels(2, server={"max_waiting": 1}) as (client, [named, other]),
        _asking(client, map(Question, range(5)), target=0) as asking,
    ):
        await until(lambda: named.statistics().waiting == 1)
        async with serving(other):
            assert (await client.request(Question(9))).seed == 9
            assert not any(task.done() for task in asking)
            async with serving(named):
                assert [got.seed for got in await asyncio.gather(*asking)] == list(range(5))
                assert named.statistics().answers == 5


@pytest.mark.promise(15)
async def test_messages_that_wait_are_sent_in_the_order_of_their_calls_to_the_server_that_is_idle() -> None:
    heard: list[int] = []

    async def handle(question: Question) -> Answer:
        heard.append(question.seed)
        return Answer(question.seed)

    async with (
        channels(2, 40, server={"max_waiting": 1}) as (client, servers),
        _asking(client, map(Question, range(30))) as asking,
    ):
        await until(lambda: client.statistics().waiting == 28)
        async with serving(servers[0], handler=handle):
            await until(lambda: sum(task.done() for task in asking) == 29)
    assert heard == sorted(heard)


# Servers that start, end and refuse


@pytest.mark.usefixtures("way")
@pytest.mark.promise(10)
@pytest.mark.parametrize("how", ["killed", "closed"])
async def test_only_messages_that_a_lost_server_had_taken_are_lost_with_it(how: str) -> None:
    of_server, of_client = key_options()
    async with (
        AsyncExitStack() as stack,
        peers.process() as dying,
    ):
        here, there = (stack.enter_context(place()) for _ in range(2))
        keys = (of_server, of_client) if here.startswith("tcp") else ({}, {})
        await dying.call(peers.open_server, here, answers=False, **keys[0])
        other = await stack.enter_async_context(MessageServer(there, Question, **keys[0]))
        client = await stack.enter_async_context(MessageClient([here, there], Answer, 32, **keys[1]))
        await until(lambda: client.statistics().servers == 2)
        async with _asking(client, map(_large, range(12))) as asking:
            await until(lambda: client.statistics().messages_sent == 12)
            for seed in range(12, 16):
                await client.send(_large(seed))
            taken = await dying.call(peers.take, 2)
            await until(lambda: client.statistics().in_flight == 14)
            if how == "killed":
                dying.kill()
            else:
                await dying.call(peers.close_server)
            heard: list[int] = []

            async def handle(question: Question) -> Answer:
                assert question.tensor is not None
                assert torch.equal(question.tensor, pattern(question.seed, BIG))
                heard.append(question.seed)
                return Answer(question.seed)

            async with serving(other, handler=handle):
                results = await asyncio.gather(*asking, return_exceptions=True)
                # Between machines, all eight that the killed server had may have been taken.
                lost = 8 if how == "killed" and here.startswith("tcp") else 2
                await until(lambda: len(heard) == 16 - lost)
        failed = [seed for seed, one in enumerate(results) if isinstance(one, PeerLostError)]
        assert failed == taken if lost == 2 else {*taken} < {*failed}
        assert len(heard) == len({*heard} - {*failed})  # each once, and none that has failed
        assert client.statistics().engines[0].requests_lost == lost
        await until(lambda: client.statistics().bytes_in_use == client.statistics().in_flight == 0)


# Idempotent requests are sent once more if their server is lost


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_request_is_repeated_at_most_once_and_only_if_it_is_idempotent(idempotent: bool) -> None:
    with place() as here:
        async with MessageClient(here, Answer) as client:
            asking = asyncio.create_task(client.request(_large(5), idempotent=idempotent))
            for _ in range(1 + idempotent):
                async with MessageServer(here, Question) as server:
                    request = await anext(server)
                    assert request.message.tensor is not None
                    assert torch.equal(request.message.tensor, pattern(5, BIG))
                    assert not asking.done()
                    del request
                    await until(lambda: client.statistics().in_flight == 0)
            with pytest.raises(PeerLostError) as caught:
                await asking
            assert caught.value.pid == os.getpid()
            assert client.statistics().retries == idempotent
