"""A slow server makes its clients wait, and a client that does not read makes its answers wait."""

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio

from aiotensor import RefusedError, TensorHandle, TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.protocol.exchange import VERSION, Ask, ClientHello, write
from tests.channel import peers
from tests.channel.parties import Answer, Question, answer, channel, place, settled
from tests.channel.rogues import raw
from verification import inside
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.promise(14)
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


@pytest.mark.promise(15)
async def test_clients_take_turns_however_many_messages_each_has_waiting() -> None:
    amounts = [40, 1, 3, 10]
    with place() as here:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(MessageServer(here.messages, Question, max_waiting=64))
            for number, amount in enumerate(amounts):
                client = MessageClient(here.messages, reply_type=Answer)
                await stack.enter_async_context(client)
                for seed in range(amount):
                    await client.send(Question(100 * number + seed))
            await until(lambda: server.statistics().waiting == sum(amounts))
            order = [(await anext(server)).message.seed for _ in range(sum(amounts))]
    left = list(amounts)
    for seed in order:  # nobody gets another turn while a client that had fewer ones waits
        had = [amount - remaining for amount, remaining in zip(amounts, left, strict=True)]
        assert had[seed // 100] == min(turns for turns, remaining in zip(had, left, strict=True) if remaining)
        left[seed // 100] -= 1
    for number, amount in enumerate(amounts):
        assert [seed for seed in order if seed // 100 == number] == [100 * number + n for n in range(amount)]


@pytest.mark.promise(26)
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


@pytest.mark.promise(26)
async def test_messages_that_wait_for_missing_tensors_are_evicted() -> None:
    with place() as here:
        async with (
            TensorReceiver(here.tensors) as receiver,
            TensorSender(here.tensors) as sender,
            MessageServer(here.messages, Question, receiver=receiver, max_clients=2) as server,
        ):
            await receiver.receive(await sender.send(torch.zeros(1)))
            body = memoryview(msgspec.msgpack.encode(Question(1)))
            for attempt in range(3):
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
