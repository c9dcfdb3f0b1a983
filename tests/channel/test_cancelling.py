"""Cancelling anything of the channel, wherever it suspends, leaves nothing behind."""

import asyncio
import fcntl
import os
from functools import partial

import pytest
import torch

from aiotensor import PeerLostError, ProtocolError, RemoteError
from aiotensor.channel.client import MessageClient
from aiotensor.channel.server import MessageServer
from tests.cancellation.situations import SLOW
from tests.cancelling import Attempt, cancel_everywhere
from tests.channel.parties import Answer, Question, channel, place, serving, settled
from verification.inside import held_by_client
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.promise(29)
@pytest.mark.usefixtures("no_collections")
async def test_an_encoding_error_in_a_thread_frees_tensors_without_a_collection() -> None:
    async with channel() as ends:

        async def ask() -> None:
            async with ends.client.permit() as permit:
                tensor = await permit.allocate((BIG,), torch.uint8)
                # A thread encodes so many. Its error passes through this frame, which refers to the tensor.
                message = {"tensor": tensor, "many": [torch.zeros(1)] * 300, "wrong": object()}
                await ends.client.request(message, inside=permit)

        with pytest.raises(TypeError, match="a message cannot contain a 'object'"):
            await ask()
        await until(lambda: ends.client.statistics().bytes_in_use == 0)


@pytest.mark.promise(29)
async def test_an_error_about_a_received_message_keeps_none_of_its_tensors() -> None:
    async def answer_wrongly(question: Question) -> object:
        return {"seed": "a text", "tensor": pattern(1, BIG)}

    async with channel() as ends, serving(ends.server, handler=answer_wrongly):
        with pytest.raises(ProtocolError, match=r"Expected `int`, got `str`") as caught:
            await ends.client.request(Question(1))
        await until(lambda: ends.server.statistics().bytes_in_use == 0)
        assert caught.value.__traceback__ is not None, "the error is still there"


@pytest.mark.promise(21)
async def test_a_request_cancelled_while_its_answer_is_opened_returns_all_blocks_of_the_answer() -> None:
    async def answer_much(question: Question) -> Answer:
        return Answer(1, more={"all": [pattern(number, 3000) for number in range(200)]})

    async with channel() as ends, serving(ends.server, handler=answer_much):
        asking = asyncio.create_task(ends.client.request(Question(1)))
        while not held_by_client(ends.client)["leases of answers"]:  # some of its tensors are open
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        await settled(ends)


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


async def test_entering_the_block_of_a_cancelled_request_cancels_the_block() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        request = await anext(ends.server)
        asking.cancel()
        await until(lambda: not request.is_wanted)
        async with request:
            await asyncio.sleep(0)
            raise AssertionError("the block of a cancelled request went on")
        assert not await request.answer(Answer(1))
        await settled(ends)


@pytest.mark.usefixtures("scheme")
@pytest.mark.promise(21)
@pytest.mark.parametrize("count", [5, SLOW])
async def test_a_request_can_be_cancelled_at_each_suspension(count: int) -> None:
    async with channel() as ends:
        client, server = ends.client, ends.server

        async def attempt(attempt: Attempt) -> None:
            asking = attempt.start(client.request(Question(1, pattern(1, count))))
            await asking.until(lambda: server.statistics().waiting == 1)
            if server.statistics().waiting:
                taking = asyncio.create_task(anext(server))
                await until(lambda: taking.done() or not server.statistics().waiting)
                if taking.done():
                    await taking.result().answer(Answer(1, 5, pattern(2, count)))
                taking.cancel()
                await asyncio.wait([taking])
            if await asking.completed():
                assert asking.value.tensor is not None
                assert torch.equal(asking.value.tensor, pattern(2, count))
            del asking
            await settled(ends)

        assert await cancel_everywhere(attempt, client, server)


async def test_a_request_cancelled_while_no_server_is_there_leaves_nothing() -> None:
    with place() as here:
        async with MessageClient(here, Answer) as client:

            async def attempt(attempt: Attempt) -> None:
                asking = attempt.start(client.request(Question(1, pattern(1, BIG))))
                await asking.until(lambda: client.statistics().waiting == 1)
                async with MessageServer(here, Question) as server, serving(server):
                    if await asking.completed():
                        assert asking.value.seed == 1
                await until(lambda: client.statistics().servers == 0)

            assert await cancel_everywhere(attempt, client)


@pytest.mark.usefixtures("scheme")
async def test_send_can_be_cancelled_at_each_suspension() -> None:
    async with channel() as ends:

        async def attempt(attempt: Attempt) -> None:
            sending = attempt.start(ends.client.send(Question(1, pattern(1, SLOW))))
            was_sent = await sending.completed()
            await ends.client.send(Question(2))
            seeds = []
            while 2 not in seeds:
                request = await anext(ends.server)
                seeds.append(request.message.seed)
                del request
            if seeds != [1, 2]:  # it may have been announced before it was cancelled
                assert (seeds, was_sent) == ([2], False)
            await settled(ends)

        assert await cancel_everywhere(attempt, ends.client, ends.server)


async def test_taking_a_request_cancelled_at_any_suspension_loses_no_request() -> None:
    more: dict[str, list[torch.Tensor]] = {str(number): [] for number in range(10_000)}  # decoded in a thread
    async with channel() as ends:

        async def attempt(attempt: Attempt) -> None:
            taking = attempt.start(anext(ends.server))
            asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG), more)))
            request = taking.value if await taking.completed() else await anext(ends.server)
            assert request.message.tensor is not None
            assert torch.equal(request.message.tensor, pattern(1, BIG))
            await request.answer(Answer(1))
            await asking

        assert await cancel_everywhere(attempt, ends.client, ends.server)


@pytest.mark.promise(16, 27)
async def test_a_request_cancelled_while_it_is_decoded_releases_its_memory_once() -> None:
    # Its tensors are opened in several iterations, and its body is decoded in a thread.
    more = {str(number): list(torch.zeros(10, 2000)) for number in range(20)}
    turns, was_taken = 0, False
    async with channel() as ends:
        while not was_taken:
            asking = asyncio.create_task(ends.client.request(Question(1, more=more)))
            await ends.server.arrived()
            taking = asyncio.create_task(anext(ends.server))
            for _ in range(turns):
                await asyncio.sleep(0)
            was_taken = taking.done()
            asking.cancel()
            await asyncio.wait([asking])
            await ends.client.send(Question(2))
            request = await taking
            if request.message.seed == 1:
                request = await anext(ends.server)
            assert request.message.seed == 2
            del taking, request
            await settled(ends)
            turns += 1 + turns // 4
        assert turns > 5
        assert ends.client.statistics().servers_lost == 0


@pytest.mark.usefixtures("scheme")
@pytest.mark.promise(21)
async def test_an_answer_cancelled_at_any_suspension_can_be_repeated() -> None:
    async with channel() as ends:

        async def attempt(attempt: Attempt) -> None:
            asking = asyncio.create_task(ends.client.request(Question(1)))
            request = await anext(ends.server)
            answering = attempt.start(request.answer(Answer(1, 5, pattern(1, SLOW))))
            if await answering.completed():
                assert answering.value
            elif request.is_wanted:
                assert await request.answer(Answer(1, 5, pattern(1, SLOW)))
            got = await asking
            assert got.tensor is not None
            assert torch.equal(got.tensor, pattern(1, SLOW))
            del got, asking, request
            await settled(ends)

        assert await cancel_everywhere(attempt, ends.client, ends.server)


async def test_serve_cancelled_at_any_suspension_leaves_no_handler_running() -> None:
    with place() as here:

        async def attempt(attempt: Attempt) -> None:
            async with (
                MessageServer(here, Question) as server,
                MessageClient(here, Answer) as client,
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
            folder = os.open(os.path.dirname(here.removeprefix("unix://")), os.O_RDONLY)
            fcntl.flock(folder, fcntl.LOCK_EX)  # or it would not wait at all
            server = MessageServer(here, Question)
            opening = attempt.start(server.__aenter__())
            await opening.until(lambda: opening.suspensions)
            await opening.bring(lambda: os.close(folder))
            if await opening.completed():
                await server.aclose()

        async def close(attempt: Attempt, closes: type[object]) -> None:
            async with MessageServer(here, Question) as server, MessageClient(here, Answer) as client:
                async with serving(server):
                    await client.request(Question(1, pattern(1, SLOW), wish=str(SLOW)))
                await attempt.start((server if closes is MessageServer else client).aclose()).completed()

        close_server, close_client = (
            partial(close, closes=MessageServer),
            partial(close, closes=MessageClient),
        )
        for operation in (open_server, close_server, close_client):
            assert await cancel_everywhere(operation)
        async with MessageServer(here, Question):
            pass
