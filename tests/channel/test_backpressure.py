"""A slow server makes its clients wait, and a client that does not read makes its answers wait."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from aiotensor import RefusedError
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.runtime import outage
from tests.channel.parties import (
    Answer,
    Question,
    channel,
    place,
    said,
    serving,
    settled,
)
from tests.channel.rogues import message, rogue_client
from verification.patterns import pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.usefixtures("way")
@pytest.mark.promise(14)
async def test_untaken_requests_beyond_max_waiting_wait_at_the_client() -> None:
    async with channel(100, server={"max_waiting": 5}) as ends:
        asking = [
            asyncio.create_task(ends.client.request(Question(seed, pattern(seed, 2000))))
            for seed in range(100)
        ]
        await until(lambda: ends.client.statistics().waiting == 95)
        await until(lambda: ends.server.statistics().waiting == 5)
        assert ends.client.statistics().messages_sent == 5
        for taken in range(1, 4):
            request = await anext(ends.server)
            await request.answer(Answer(request.message.seed))
            await until(lambda: ends.client.statistics().messages_sent == 5 + taken)  # noqa: B023
            await until(lambda: ends.server.statistics().waiting == 5)
        async with serving(ends.server):
            assert [got.seed for got in await asyncio.gather(*asking)] == list(range(100))
        await settled(ends)


@pytest.mark.promise(17, 40)
async def test_a_long_wait_for_servers_that_take_no_more_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "_FIRST_LINE_S", 0.01)
    with said() as texts:
        async with channel(8, server={"max_waiting": 1}) as ends:
            asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(3)]
            await until(lambda: bool(texts))
            assert ends.client.statistics().waiting == 2
            async with serving(ends.server):
                await asyncio.gather(*asking)
            assert len(texts) == 1
            assert texts[0].endswith("2 messages wait, because the servers do not take more")


@pytest.mark.promise(27)
async def test_a_client_sends_the_next_request_while_the_last_one_is_decoded() -> None:
    slow = {str(number): [pattern(number, 3)] for number in range(2000)}  # which a thread decodes
    async with channel(8, server={"max_waiting": 1}) as ends, serving(ends.server):
        questions = [Question(seed, more=slow) for seed in range(8)]
        answers = await asyncio.gather(*map(ends.client.request, questions))
        assert [got.seed for got in answers] == list(range(8))
        assert ends.client.statistics().servers_lost == 0


@pytest.mark.promise(15)
async def test_clients_take_turns_however_many_messages_each_has_waiting() -> None:
    amounts = [40, 1, 3, 10]
    with place() as here:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(MessageServer(here, Question))
            for number, amount in enumerate(amounts):
                client = await stack.enter_async_context(MessageClient(here, Answer, 64))
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
    large = "x" * 10_000  # so large a body is part of its record
    with place() as here:
        async with (
            MessageServer(here, Question) as server,
            rogue_client(here, reads=False) as slow,
        ):
            slow.write(*(message(number, Question(number), asks=True) for number in range(60)))
            await until(lambda: server.statistics().waiting == 60)
            answering = []
            for _ in range(60):
                request = await anext(server)
                answering.append(asyncio.create_task(request.answer(large)))
                del request
            async with MessageClient(here, Answer) as other, serving(server):
                assert (await other.request(Question(1))).seed == 1
                assert sum(not task.done() for task in answering) > 20
                slow.close()
                # Answers in the kernel's buffers count as sent, since this process cannot know better.
                assert not all(await asyncio.gather(*answering))
                assert (await other.request(Question(2))).seed == 2
                assert server.statistics().in_hand == 0


async def test_untaken_messages_of_disconnected_clients_count_against_max_clients() -> None:
    with place() as here:
        async with MessageServer(here, Question, max_clients=2) as server:
            for seed in range(2):
                async with MessageClient(here, Answer) as client:
                    await client.send(Question(seed))
            await until(lambda: server.statistics().clients_lost == 2)
            async with MessageClient(here, Answer) as client:
                with pytest.raises(
                    RefusedError, match="including 2 disconnected clients with waiting messages"
                ):
                    await client.send(Question(2))
                assert [(await anext(server)).message.seed for _ in range(2)] == [0, 1]
                await client.send(Question(2))
                assert (await anext(server)).message.seed == 2
