"""A client of several servers: equal shares, no message waits for one while another is free, and retries."""

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import pytest
import torch

from aiotensor import ClosedError, PeerLostError, RefusedError, TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.codec import payload
from aiotensor.runtime.worker import in_thread
from tests.channel.parties import Answer, Place, Question, answer, place
from tests.channel.peers import listening, open_server, process
from verification.patterns import BIG, pattern
from verification.processes.peers import Peer
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


async def test_a_stalled_server_does_not_delay_messages_for_others() -> None:
    async with (
        _places(2) as places,
        _servers(places, max_waiting=1) as ([stalled, good], _),
        _client(places) as client,
    ):
        await until(lambda: client.statistics().servers == 2)
        async with _serving(good):
            for seed in range(6):
                await client.send(Question(seed))
            assert stalled.statistics().waiting <= 1


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


async def test_requests_that_wait_are_sent_when_others_are_cancelled() -> None:
    begun: list[int] = []
    is_free = asyncio.Event()

    async def handle(question: Question) -> Answer:
        begun.append(question.seed)
        await is_free.wait()
        return Answer(question.seed)

    async with (
        _places(2) as places,
        _servers(places, max_waiting=4) as ([_, taking], _),
        _client(places) as client,
        _serving(taking, handler=handle),
    ):
        await until(lambda: client.statistics().servers == 2)
        async with _asking(client, map(Question, range(20)), target=1) as first:
            await until(lambda: len(begun) == 20)
            async with _asking(client, map(Question, range(100, 116))) as waiting:
                await until(lambda: client.statistics().messages_sent >= 24)
                is_free.set()
                await _give_up(first)
                # Four are at the other server.
                await until(lambda: sum(task.done() for task in waiting) >= 12)


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


@pytest.mark.extended
async def test_engines_that_are_killed_and_replaced_under_load_leave_no_message_waiting() -> None:
    outcomes: Counter[str] = Counter()
    is_over = False

    async def ask(client: MessageClient[Answer], first: int) -> None:
        seed = first
        while not is_over:
            seed += 100
            try:
                got = await client.request(_large(seed))
            except PeerLostError:
                outcomes["lost"] += 1
            else:
                assert got.seed == seed
                outcomes["answered"] += 1

    async def thirty_more_answers() -> None:
        enough = outcomes["answered"] + 30
        await until(lambda: outcomes["answered"] >= enough)

    async with _places(SEVERAL) as places, AsyncExitStack() as stack:

        async def start(here: Place) -> Peer:
            engine = await stack.enter_async_context(process(here))
            await engine.call(open_server, here, max_waiting=2)
            return engine

        engines = [await start(here) for here in places]
        async with _client(places, permits=2) as client:
            await until(lambda: client.statistics().servers == SEVERAL)
            asking = [asyncio.create_task(ask(client, first)) for first in range(24)]
            for here, engine in zip(places, engines, strict=True):
                await thirty_more_answers()
                engine.kill()
                await thirty_more_answers()
                await start(here)
                await until(lambda: client.statistics().servers == SEVERAL)
            is_over = True
            await asyncio.gather(*asking)
            assert outcomes["lost"] < outcomes["answered"]
            assert client.statistics().in_flight == (0,) * SEVERAL


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Suspend the encoding of large messages; return events for its beginning and its end."""
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def late(*work: Any) -> Any:
        has_begun.set()
        await may_end.wait()
        return await in_thread(*work)

    monkeypatch.setattr(payload, "in_thread", late)
    return has_begun, may_end


async def test_closing_a_client_during_encoding_fails_the_request(
    encoding: tuple[asyncio.Event, asyncio.Event],
) -> None:
    is_encoding, is_closed = encoding
    async with _places(2) as places, _servers(places), _client(places, permits=2) as client:
        await until(lambda: client.statistics().servers == 2)
        question = Question(1, pattern(1, BIG), wish="7" * (900 << 10))
        async with _asking(client, [question]) as [asked]:
            await is_encoding.wait()
            await client.aclose()
            is_closed.set()
            with pytest.raises(ClosedError):
                await asked


async def test_a_message_goes_to_another_server_if_one_is_lost_during_encoding(
    encoding: tuple[asyncio.Event, asyncio.Event],
) -> None:
    is_encoding, has_gone = encoding
    async with (
        _places(2) as places,
        _servers(places) as (servers, receivers),
        _client(places, permits=2) as client,
    ):
        await until(lambda: client.statistics().servers == 2)
        question = Question(1, pattern(1, BIG), wish="7" * (900 << 10))
        async with _asking(client, [question]) as [asked]:
            await is_encoding.wait()
            await receivers[0].aclose()
            await servers[0].aclose()
            await until(lambda: client.statistics().servers == 1)
            has_gone.set()
            request = await anext(servers[1])
            await request.reply(Answer(1))
            assert (await asked).seed == 1


@pytest.mark.promise(29)
async def test_the_error_of_a_message_that_no_server_took_keeps_no_tensor() -> None:
    tensors: list[weakref.ref[torch.Tensor]] = []

    async def ask(client: MessageClient[Answer]) -> None:
        tensor = pattern(1, BIG)
        tensors.append(weakref.ref(tensor))
        await client.request(Question(1, tensor))

    gc.disable()  # the error must not be part of a cycle
    try:
        async with _places(2) as places, _client(places) as client:
            asked = asyncio.create_task(ask(client))
            await until(lambda: client.statistics().waiting == 1)
            await client.aclose()
            await asyncio.wait([asked])
            assert isinstance(asked.exception(), ClosedError)
            del asked
            await until(lambda: tensors[0]() is None)
    finally:
        gc.enable()


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


async def test_a_server_that_refused_a_client_serves_it_once_it_has_capacity() -> None:
    with place() as here, place() as there:
        async with (
            MessageServer(there.messages, Question, max_clients=1) as server,
            MessageClient(there.messages, reply_type=Answer) as first,
        ):
            serving = asyncio.create_task(server.serve(answer))
            await first.request(Question(1))
            async with MessageClient([here.messages, there.messages], reply_type=Answer) as second:
                asking = asyncio.create_task(second.request(Question(2)))  # the address has no server
                await until(lambda: server.statistics().clients_refused > 0)
                await first.aclose()
                assert (await asking).seed == 2
            await server.aclose()
            await serving


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


async def test_a_request_with_a_permit_is_sent_again_with_a_new_one() -> None:
    with place() as here:
        async with TensorSender(here.tensors, 1) as sender:
            async with MessageClient(here.messages, sender=sender, reply_type=Answer) as client:

                async def ask() -> Answer:
                    async with sender.message() as permit:
                        return await client.request(_large(5), inside=permit, idempotent=True)

                async with listening(here) as (first, _):
                    asking = asyncio.create_task(ask())
                    await anext(first)
                async with listening(here) as (second, _):
                    serving = asyncio.create_task(second.serve(answer))
                    assert (await asking).seed == 5
                    del asking
                await serving
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
