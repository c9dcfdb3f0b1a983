"""A client of several servers: equal shares, no message waits for one while another is free, and retries."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import pytest

from aiotensor import PeerLostError, RefusedError, TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Place, Question, answer, place
from tests.channel.peers import listening, open_server, process
from verification.patterns import BIG, pattern
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SEVERAL = 3

either_way = pytest.mark.parametrize("permits", [2, None], ids=["tensors by senders", "tensors in messages"])


def _large(seed: int) -> Question:
    """Return a question with a tensor; a sender transfers it if there is one."""
    return Question(seed, pattern(seed, BIG))


@asynccontextmanager
async def _places(count: int) -> AsyncIterator[list[Place]]:
    async with AsyncExitStack() as stack:
        yield [stack.enter_context(place()) for _ in range(count)]


@asynccontextmanager
async def _servers(
    places: Sequence[Place], **options: Any
) -> AsyncIterator[tuple[list[MessageServer[Question]], list[TensorReceiver]]]:
    """Open a server at each place, and a receiver for its tensors."""
    async with AsyncExitStack() as stack:
        ends = [await stack.enter_async_context(listening(here, **options)) for here in places]
        yield [server for server, _ in ends], [receiver for _, receiver in ends]


@asynccontextmanager
async def _serving(
    *servers: MessageServer[Question], handler: Callable[[Question], Awaitable[object]] = answer
) -> AsyncIterator[None]:
    """Have servers answer, and close them with the block."""
    tasks = [asyncio.create_task(server.serve(handler)) for server in servers]
    try:
        yield
    finally:
        for server in servers:
            await server.aclose()
        await asyncio.gather(*tasks)


@asynccontextmanager
async def _senders(places: Sequence[Place], permits: int) -> AsyncIterator[list[TensorSender]]:
    """Open a sender of so many permits to each place."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(TensorSender(here.tensors, permits)) for here in places]


@asynccontextmanager
async def _client(
    places: Sequence[Place], permits: int | None = None
) -> AsyncIterator[MessageClient[Answer]]:
    """Open a client of the servers at some places, with a sender of so many permits to each, or with none."""
    async with AsyncExitStack() as stack:
        senders = None if permits is None else await stack.enter_async_context(_senders(places, permits))
        addresses = [here.messages for here in places]
        yield await stack.enter_async_context(MessageClient(addresses, sender=senders, reply_type=Answer))


class Limited(NamedTuple):
    """A client of two servers, with a sender to each."""

    client: MessageClient[Answer]
    servers: list[MessageServer[Question]]
    senders: list[TensorSender]


@asynccontextmanager
async def _limited(permits: int) -> AsyncIterator[Limited]:
    """Open two servers and a client of both, whose senders have a number of permits."""
    async with (
        _places(2) as places,
        _servers(places) as (servers, _),
        _senders(places, permits) as senders,
        MessageClient([here.messages for here in places], sender=senders, reply_type=Answer) as client,
    ):
        await until(lambda: client.statistics().servers == 2)
        yield Limited(client, servers, senders)


@asynccontextmanager
async def _asking(
    client: MessageClient[Answer], questions: Iterable[Question], target: int | None = None
) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """Send requests; cancel the unanswered ones at the end of the block."""
    tasks = [asyncio.create_task(client.request(question, target=target)) for question in questions]
    try:
        yield tasks
    finally:
        await _give_up(tasks)


async def _give_up(tasks: Sequence[asyncio.Task[Answer]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_sequential_requests_are_distributed_equally_among_servers() -> None:
    shares: Counter[int] = Counter()

    async def ask(client: MessageClient[int]) -> None:
        for seed in range(60):
            shares[await client.request(Question(seed))] += 1

    async with _places(SEVERAL) as places, _servers(places) as (servers, _), AsyncExitStack() as stack:
        for number, server in enumerate(servers):

            async def name(question: Question, number: int = number) -> int:
                for _ in range(question.seed % 7):
                    await asyncio.sleep(0)
                return number

            await stack.enter_async_context(_serving(server, handler=name))
        addresses = [here.messages for here in places]
        asking = [await stack.enter_async_context(MessageClient(addresses, reply_type=int)) for _ in range(4)]
        await until(lambda: all(client.statistics().servers == SEVERAL for client in asking))
        await asyncio.gather(*map(ask, asking))
    equal = shares.total() / SEVERAL
    assert max(abs(shares[number] - equal) for number in range(SEVERAL)) <= 0.2 * equal


async def test_a_client_chooses_the_server_by_target_by_permit_or_by_free_credit() -> None:
    async with _limited(permits=8) as (client, servers, senders):
        asking = [asyncio.create_task(client.request(_large(seed))) for seed in range(6)]
        await until(lambda: all(server.statistics().waiting == 3 for server in servers))
        assert client.statistics().in_flight == (3, 3)
        async with senders[1].message() as permit:
            asking.append(asyncio.create_task(client.request(_large(6), inside=permit)))
            await until(lambda: servers[1].statistics().waiting == 4)
        asking.append(asyncio.create_task(client.request(Question(7), target=1)))
        await until(lambda: servers[1].statistics().waiting == 5)
        asking.append(asyncio.create_task(client.request(Question(8))))
        await until(lambda: servers[0].statistics().waiting == 4)
        with pytest.raises(ValueError, match="must be the index of one of the 2 servers"):
            await client.request(Question(9), target=2)

        async with _serving(*servers):
            assert [got.seed for got in await asyncio.gather(*asking)] == list(range(9))
            await servers[0].aclose()  # the other one takes over
            await until(lambda: client.statistics().servers == 1)
            for seed in range(4):
                assert (await client.request(_large(seed))).seed == seed
            assert servers[1].statistics().answers == 5 + 4


async def test_a_message_with_a_target_waits_for_that_server() -> None:
    async with (
        _places(2) as places,
        _servers(places, max_waiting=1) as ([named, other], _),
        _client(places) as client,
        _asking(client, map(Question, range(5)), target=0) as asking,
    ):
        await until(lambda: named.statistics().waiting == 1)
        async with _serving(other):
            assert (await client.request(Question(9))).seed == 9
            assert not any(task.done() for task in asking)
            async with _serving(named):
                assert [got.seed for got in await asyncio.gather(*asking)] == list(range(5))
                assert named.statistics().answers == 5


async def test_each_message_that_waits_is_heard_once() -> None:
    heard: list[int] = []

    async def hear(server: MessageServer[Question], every: int) -> None:
        async for request in server:
            heard.append(request.message.seed)
            for _ in range(every):
                await asyncio.sleep(0)

    async with (
        _places(2) as places,
        _servers(places, max_waiting=3) as ([fast, slow], _),
        _client(places) as client,
    ):
        await until(lambda: client.statistics().servers == 2)
        sending = [asyncio.create_task(client.send(Question(seed))) for seed in range(60)]
        hearing = [asyncio.create_task(hear(fast, 0)), asyncio.create_task(hear(slow, 20))]
        await asyncio.gather(*sending)
        await until(lambda: len(heard) >= 60)
        for server in (fast, slow):
            await server.aclose()
        await asyncio.gather(*hearing)
    assert sorted(heard) == list(range(60))


@pytest.mark.promise(15)
async def test_messages_that_wait_are_sent_in_the_order_of_their_calls() -> None:
    heard: list[int] = []

    async def handle(question: Question) -> Answer:
        heard.append(question.seed)
        return Answer(question.seed)

    async with (
        _places(2) as places,
        _servers(places, max_waiting=1) as (servers, _),
        _client(places) as client,
    ):
        await until(lambda: client.statistics().servers == 2)
        async with _asking(client, map(Question, range(30))) as asking:
            await until(lambda: client.statistics().waiting == 28)
            async with _serving(servers[0], handler=handle):
                await until(lambda: sum(task.done() for task in asking) == 29)
    assert heard == sorted(heard)


async def test_requests_pass_a_server_whose_sender_has_no_permit_left() -> None:
    async with _limited(permits=1) as (client, servers, senders), _serving(*servers), senders[0].message():
        for seed in range(4):
            assert (await client.request(_large(seed))).seed == seed


async def test_a_message_waits_for_the_first_permit_that_any_server_has() -> None:
    async with _limited(permits=1) as (client, servers, senders), _serving(*servers), senders[0].message():
        async with senders[1].message():  # neither is a message of this client
            asked = asyncio.create_task(client.request(_large(1)))
            await until(lambda: client.statistics().waiting == 1)
            assert (await client.request(Question(2))).seed == 2  # needs no permit
        assert (await asked).seed == 1


async def test_a_waiting_request_is_sent_to_the_server_that_becomes_idle() -> None:
    async with (
        _places(2) as places,
        _servers(places, max_waiting=1) as (servers, _),
        _client(places) as client,
    ):
        await until(lambda: client.statistics().servers == 2)
        async with _asking(client, map(Question, range(3))) as asking:
            await until(lambda: all(server.statistics().waiting == 1 for server in servers))
            assert client.statistics().waiting == 1
            async with _serving(servers[0]):
                await until(lambda: sum(task.done() for task in asking) == 2)


# Servers that start, end and refuse


@either_way
async def test_a_server_that_starts_gets_messages_that_wait_for_a_busy_one(permits: int | None) -> None:
    async with (
        _places(2) as places,
        _servers(places[:1], max_waiting=2) as ([busy], _),
        _client(places, permits) as client,
    ):
        await until(lambda: client.statistics().servers == 1)
        async with _asking(client, map(_large, range(20))) as asking:
            await until(lambda: client.statistics().messages_sent == 2)
            async with _servers(places[1:]) as ([starting], _), _serving(starting):
                await until(lambda: sum(task.done() for task in asking) == 18)
                async with _serving(busy):
                    assert [got.seed for got in await asyncio.gather(*asking)] == list(range(20))


@pytest.mark.promise(10)
@either_way
async def test_messages_that_wait_for_a_killed_server_are_sent_to_another(permits: int | None) -> None:
    async with (
        _places(2) as places,
        process(places[0]) as dying,
        _servers(places[1:], max_waiting=2) as ([other], _),
    ):
        await dying.call(open_server, places[0], answers=False, max_waiting=2)
        async with _client(places, permits) as client:
            await until(lambda: client.statistics().servers == 2)
            async with _asking(client, map(_large, range(40))) as asking:
                # The others wait for credit or permits.
                await until(lambda: client.statistics().messages_sent == 4)
                assert client.statistics().in_flight == (2, 2)
                assert client.statistics().waiting == 36
                dying.kill()
                async with _serving(other):
                    results = await asyncio.gather(*asking, return_exceptions=True)
        lost = [result for result in results if isinstance(result, PeerLostError)]
        assert 1 <= len(lost) <= 2  # the messages that had left
        answers = {seed: got.seed for seed, got in enumerate(results) if isinstance(got, Answer)}
        assert all(seed == got for seed, got in answers.items())
        assert len(answers) + len(lost) == 40


async def test_a_client_that_all_servers_refuse_raises_refused_error() -> None:
    with place() as here, place() as there:
        async with (
            MessageServer(here.messages, Question, max_clients=1),
            MessageServer(there.messages, Question, max_clients=1),
            MessageClient([here.messages, there.messages], reply_type=Answer) as first,
        ):
            await until(lambda: first.statistics().servers == 2)
            async with MessageClient([here.messages, there.messages], reply_type=Answer) as second:
                for _ in range(3):
                    with pytest.raises(RefusedError, match="max_clients=1"):
                        await second.request(Question(1))


# Idempotent requests are sent once more if their server is lost


@either_way
async def test_another_server_answers_the_requests_of_a_killed_one(permits: int | None) -> None:
    async with _places(2) as places, process(places[0]) as dying, _servers(places[1:]) as ([other], _):
        await dying.call(open_server, places[0], answers=False)
        async with _client(places, permits and 8) as client:
            await until(lambda: client.statistics().servers == 2)
            asking = [asyncio.create_task(client.request(_large(seed), idempotent=True)) for seed in range(6)]
            await until(lambda: client.statistics().messages_sent == 6)
            untaken, _ = client.statistics().in_flight
            assert untaken == 3
            dying.kill()
            async with _serving(other):
                answers = await asyncio.gather(*asking)
                assert [one.seed for one in answers] == list(range(6))
                assert [one.total for one in answers] == [int(pattern(seed, BIG).sum()) for seed in range(6)]
            assert client.statistics().retries == untaken
            for sender in client.senders:
                await settled(sender)


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_request_is_sent_at_most_once_more_and_only_if_it_is_idempotent(idempotent: bool) -> None:
    with place() as here:
        async with MessageClient(here.messages, reply_type=Answer) as client:
            asking = asyncio.create_task(client.request(_large(5), idempotent=idempotent))
            for _ in range(1 + idempotent):
                assert not asking.done()
                async with listening(here) as (server, _):
                    request = await anext(server)
                    assert request.message.seed == 5
                    del request
            with pytest.raises(PeerLostError):
                await asking
            assert client.statistics().retries == idempotent
