"""A client sends idempotent requests once more if their server is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from aiotensor import PeerLostError, TensorSender
from aiotensor.channel import MessageClient
from tests.channel.parties import Answer, Place, Question, answer, place
from tests.channel.peers import listening, open_server, process
from verification.patterns import BIG, pattern
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

either_way = pytest.mark.parametrize("with_senders", [True, False], ids=["by senders", "in messages"])


@asynccontextmanager
async def _client(*places: Place, with_senders: bool) -> AsyncIterator[MessageClient[Answer]]:
    async with AsyncExitStack() as stack:
        senders = (
            [await stack.enter_async_context(TensorSender(here.tensors)) for here in places]
            if with_senders
            else None
        )
        addresses = [here.messages for here in places]
        yield await stack.enter_async_context(MessageClient(addresses, sender=senders, reply_type=Answer))
        for sender in senders or ():
            await settled(sender)


def _question(seed: int) -> Question:
    return Question(seed, pattern(seed, BIG))


@either_way
async def test_another_server_answers_the_requests_of_a_killed_one(with_senders: bool) -> None:
    with place() as here, place() as there:
        async with process(here) as dying, listening(there) as (other, _):
            await dying.call(open_server, here, answers=False)
            async with _client(here, there, with_senders=with_senders) as client:
                await until(lambda: client.statistics().servers == 2)
                asking = [
                    asyncio.create_task(client.request(_question(seed), idempotent=True)) for seed in range(6)
                ]
                await until(lambda: client.statistics().messages_sent == 6)
                untaken, _ = client.statistics().in_flight
                assert untaken == 3
                dying.kill()
                serving = asyncio.create_task(other.serve(answer))
                answers = await asyncio.gather(*asking)
                assert [one.seed for one in answers] == list(range(6))
                assert [one.total for one in answers] == [int(pattern(seed, BIG).sum()) for seed in range(6)]
                assert client.statistics().retries == untaken
                del asking
            await other.aclose()
            await serving


@either_way
async def test_the_next_server_at_the_address_answers_if_there_is_only_one(with_senders: bool) -> None:
    with place() as here:
        async with _client(here, with_senders=with_senders) as client:
            async with listening(here) as (first, _):
                asking = asyncio.create_task(client.request(_question(5), idempotent=True))
                request = await anext(first)
                assert request.message.seed == 5
                del request
            async with listening(here) as (second, _):
                serving = asyncio.create_task(second.serve(answer))
                assert (await asking).seed == 5
                del asking
            await serving
            assert client.statistics().retries == 1


async def test_a_request_with_a_permit_is_sent_again_with_a_new_one() -> None:
    with place() as here:
        async with TensorSender(here.tensors, 1) as sender:
            async with MessageClient(here.messages, sender=sender, reply_type=Answer) as client:

                async def ask() -> Answer:
                    async with sender.message() as permit:
                        return await client.request(_question(5), inside=permit, idempotent=True)

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
            asking = asyncio.create_task(client.request(Question(5), idempotent=idempotent))
            for _ in range(1 + idempotent):
                assert not asking.done()
                async with listening(here) as (server, _):
                    await anext(server)
            with pytest.raises(PeerLostError):
                await asking
            assert client.statistics().retries == idempotent
