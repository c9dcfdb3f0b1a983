"""Closing an end, or losing the other one, ends every call that waits there, whatever it waits for."""

import asyncio

import pytest

from aiotensor import ClosedError, PeerLostError, TensorHandle
from tests.channel.parties import Answer, Channel, Question, channel, settled
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("way")


async def ask_without_a_permit(ends: Channel) -> tuple[TensorHandle, "asyncio.Task[Answer]"]:
    """Begin a request that waits for the permit of a tensor; return the tensor's handle, and the request."""
    handle = await ends.sender.send(pattern(1, BIG))
    asking = asyncio.create_task(ends.client.request(Question(2, pattern(2, BIG))))
    await until(lambda: ends.sender.statistics().waiting == 1)
    return handle, asking


async def test_closing_ends_waiting_calls_of_client_and_server() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        request = await anext(ends.server)
        iterating = asyncio.create_task(anext(ends.server, None))
        await ends.client.aclose()
        with pytest.raises(ClosedError):
            await asking
        with pytest.raises(ClosedError):
            await ends.client.request(Question(2))
        await until(lambda: not request.is_wanted)
        assert not await request.reply(Answer(1))

        await ends.server.aclose()
        assert await iterating is None
        assert [request async for request in ends.server] == []
        await ends.client.aclose()
        assert ends.server.statistics().clients_lost == 1


async def test_closing_a_client_ends_a_request_that_waits_for_a_permit_at_once() -> None:
    async with channel(1) as ends:
        handle, asking = await ask_without_a_permit(ends)
        await ends.client.aclose()
        with pytest.raises(ClosedError, match="this MessageClient was closed"):
            await asking
        await ends.receiver.receive(handle)
        await settled(ends)


async def test_closing_a_client_while_it_sends_a_tensor_raises_closed_error() -> None:
    async with channel(1) as ends:
        handle, asking = await ask_without_a_permit(ends)
        closing = asyncio.create_task(ends.client.aclose())
        await ends.receiver.receive(handle)  # returns the permit: the tensor of the request may be sent
        with pytest.raises(ClosedError, match="this MessageClient was closed"):
            await asking
        await closing
        await settled(ends)


async def test_losing_a_server_ends_a_request_that_waits_for_a_permit() -> None:
    async with channel(1) as ends:
        handle, asking = await ask_without_a_permit(ends)
        await ends.server.aclose()
        with pytest.raises(PeerLostError, match="lost while the tensors of a message"):
            await asking
        await ends.receiver.receive(handle)
        await settled(ends)


async def test_serving_returns_when_the_server_is_closed_at_its_limit_of_running_tasks() -> None:
    async with channel() as ends:
        has_begun = asyncio.Event()

        async def never(question: Question) -> Answer:
            has_begun.set()
            await asyncio.get_running_loop().create_future()
            raise AssertionError(f"the answer to {question} was never decided")

        serving = asyncio.create_task(ends.server.serve(never, max_concurrent=1))
        asking = asyncio.create_task(ends.client.request(Question(1)))
        await has_begun.wait()
        await ends.server.aclose()
        with pytest.raises(PeerLostError):
            await asking
        await serving
        await settled(ends)


async def test_closing_a_server_cancels_the_block_of_a_message_whose_client_is_gone() -> None:
    async with channel() as ends:
        has_begun = asyncio.Event()

        async def handle() -> None:
            async with await anext(ends.server):
                has_begun.set()
                await asyncio.get_running_loop().create_future()

        handling = asyncio.create_task(handle())
        await ends.client.send(Question(1))
        await has_begun.wait()
        await ends.client.aclose()
        await until(lambda: ends.server.statistics().clients == 0)
        assert ends.server.statistics().in_hand == 1  # a message without an answer is still valid
        await ends.server.aclose()
        await handling
        assert ends.server.statistics().in_hand == 0
