"""Cancelling anything of the channel, wherever it suspends, leaves nothing behind."""

import asyncio
import fcntl
import gc
import os
from typing import Any

import pytest
import torch

from aiotensor import PeerLostError, RemoteError, TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from tests.cancellation.situations import SLOW
from tests.cancelling import Attempt, cancel_everywhere
from tests.channel.parties import Answer, Channel, Question, answer, channel, place, settled
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def everybody(ends: Channel) -> list[Any]:
    return [ends.sender, ends.receiver, ends.client, ends.server]


@pytest.mark.promise(29)
async def test_an_encoding_error_in_a_thread_frees_tensors_without_a_collection() -> None:
    async with channel() as ends:

        async def ask() -> None:
            tensor = await ends.sender.allocate((BIG,), torch.uint8)
            # So many are left to a thread. Its error passes through this frame, which refers to the tensor.
            await ends.client.request({"tensor": tensor, "many": [torch.zeros(1)] * 300, "wrong": object()})

        gc.disable()
        try:
            with pytest.raises(TypeError, match="a message cannot contain a 'object'") as caught:
                await ask()
            del caught
            await until(lambda: ends.sender.statistics().bytes_in_use == 0)
        finally:
            gc.enable()


@pytest.mark.promise(16)
async def test_a_cancelled_request_cancels_its_handler_and_releases_all_resources() -> None:
    async with channel() as ends:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def never(question: Question) -> Answer:
            begun.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.set()
            raise AssertionError("nobody sets that")

        serving = asyncio.create_task(ends.server.serve(never))
        asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG))))
        await begun.wait()
        asking.cancel()
        await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await settled(ends)
        assert ends.server.statistics().cancelled == 1
        assert ends.client.statistics().cancelled == 1
        await ends.server.aclose()
        await serving


async def test_a_request_cancelled_before_the_server_took_it_is_never_handed_out() -> None:
    async with channel(max_concurrent_videos=1) as ends:
        asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG))))
        await until(lambda: ends.server.statistics().waiting == 1)
        asking.cancel()
        await until(lambda: ends.server.statistics().cancelled == 1)
        await settled(ends)

        asking = asyncio.create_task(ends.client.request(Question(2, pattern(2, BIG))))
        request = await anext(ends.server)
        assert request.message.seed == 2
        await request.reply(Answer(2))
        await asking


async def test_entering_the_block_of_a_cancelled_request_cancels_the_block() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        request = await anext(ends.server)
        asking.cancel()
        await until(lambda: not request.is_wanted)
        async with request:
            await asyncio.sleep(0)
            raise AssertionError("the block of a cancelled request went on")
        assert not await request.reply(Answer(1))
        await settled(ends)


@pytest.mark.promise(21)
@pytest.mark.parametrize("has_tensor", [False, True])
async def test_a_request_can_be_cancelled_at_each_suspension(has_tensor: bool) -> None:
    async with channel() as ends:

        async def attempt(attempt: Attempt) -> None:
            tensor = pattern(1, BIG) if has_tensor else pattern(1, 5)
            asking = attempt.start(ends.client.request(Question(1, tensor)))
            await asking.until(lambda: ends.server.statistics().waiting == 1)
            if ends.server.statistics().waiting:
                taking = asyncio.create_task(anext(ends.server))
                await until(lambda: taking.done() or not ends.server.statistics().waiting)
                if taking.done():
                    request = taking.result()
                    answering = asyncio.create_task(request.reply(Answer(1, 5)))
                    await asyncio.wait([answering])
                taking.cancel()
                await asyncio.wait([taking])
            if await asking.completed():
                assert asking.value.total == 5

        assert await cancel_everywhere(attempt, *everybody(ends))


async def test_a_request_cancelled_while_its_answer_arrives_discards_the_answer() -> None:
    with place() as here:
        async with (
            TensorReceiver(here.answers) as receiver,
            TensorSender(here.answers) as sender,
            MessageServer(here.messages, Question, sender=sender) as server,
            MessageClient(here.messages, receiver=receiver, reply_type=Answer) as client,
        ):
            await until(lambda: sender.receiver_id == receiver.id)

            async def attempt(attempt: Attempt) -> None:
                asking = attempt.start(client.request(Question(1)))
                await asking.until(lambda: server.statistics().waiting == 1)
                if server.statistics().waiting:
                    taking = asyncio.create_task(anext(server))
                    await until(lambda: taking.done() or not server.statistics().waiting)
                    if taking.done():
                        await taking.result().reply(Answer(1, 5, pattern(1, BIG)))
                    taking.cancel()
                    await asyncio.wait([taking])
                if await asking.completed():
                    assert asking.value.tensor is not None
                    assert torch.equal(asking.value.tensor, pattern(1, BIG))

            assert await cancel_everywhere(attempt, sender, receiver, client, server)


async def test_a_request_cancelled_while_no_server_is_there_leaves_nothing() -> None:
    with place() as here:
        async with MessageClient(here.messages, reply_type=Answer) as client:

            async def attempt(attempt: Attempt) -> None:
                async with MessageServer(here.messages, Question) as server:
                    serving = asyncio.create_task(server.serve(answer))
                    asking = attempt.start(client.request(Question(1)))
                    if await asking.completed():
                        assert asking.value.seed == 1
                    await server.aclose()
                    await serving
                await until(lambda: client.statistics().servers == 0)

            assert await cancel_everywhere(attempt, client)


async def test_send_can_be_cancelled_at_each_suspension() -> None:
    async with channel() as ends:

        async def attempt(attempt: Attempt) -> None:
            sending = attempt.start(ends.client.send(Question(1, pattern(1, SLOW))))
            has_sent = await sending.completed()
            await ends.client.send(Question(2))
            seen = set()
            while 2 not in seen or (has_sent and 1 not in seen):
                async with await anext(ends.server) as request:
                    seen.add(request.message.seed)
            while ends.server.statistics().waiting:
                # It was cancelled when its header had left, and its tensors are discarded.
                await asyncio.sleep(0)

        assert await cancel_everywhere(attempt, *everybody(ends))


async def test_taking_a_request_cancelled_at_any_suspension_loses_no_request() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            large = pattern(1, 300_000)  # so large a message is decoded in a thread

            async def attempt(attempt: Attempt) -> None:
                taking = attempt.start(anext(server))
                asking = asyncio.create_task(client.request(Question(1, large)))
                request = taking.value if await taking.completed() else await anext(server)
                assert request.message.tensor is not None
                assert torch.equal(request.message.tensor, large)
                await request.reply(Answer(1))
                await asking

            assert await cancel_everywhere(attempt, client, server)


@pytest.mark.promise(21)
@pytest.mark.parametrize("by_sender", [False, True])
async def test_a_reply_cancelled_at_any_suspension_can_be_repeated(
    by_sender: bool,
) -> None:
    with place() as here:
        async with (
            TensorReceiver(here.answers) as receiver,
            TensorSender(here.answers) as sender,
            MessageServer(here.messages, Question, sender=sender if by_sender else ()) as server,
            MessageClient(here.messages, receiver=receiver, reply_type=Answer) as client,
        ):
            await until(lambda: sender.receiver_id == receiver.id)

            async def attempt(attempt: Attempt) -> None:
                asking = asyncio.create_task(client.request(Question(1)))
                request = await anext(server)
                replying = attempt.start(request.reply(Answer(1, 5, pattern(1, SLOW))))
                if await replying.completed():
                    assert replying.value
                elif request.is_wanted:
                    assert await request.reply(Answer(1, 5, pattern(1, SLOW)))
                got = await asking
                assert got.tensor is not None
                assert torch.equal(got.tensor, pattern(1, SLOW))

            assert await cancel_everywhere(attempt, sender, receiver, client, server)


async def test_serve_cancelled_at_any_suspension_leaves_no_handler_running() -> None:
    with place() as here:

        async def attempt(attempt: Attempt) -> None:
            async with (
                MessageServer(here.messages, Question) as server,
                MessageClient(here.messages, reply_type=Answer) as client,
            ):
                serving = attempt.start(server.serve(_answer_later))
                asking = [asyncio.create_task(client.request(Question(seed))) for seed in range(3)]
                await serving.until(lambda: all(one.done() for one in asking))
                await server.aclose()
                if await serving.completed():
                    assert [(await one).seed for one in asking] == [0, 1, 2]
                for one in asking:
                    one.cancel()  # it waits for the next server if it was not sent before
                for end in await asyncio.gather(*asking, return_exceptions=True):
                    assert isinstance(end, Answer | RemoteError | PeerLostError | asyncio.CancelledError)

        assert await cancel_everywhere(attempt)


async def _answer_later(question: Question) -> Answer:
    await asyncio.sleep(0)
    return Answer(question.seed)


async def test_opening_and_closing_can_be_cancelled_at_each_suspension() -> None:
    with place() as here:

        async def open_server(attempt: Attempt) -> None:
            folder = os.open(os.path.dirname(here.messages.removeprefix("ipc://")), os.O_RDONLY)
            fcntl.flock(folder, fcntl.LOCK_EX)  # or it would not wait at all
            server = MessageServer(here.messages, Question)
            opening = attempt.start(server.__aenter__())
            await opening.until(lambda: opening.suspensions)
            await opening.bring(lambda: os.close(folder))
            if await opening.completed():
                await server.aclose()

        async def close_server(attempt: Attempt) -> None:
            server = MessageServer(here.messages, Question)
            await server.__aenter__()
            await attempt.start(server.aclose()).completed()

        async def close_client(attempt: Attempt) -> None:
            client = MessageClient(here.messages, reply_type=Answer)
            await client.__aenter__()
            await attempt.start(client.aclose()).completed()

        for operation in (open_server, close_server, close_client):
            assert await cancel_everywhere(operation)
        async with MessageServer(here.messages, Question):
            pass
