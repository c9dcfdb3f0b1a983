"""A slow server makes its clients wait, and a client that does not read makes its answers wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio

from aiotensor import ClosedError, RefusedError, RemoteError, TensorHandle, TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.codec import TensorEncoder
from aiotensor.protocol.exchange import VERSION, Ask, ClientHello, write
from tests.channel import peers
from tests.channel.parties import Answer, Question, answer, channel, place, said, settled
from tests.channel.rogues import raw
from verification import inside
from verification.internals import pipeline_of
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

Server: TypeAlias = MessageServer[Question]


async def test_requests_beyond_max_waiting_wait_at_the_client() -> None:
    limits = {"max_waiting": 5, "high_water_mark": 2}
    async with channel(server=limits, client={"high_water_mark": 2}) as ends:
        asking = [
            asyncio.create_task(ends.client.request(Question(seed, pattern(seed, 900))))
            for seed in range(400)
        ]
        await until(lambda: ends.server.statistics().waiting >= 5)
        for _ in range(100):
            await asyncio.sleep(0)
        assert ends.server.statistics().waiting == 5
        sent = ends.client.statistics().messages_sent
        assert sent < 200  # the kernel's buffers hold some too

        serving = asyncio.create_task(ends.server.serve(answer))
        assert [got.seed for got in await asyncio.gather(*asking)] == list(range(400))
        await settled(ends)
        await ends.server.aclose()
        await serving


async def test_waiting_messages_are_bounded_in_bytes_too() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question, max_waiting_bytes=1 << 20, high_water_mark=1) as server,
            MessageClient(here.messages, reply_type=Answer, high_water_mark=1) as client,
        ):
            asking = [asyncio.create_task(client.request(Question(1, pattern(1, BIG)))) for _ in range(20)]
            await until(lambda: server.statistics().waiting_bytes >= 1 << 20)
            for _ in range(100):
                await asyncio.sleep(0)
            assert server.statistics().waiting == 2
            assert client.statistics().messages_sent < 10
            serving = asyncio.create_task(server.serve(answer))
            await asyncio.gather(*asking)
            assert server.statistics().waiting_bytes == 0
            await server.aclose()
            await serving


async def test_a_waiting_request_that_is_cancelled_leaves_no_trace_at_the_server() -> None:
    limits = {"max_waiting": 1, "high_water_mark": 1}
    async with channel(server=limits, client={"high_water_mark": 1}) as ends:
        asking = [
            asyncio.create_task(ends.client.request(Question(seed, pattern(seed, 900))))
            for seed in range(400)
        ]
        await until(lambda: ends.server.statistics().waiting == 1)
        for task in asking[:-1]:
            task.cancel()
        await asyncio.wait(asking[:-1])
        seeds = []
        while 399 not in seeds:
            async with await anext(ends.server) as request:
                seeds.append(request.message.seed)
                await request.reply(Answer(request.message.seed))
        await asking[-1]
        assert len(seeds) < 300
        await settled(ends)


async def test_answers_to_a_client_that_does_not_read_wait_and_delay_no_other() -> None:
    with place() as here:
        async with (
            peers.listening(here, high_water_mark=1) as (server, _),
            peers.process(here) as slow,
            peers.process(here) as other,
        ):
            await slow.call(peers.open_client, here, high_water_mark=1)
            await slow.call(peers.begin_to_ask, list(range(40)), 5)
            await until(lambda: server.statistics().messages_received == 40)
            await slow.stop()
            replying = []
            for _ in range(40):
                request = await anext(server)
                large = Answer(
                    request.message.seed, int(pattern(request.message.seed, 5).sum()), pattern(1, BIG)
                )
                replying.append(asyncio.create_task(request.reply(large)))
                del request, large
            await other.call(peers.open_client, here)
            serving = asyncio.create_task(server.serve(answer))
            assert await other.call(peers.ask, 1)
            assert sum(not task.done() for task in replying) > 20
            slow.kill()
            await slow.ended()
            # Replies in the kernel's buffers count as sent, since this process cannot know better.
            assert not all(await asyncio.gather(*replying))
            await until(lambda: server.statistics().in_hand == 0)
            assert await other.call(peers.ask, 2)
            await server.aclose()
            await serving


async def test_a_sender_is_used_only_for_answers_to_the_client_of_its_receiver() -> None:
    with place() as here:
        async with AsyncExitStack() as stack:
            open_ = stack.enter_async_context
            receiver = await open_(TensorReceiver(here.answers))
            sender = await open_(TensorSender(here.answers, max_concurrent_videos=1))
            server = await open_(MessageServer(here.messages, Question, sender=[sender]))
            near = await open_(MessageClient(here.messages, receiver=receiver, reply_type=Answer))
            far = await open_(MessageClient(here.messages, reply_type=Answer))
            await until(lambda: sender.receiver_id == receiver.id)
            serving = asyncio.create_task(server.serve(answer))

            for client, sent in ((near, 1), (far, 1), (near, 2)):
                got = (await client.request(Question(5, wish=str(BIG)))).tensor
                assert got is not None
                assert torch.equal(got, pattern(5, BIG))
                assert sender.statistics().tensors_sent == sent
                del got
            await until(lambda: sender.statistics().in_flight + sender.statistics().bytes_in_use == 0)
            await server.aclose()
            await serving


async def test_a_client_chooses_a_server_by_target_or_by_load() -> None:
    with place() as first, place() as second:
        async with AsyncExitStack() as stack:
            open_ = stack.enter_async_context
            servers, receivers, senders = [], [], []
            for here in (first, second):
                receivers.append(await open_(TensorReceiver(here.tensors)))
                senders.append(await open_(TensorSender(here.tensors)))
                servers.append(await open_(MessageServer(here.messages, Question, receiver=receivers[-1])))
            client = await open_(
                MessageClient([first.messages, second.messages], sender=senders, reply_type=Answer)
            )
            await until(lambda: client.statistics().servers == 2)

            asking = [
                asyncio.create_task(client.request(Question(seed, pattern(seed, BIG)))) for seed in range(6)
            ]
            await until(lambda: all(server.statistics().waiting == 3 for server in servers))
            assert client.statistics().in_flight == (3, 3)
            async with senders[1].message() as permit:
                asking.append(
                    asyncio.create_task(client.request(Question(6, pattern(6, BIG)), inside=permit))
                )
                await until(lambda: servers[1].statistics().waiting == 4)
            asking.append(asyncio.create_task(client.request(Question(7), target=1)))
            await until(lambda: servers[1].statistics().waiting == 5)
            asking.append(asyncio.create_task(client.request(Question(8))))
            await until(lambda: servers[0].statistics().waiting == 4)
            with pytest.raises(ValueError, match="must be the index of one of the 2 servers"):
                await client.request(Question(9), target=2)

            serving = [asyncio.create_task(server.serve(answer)) for server in servers]
            assert [got.seed for got in await asyncio.gather(*asking)] == list(range(9))

            await servers[0].aclose()  # the other one takes over
            await until(lambda: client.statistics().servers == 1)
            for seed in range(4):
                assert (await client.request(Question(seed, pattern(seed, BIG)))).seed == seed
            assert servers[1].statistics().answers == 5 + 4
            await servers[1].aclose()
            await asyncio.gather(*serving)


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


async def test_a_request_does_not_wait_for_a_dead_server_that_had_refused() -> None:
    with place() as here, place() as there:
        async with (
            MessageServer(there.messages, Question, max_clients=1) as server,
            MessageClient(there.messages, reply_type=Answer) as first,
        ):
            serving = asyncio.create_task(server.serve(answer))
            await first.request(Question(1))
            async with (
                MessageServer(here.messages, Question, max_clients=1) as another,
                MessageClient(here.messages, reply_type=Answer),
            ):
                await until(lambda: another.statistics().clients == 1)
                second = MessageClient([here.messages, there.messages], reply_type=Answer)
                await second.__aenter__()
                await until(lambda: all(one.is_hopeless for one in inside.servers_of(second)))
            inside.servers_of(second)[0].refused_at = 0  # so that it is tried again first
            asking = asyncio.create_task(second.request(Question(2)))
            await until(lambda: not inside.servers_of(second)[0].is_hopeless)  # the address has no server
            await first.aclose()
            assert (await asking).seed == 2
            await second.aclose()
            await server.aclose()
            await serving


@asynccontextmanager
async def _answers_that_wait() -> AsyncIterator[
    tuple[Server, zmq.asyncio.Socket, "list[asyncio.Task[bool]]"]
]:
    """Open a client that reads none of its answers, and the tasks that wait to send them."""
    with place() as here, said():
        async with (
            MessageServer(here.messages, Question, high_water_mark=1, linger_s=0.01) as server,
            raw(zmq.DEALER, here.messages, high_water_mark=1) as client,
        ):
            await client.send_multipart([write(ClientHello(VERSION, 1))])
            body = memoryview(msgspec.msgpack.encode(Question(1)))
            for number in range(20):
                await client.send_multipart([write(Ask(number, body))])
            requests = [await anext(server) for _ in range(20)]
            large = Answer(1, tensor=pattern(1, BIG))
            replying = [asyncio.create_task(request.reply(large)) for request in requests]
            [one] = inside.clients_of(server)
            await until(lambda: len(one.queue) > 5)
            yield server, client, replying


async def test_a_client_that_breaks_the_protocol_ends_its_waiting_answers() -> None:
    async with _answers_that_wait() as (server, client, replying):
        [one] = inside.clients_of(server)
        await client.send_multipart([b"noise"])
        await until(lambda: inside.rejected(server) == 1)
        assert len(one.queue) <= 1  # the last message to the client; some answers may have left before it
        await until(lambda: any(task.done() and not task.result() for task in replying))
        client.close()  # and ZeroMQ drops the others
        await asyncio.gather(*replying)


async def test_answers_that_wait_for_capacity_fail_when_their_server_closes() -> None:
    async with _answers_that_wait() as (server, _, replying):
        await server.aclose()
        ended = await asyncio.gather(*replying, return_exceptions=True)
        assert {True, "ClosedError"} >= {end if end is True else type(end).__name__ for end in ended}
        assert sum(isinstance(end, ClosedError) for end in ended) > 5


async def test_closing_a_server_releases_messages_of_disconnected_clients() -> None:
    with place() as here:
        async with TensorReceiver(here.tensors) as receiver, TensorSender(here.tensors, 2) as sender:
            async with MessageServer(here.messages, Question, receiver=receiver) as server:
                async with MessageClient(here.messages, sender=sender, reply_type=Answer) as client:
                    for seed in range(2):
                        await client.send(Question(seed, pattern(seed, BIG)))
                    await until(lambda: len(inside.ready(server)) == 2)
                await until(lambda: server.statistics().clients == 0)
                assert server.statistics().waiting == 2
            assert server.statistics().waiting == 0
            await until(lambda: sender.statistics().in_flight == 0 and sender.statistics().bytes_in_use == 0)


async def test_untaken_messages_of_disconnected_clients_count_against_max_clients() -> None:
    with place() as here:
        async with MessageServer(here.messages, Question, max_clients=2) as server:
            for seed in range(2):
                async with MessageClient(here.messages, reply_type=Answer) as client:
                    await client.send(Question(seed))
            await until(lambda: server.statistics().clients_lost == 2)
            async with MessageClient(here.messages, reply_type=Answer) as client:
                with pytest.raises(
                    RefusedError, match="including 2 disconnected clients with waiting messages"
                ):
                    await client.send(Question(2))
                assert [(await anext(server)).message.seed for _ in range(2)] == [0, 1]
                await client.send(Question(2))
                assert (await anext(server)).message.seed == 2


async def test_messages_that_wait_for_missing_tensors_are_evicted() -> None:
    with place() as here:
        async with (
            TensorReceiver(here.tensors) as receiver,
            TensorSender(here.tensors) as sender,
            MessageServer(here.messages, Question, receiver=receiver, max_clients=2) as server,
        ):
            await receiver.receive(await sender.send(torch.zeros(1)))
            body = memoryview(msgspec.msgpack.encode(Question(1)))
            for attempt in range(5):
                # Another message each time: those of evicted requests are discarded.
                never = TensorHandle(sender.id, (1 << 40) + attempt, 0, "int64", (1,), "cpu")
                async with raw(zmq.DEALER, here.messages) as rogue:
                    await rogue.send_multipart([write(ClientHello(VERSION, 1))])
                    for number in range(10):
                        await rogue.send_multipart([write(Ask(number, body, (never,), wants_answer=False))])
                    await until(lambda: server.statistics().clients == 1 and inside.arriving(server) >= 10)
                await until(lambda: server.statistics().clients == 0)
            assert server.statistics().waiting <= 20
            async with MessageClient(here.messages, reply_type=Answer) as client:
                await client.send(Question(2))
                assert (await anext(server)).message.seed == 2


async def test_serve_runs_at_most_max_concurrent_handlers() -> None:
    async with channel() as ends:
        running = most = 0
        go_on = asyncio.Event()

        async def count(question: Question) -> Answer:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await go_on.wait()
            running -= 1
            return await answer(question)

        serving = asyncio.create_task(ends.server.serve(count, max_concurrent=2))
        asking = [
            asyncio.create_task(ends.client.request(Question(seed, pattern(seed, BIG)))) for seed in range(6)
        ]
        await until(lambda: running == 2 and ends.server.statistics().waiting == 4)
        # The others wait, and keep their permits.
        await until(lambda: ends.receiver.statistics().unclaimed_tensors == 4)
        go_on.set()
        assert [got.seed for got in await asyncio.gather(*asking)] == list(range(6))
        assert most == 2
        with pytest.raises(ValueError, match="at least 1"):
            await ends.server.serve(count, max_concurrent=0)
        await settled(ends)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving


async def test_answers_without_a_sender_to_their_client_arrive_and_are_logged_once() -> None:
    with place() as here, said() as texts:
        async with (
            TensorReceiver(here.answers) as receiver,
            TensorReceiver(here.tensors) as another,
            TensorSender(here.tensors) as astray,
            MessageServer(here.messages, Question, sender=astray) as server,
            MessageClient(here.messages, receiver=receiver, reply_type=Answer) as client,
        ):
            await until(lambda: astray.receiver_id == another.id)
            serving = asyncio.create_task(server.serve(answer))
            for seed in (1, 2):
                got = (await client.request(Question(seed, wish=str(BIG)))).tensor
                assert got is not None
                assert torch.equal(got, pattern(seed, BIG))
            assert astray.statistics().tensors_sent == 0
            await server.aclose()
            await serving
    assert sum("no sender is connected to its receiver" in text for text in texts) == 1


async def test_a_refused_sender_connects_again_for_a_later_answer() -> None:
    with place() as here, said():
        async with (
            TensorReceiver(here.answers, max_senders=1) as receiver,
            TensorSender(here.answers) as first,
            TensorSender(here.answers) as refused,
            MessageServer(here.messages, Question, sender=refused) as server,
            MessageClient(here.messages, receiver=receiver, reply_type=Answer) as client,
        ):
            serving = asyncio.create_task(server.serve(answer))
            await until(lambda: receiver.statistics().senders_refused == 1)
            await first.aclose()
            await until(lambda: receiver.statistics().senders == 0)
            while not refused.statistics().tensors_sent:
                got = (await client.request(Question(1, wish=str(BIG)))).tensor
                assert got is not None
                assert torch.equal(got, pattern(1, BIG))
            await server.aclose()
            await serving


async def test_lost_tensors_fail_only_their_message() -> None:
    async with channel() as ends:
        lost = TensorSender(ends.place.tensors)
        await lost.__aenter__()
        handle = await lost.send(pattern(1, BIG))
        body = TensorEncoder(lambda _: 0).encode(Question(1, pattern(1, 3)))
        session = await inside.servers_of(ends.client)[0].ready()
        request = await session.ask((handle,), body, wants_answer=True)
        await until(lambda: ends.server.statistics().waiting == 1)
        pipeline_of(lost).sessions.abort()  # without a closing message, as when a process is killed
        await until(lambda: ends.receiver.statistics().senders == 1)

        taking = asyncio.create_task(anext(ends.server))
        assert request is not None
        assert request.answer is not None
        with pytest.raises(RemoteError) as caught:
            await request.answer
        assert caught.value.type_name == "PeerLostError"
        await ends.client.send(Question(2))
        assert (await taking).message.seed == 2
        await lost.aclose()
