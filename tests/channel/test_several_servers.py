"""A client of several servers: equal shares, and no message that waits where another server is free."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from aiotensor import PeerLostError, TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer, parcels
from aiotensor.worker import in_thread
from tests.channel.parties import Answer, Place, Question, answer, place
from tests.channel.peers import open_server, process
from tests.pairs import BIG, pattern, until
from tests.processes.peers import Peer

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SEVERAL = 3


class Whose(msgspec.Struct):
    """An answer that names its server."""

    server: int


@asynccontextmanager
async def _places(count: int) -> AsyncIterator[list[Place]]:
    async with AsyncExitStack() as stack:
        yield [stack.enter_context(place()) for _ in range(count)]


async def _open_client(
    stack: AsyncExitStack, places: list[Place], *, with_senders: bool, permits: int = 2
) -> MessageClient[Answer]:
    """Open a client of several servers, perhaps with a sender to each."""
    senders = (
        [await stack.enter_async_context(TensorSender(here.tensors, permits)) for here in places]
        if with_senders
        else None
    )
    addresses = [here.messages for here in places]
    return await stack.enter_async_context(MessageClient(addresses, sender=senders, reply_type=Answer))


@pytest.mark.parametrize("clients", [1, 4, 8])
async def test_several_servers_get_equal_shares_of_clients_that_ask_one_question_at_a_time(
    clients: int,
) -> None:
    questions = 240 // clients
    async with _places(SEVERAL) as places, AsyncExitStack() as stack:
        serving = []
        servers: list[MessageServer[Question]] = []
        for number, here in enumerate(places):
            servers.append(await stack.enter_async_context(MessageServer(here.messages, Question)))

            async def name(question: Question, number: int = number) -> Whose:
                for _ in range(question.seed % 7):
                    await asyncio.sleep(0)
                return Whose(number)

            serving.append(asyncio.create_task(servers[-1].serve(name)))
        addresses = [here.messages for here in places]
        asking = [
            await stack.enter_async_context(MessageClient(addresses, reply_type=Whose))
            for _ in range(clients)
        ]
        await until(lambda: all(client.statistics().servers == SEVERAL for client in asking))
        shares: Counter[int] = Counter()

        async def ask(client: MessageClient[Whose]) -> None:
            for seed in range(questions):
                shares[(await client.request(Question(seed))).server] += 1

        await asyncio.gather(*map(ask, asking))
        for server in servers:
            await server.aclose()
        await asyncio.gather(*serving)
    equal = shares.total() / SEVERAL
    assert max(abs(share - equal) for share in (shares[number] for number in range(SEVERAL))) <= 0.2 * equal


async def test_a_client_asks_the_server_that_has_less_to_do_for_other_clients() -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        busy, idle = [
            await stack.enter_async_context(MessageServer(here.messages, Question)) for here in places
        ]
        other = await stack.enter_async_context(MessageClient(places[0].messages, reply_type=Answer))
        asking = [asyncio.create_task(other.request(Question(100 + seed))) for seed in range(8)]
        await until(lambda: busy.statistics().waiting == 8)
        held = [await anext(busy) for _ in range(8)]

        addresses = [here.messages for here in places]
        client = await stack.enter_async_context(MessageClient(addresses, reply_type=Answer))
        await until(lambda: client.statistics().servers == 2)
        serving = [asyncio.create_task(server.serve(answer)) for server in (busy, idle)]
        await client.request(Question(0), target=0)  # the answer states the load
        for seed in range(6):
            await client.request(Question(seed))
        assert idle.statistics().answers == 6
        for request in held:
            await request.reply(Answer(request.message.seed))
        await asyncio.gather(*asking)
        for server in (busy, idle):
            await server.aclose()
        await asyncio.gather(*serving)


async def test_a_server_that_was_busy_is_asked_again_though_nothing_was_heard_of_it_since() -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        busy, idle = [
            await stack.enter_async_context(MessageServer(here.messages, Question)) for here in places
        ]
        other = await stack.enter_async_context(MessageClient(places[0].messages, reply_type=Answer))
        asking = [asyncio.create_task(other.request(Question(seed))) for seed in range(8)]
        await until(lambda: busy.statistics().waiting == 8)
        held = [await anext(busy) for _ in range(8)]
        addresses = [here.messages for here in places]
        client = await stack.enter_async_context(MessageClient(addresses, reply_type=Answer))
        await until(lambda: client.statistics().servers == 2)
        serving = [asyncio.create_task(server.serve(answer)) for server in (busy, idle)]
        await client.request(Question(0), target=0)
        for request in held:
            await request.reply(Answer(request.message.seed))
        await asyncio.gather(*asking)
        before = busy.statistics().answers
        for seed in range(40):
            await client.request(Question(seed))
        assert busy.statistics().answers - before >= 10
        for server in (busy, idle):
            await server.aclose()
        await asyncio.gather(*serving)


@pytest.mark.parametrize("with_senders", [True, False], ids=["tensors by senders", "tensors in messages"])
async def test_messages_that_wait_for_a_server_that_dies_go_to_another_one(with_senders: bool) -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        first = await stack.enter_async_context(process(places[0]))
        await first.call(open_server, places[0], answers=False, max_waiting=2)
        receiver = await stack.enter_async_context(TensorReceiver(places[1].tensors))
        server = await stack.enter_async_context(
            MessageServer(places[1].messages, Question, receiver=receiver, max_waiting=2)
        )
        client = await _open_client(stack, places, with_senders=with_senders)
        await until(lambda: client.statistics().servers == 2)
        asking = [
            asyncio.create_task(client.request(Question(seed, pattern(seed, BIG)))) for seed in range(40)
        ]
        await until(lambda: client.statistics().messages_sent == 4)  # the others wait for credit or permits
        assert client.statistics().in_flight == (20, 20)

        first.kill()
        serving = asyncio.create_task(server.serve(answer))
        results = await asyncio.gather(*asking, return_exceptions=True)
        lost = [result for result in results if isinstance(result, PeerLostError)]
        assert 1 <= len(lost) <= 2  # the messages that had left
        answers = {seed: got.seed for seed, got in enumerate(results) if isinstance(got, Answer)}
        assert all(seed == got for seed, got in answers.items())
        assert len(answers) + len(lost) == 40
        await server.aclose()
        await serving


async def test_messages_that_wait_for_a_receiver_that_closes_go_to_another_server() -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        receivers = [await stack.enter_async_context(TensorReceiver(here.tensors)) for here in places]
        servers = [
            await stack.enter_async_context(MessageServer(here.messages, Question, receiver=receiver))
            for here, receiver in zip(places, receivers, strict=True)
        ]
        client = await _open_client(stack, places, with_senders=True)
        await until(lambda: client.statistics().servers == 2)
        asking = [
            asyncio.create_task(client.request(Question(seed, pattern(seed, BIG)))) for seed in range(40)
        ]
        await until(lambda: client.statistics().messages_sent == 4)  # the others wait for permits
        await receivers[0].aclose()  # its sender is told, and the connection to the server stays
        serving = [asyncio.create_task(servers[1].serve(answer))]
        await until(lambda: client.statistics().answers == 38)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await servers[1].aclose()
        await asyncio.gather(*serving)


@pytest.mark.parametrize("with_senders", [True, False], ids=["tensors by senders", "tensors in messages"])
async def test_a_server_that_starts_gets_messages_that_wait_for_a_busy_one(with_senders: bool) -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(TensorReceiver(places[0].tensors))
        busy = await stack.enter_async_context(
            MessageServer(places[0].messages, Question, receiver=receiver, max_waiting=2)
        )
        client = await _open_client(stack, places, with_senders=with_senders)
        await until(lambda: client.statistics().servers == 1)
        asking = [
            asyncio.create_task(client.request(Question(seed, pattern(seed, BIG)))) for seed in range(20)
        ]
        await until(lambda: client.statistics().messages_sent == 2)

        second = await stack.enter_async_context(process(places[1]))
        await second.call(open_server, places[1])
        await until(lambda: sum(task.done() for task in asking) == 18)
        serving = asyncio.create_task(busy.serve(answer))
        assert [got.seed for got in await asyncio.gather(*asking)] == list(range(20))
        await busy.aclose()
        await serving


async def test_messages_whose_tensors_are_being_copied_stay_at_their_servers() -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        servers = []
        for here in places:
            receiver = await stack.enter_async_context(TensorReceiver(here.tensors))
            server = MessageServer(here.messages, Question, receiver=receiver)
            servers.append(await stack.enter_async_context(server))
        client = await _open_client(stack, places, with_senders=True, permits=4)
        await until(lambda: client.statistics().servers == 2)
        tensors = [pattern(0, BIG), pattern(0, 1 << 20)]  # 8 MiB take longer: one server gets these
        asking = [asyncio.create_task(client.request(Question(seed, tensors[seed % 2]))) for seed in range(6)]
        await until(lambda: client.statistics().messages_sent == 6)
        assert client.statistics().in_flight == (3, 3)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_a_message_that_is_moved_is_heard_once() -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(MessageServer(here.messages, Question, max_waiting=3))
            for here in places
        ]
        addresses = [here.messages for here in places]
        client = await stack.enter_async_context(MessageClient(addresses, reply_type=Answer))
        await until(lambda: client.statistics().servers == 2)
        sending = [asyncio.create_task(client.send(Question(seed))) for seed in range(60)]
        heard: list[int] = []

        async def hear(server: MessageServer[Question], every: int) -> None:
            async for request in server:
                heard.append(request.message.seed)
                for _ in range(every):
                    await asyncio.sleep(0)

        hearing = [
            asyncio.create_task(hear(server, every)) for server, every in zip(servers, (0, 20), strict=True)
        ]
        await asyncio.gather(*sending)
        await until(lambda: len(heard) >= 60)
        for server in servers:
            await server.aclose()
        await asyncio.gather(*hearing)
    assert sorted(heard) == list(range(60))


async def test_a_message_with_a_target_waits_for_that_server() -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(MessageServer(here.messages, Question, max_waiting=1))
            for here in places
        ]
        addresses = [here.messages for here in places]
        client = await stack.enter_async_context(MessageClient(addresses, reply_type=Answer))
        asking = [asyncio.create_task(client.request(Question(seed), target=0)) for seed in range(5)]
        await until(lambda: servers[0].statistics().waiting == 1)
        serving = [asyncio.create_task(servers[1].serve(answer))]
        assert (await client.request(Question(9))).seed == 9
        assert not any(task.done() for task in asking)
        serving.append(asyncio.create_task(servers[0].serve(answer)))
        assert [got.seed for got in await asyncio.gather(*asking)] == list(range(5))
        assert servers[0].statistics().answers == 5
        for server in servers:
            await server.aclose()
        await asyncio.gather(*serving)


async def test_engines_that_are_killed_and_replaced_under_load_leave_no_message_waiting() -> None:
    async with _places(SEVERAL) as places, AsyncExitStack() as stack:
        engines: list[Peer] = []
        for here in places:
            engines.append(await stack.enter_async_context(process(here)))
            await engines[-1].call(open_server, here, max_waiting=2)
        client = await _open_client(stack, places, with_senders=True)
        await until(lambda: client.statistics().servers == SEVERAL)
        outcomes: Counter[str] = Counter()
        is_over = False

        async def ask(first: int) -> None:
            seed = first
            while not is_over:
                seed += 100
                try:
                    got = await client.request(Question(seed, pattern(seed, BIG)))
                except PeerLostError:
                    outcomes["lost"] += 1
                else:
                    assert got.seed == seed
                    outcomes["answered"] += 1

        asking = [asyncio.create_task(ask(first)) for first in range(24)]
        for number in range(SEVERAL):
            before = outcomes["answered"]
            await until(lambda: outcomes["answered"] >= before + 30)  # noqa: B023
            engines[number].kill()
            before = outcomes["answered"]
            await until(lambda: outcomes["answered"] >= before + 30)  # noqa: B023
            engine = await stack.enter_async_context(process(places[number]))
            await engine.call(open_server, places[number], max_waiting=2)
            await until(lambda: client.statistics().servers == SEVERAL)
        is_over = True
        await asyncio.gather(*asking)
        assert outcomes["lost"] < outcomes["answered"]
        assert client.statistics().in_flight == (0,) * SEVERAL


async def test_messages_pass_a_server_that_takes_nothing() -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        stalled, good = [
            await stack.enter_async_context(MessageServer(here.messages, Question, max_waiting=1))
            for here in places
        ]
        client = await _open_client(stack, places, with_senders=False)
        await until(lambda: client.statistics().servers == 2)
        serving = asyncio.create_task(good.serve(answer))
        for seed in range(6):
            await client.send(Question(seed))
        assert stalled.statistics().waiting <= 1
        await good.aclose()
        await serving


async def test_requests_pass_a_server_whose_sender_has_no_permit_left() -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        serving = []
        servers: list[MessageServer[Question]] = []
        for here in places:
            receiver = await stack.enter_async_context(TensorReceiver(here.tensors))
            servers.append(
                await stack.enter_async_context(MessageServer(here.messages, Question, receiver=receiver))
            )
            serving.append(asyncio.create_task(servers[-1].serve(answer)))
        senders = [await stack.enter_async_context(TensorSender(here.tensors, 1)) for here in places]
        addresses = [here.messages for here in places]
        client = await stack.enter_async_context(MessageClient(addresses, sender=senders, reply_type=Answer))
        await until(lambda: client.statistics().servers == 2)
        async with senders[0].message():
            for seed in range(4):
                assert (await client.request(Question(seed, pattern(seed, BIG)))).seed == seed
        for server in servers:
            await server.aclose()
        await asyncio.gather(*serving)


async def test_a_request_that_waits_goes_to_the_server_that_has_become_idle() -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(MessageServer(here.messages, Question, max_waiting=1))
            for here in places
        ]
        client = await _open_client(stack, places, with_senders=False)
        await until(lambda: client.statistics().servers == 2)
        asking = [asyncio.create_task(client.request(Question(seed))) for seed in range(3)]
        await until(lambda: all(server.statistics().waiting == 1 for server in servers))
        fast = client.statistics().in_flight.index(1)
        serving = asyncio.create_task(servers[fast].serve(answer))
        await until(lambda: sum(task.done() for task in asking) == 2)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await servers[fast].aclose()
        await serving


async def test_requests_that_wait_move_when_others_are_cancelled() -> None:
    async with _places(2) as places, AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(MessageServer(here.messages, Question, max_waiting=4))
            for here in places
        ]
        client = await _open_client(stack, places, with_senders=False)
        await until(lambda: client.statistics().servers == 2)
        begun: list[int] = []
        is_free = asyncio.Event()

        async def handle(question: Question) -> Answer:
            begun.append(question.seed)
            await is_free.wait()
            return Answer(question.seed)

        serving = asyncio.create_task(servers[1].serve(handle))
        first = [asyncio.create_task(client.request(Question(seed), target=1)) for seed in range(20)]
        await until(lambda: len(begun) == 20)
        waiting = [asyncio.create_task(client.request(Question(100 + seed))) for seed in range(16)]
        await until(lambda: client.statistics().messages_sent >= 24)
        is_free.set()
        for task in first:
            task.cancel()
        await asyncio.wait(first)
        await until(lambda: sum(task.done() for task in waiting) >= 12)  # four are at the other server
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await servers[1].aclose()
        await serving


async def test_a_server_that_goes_while_a_message_is_encoded_does_not_hold_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, has_gone, is_encoding = in_thread, asyncio.Event(), asyncio.Event()

    async def late(*work: Any) -> Any:
        is_encoding.set()
        await has_gone.wait()
        return await real(*work)

    async with _places(2) as places, AsyncExitStack() as stack:
        receivers = [await stack.enter_async_context(TensorReceiver(here.tensors)) for here in places]
        servers = [
            await stack.enter_async_context(MessageServer(here.messages, Question, receiver=receiver))
            for here, receiver in zip(places, receivers, strict=True)
        ]
        client = await _open_client(stack, places, with_senders=True)
        await until(lambda: client.statistics().servers == 2)
        monkeypatch.setattr(parcels, "in_thread", late)
        asking = asyncio.create_task(client.request(Question(1, pattern(1, BIG), wish="7" * (900 << 10))))
        await is_encoding.wait()
        gone = client.statistics().in_flight.index(1)
        await receivers[gone].aclose()
        await servers[gone].aclose()
        await until(lambda: client.statistics().servers == 1)
        has_gone.set()
        request = await anext(servers[1 - gone])
        await request.reply(Answer(1))
        assert (await asking).seed == 1
