"""Requests whose handlers are stopped: the client gets `PeerLostError`, as when the process is killed."""

import asyncio
import os

import pytest

from aiotensor import PeerLostError
from tests.channel.parties import Question, channel, said, settled
from verification.patterns import BIG, pattern

pytestmark = pytest.mark.usefixtures("way")


class _Stop(BaseException):
    """An exception of the application that no `except Exception` is meant to catch."""


STOPS = [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), _Stop("now")]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: type(stop).__name__)
async def test_an_exception_that_stops_a_handler_raises_peer_lost_error_at_the_client(
    stop: BaseException,
) -> None:
    with said() as texts:
        async with channel() as ends:
            asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG))))
            with pytest.raises(type(stop)):
                async with await anext(ends.server):
                    raise stop
            stop.__traceback__ = None
            with pytest.raises(PeerLostError, match=type(stop).__name__) as caught:
                await asking
            assert caught.value.pid == os.getpid()
            assert ends.server.statistics().failures == 1
            await settled(ends)
    assert not texts


@pytest.mark.parametrize(
    "error", [SystemExit(0), asyncio.CancelledError()], ids=lambda one: type(one).__name__
)
async def test_failing_a_request_with_a_stopping_exception_raises_peer_lost_error(
    error: BaseException,
) -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        request = await anext(ends.server)
        assert await request.fail(error)
        with pytest.raises(PeerLostError, match=type(error).__name__):
            await asking
        await settled(ends)


async def test_a_request_dropped_before_its_block_is_lost_and_logged() -> None:
    with said() as texts:
        async with channel() as ends:
            asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG))))
            request = await anext(ends.server)
            del request
            with pytest.raises(PeerLostError, match="dropped without a reply"):
                await asking
            await settled(ends)
    [text] = texts
    assert "answer each request in its block" in text


async def test_a_message_that_needs_no_answer_may_be_dropped() -> None:
    with said() as texts:
        async with channel() as ends:
            await ends.client.send(Question(1, pattern(1, BIG)))
            request = await anext(ends.server)
            assert request.message.seed == 1
            del request
            await settled(ends)
            assert ends.server.statistics().failures == 0
    assert not texts


async def test_a_cancelled_future_in_the_handler_is_logged_as_its_failure() -> None:
    async def wait_for_a_cancelled_future(question: Question) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with said() as texts:
        async with channel() as ends:
            serving = asyncio.create_task(ends.server.serve(wait_for_a_cancelled_future))
            for _ in range(2):  # the server continues
                with pytest.raises(PeerLostError, match="CancelledError"):
                    await ends.client.request(Question(1, pattern(1, BIG)))
            await settled(ends)
            serving.cancel()
            await asyncio.wait([serving])
    assert len(texts) == 2
    for text in texts:
        assert text.startswith(f"answering a request from process {os.getpid()} failed")


async def test_a_handler_cancelled_with_serve_is_not_logged_as_a_failure() -> None:
    begun = asyncio.Event()

    async def wait(question: Question) -> None:
        begun.set()
        await asyncio.Event().wait()

    with said() as texts:
        async with channel() as ends:
            serving = asyncio.create_task(ends.server.serve(wait))
            asking = asyncio.create_task(ends.client.request(Question(1)))
            await begun.wait()
            serving.cancel()
            with pytest.raises(PeerLostError):
                await asking
            await asyncio.wait([serving])
            await settled(ends)
    assert not texts
