"""Work for a client that is gone is cancelled once, as `asyncio.Task.cancel` does, and nothing else is."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import anyio
import pytest

from aiotensor import PeerLostError
from aiotensor.channel import Request
from aiotensor.channel.cancelling import CancelOnce
from tests.channel.parties import Answer, Channel, Question, channel, said, settled
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("way")

_TURNS = 200  # of the loop, in each of which a scope of anyio would cancel the task again


class Shielded:
    """A handler that does not let its work be cancelled."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.cancellations = self.finished = 0

    async def __call__(self, question: Question) -> Answer:
        work = asyncio.create_task(self._work())
        self.begun.set()
        while not work.done():
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                self.cancellations += 1
                self.go_on.set()
        self.finished += 1
        return Answer(question.seed)

    async def _work(self) -> None:
        await self.go_on.wait()
        for _ in range(_TURNS):
            await asyncio.sleep(0)


async def serve(ends: Channel, handler: Shielded) -> None:
    await ends.server.serve(handler)


async def serve_by_blocks(ends: Channel, handler: Shielded) -> None:
    async for request in ends.server:
        async with request:
            await request.reply(await handler(request.message))


WAYS = [serve, serve_by_blocks]


@pytest.mark.parametrize("serving_by", WAYS)
@pytest.mark.parametrize("end", ["the request is cancelled", "the client disconnects"])
async def test_a_handler_that_shields_its_work_is_cancelled_once(
    serving_by: Callable[..., object], end: str
) -> None:
    async with channel() as ends:
        handler = Shielded()
        serving = asyncio.ensure_future(serving_by(ends, handler))  # type: ignore[call-overload]
        asking = asyncio.create_task(ends.client.request(Question(1)))
        await handler.begun.wait()
        if end == "the request is cancelled":
            asking.cancel()
        else:
            await ends.client.aclose()
        await until(lambda: handler.finished == 1)
        assert handler.cancellations == 1
        await asyncio.wait([asking])
        assert asking.cancelled() if end == "the request is cancelled" else asking.exception()
        await settled(ends)
        await ends.server.aclose()
        await serving


@pytest.mark.parametrize("by", ["task", "scope"])
async def test_cancelling_serve_cancels_each_handler_once_and_waits_for_all(by: str) -> None:
    async with channel() as ends:
        handler = Shielded()
        scope = anyio.CancelScope()

        async def run() -> None:
            with scope:
                await ends.server.serve(handler)

        serving = asyncio.create_task(run())
        asking = asyncio.create_task(ends.client.request(Question(1)))
        await handler.begun.wait()
        if by == "task":
            serving.cancel()
        else:
            scope.cancel()
        await asyncio.wait([serving])
        assert (handler.cancellations, handler.finished) == (1, 1)
        assert serving.cancelled() == (by == "task")
        assert (await asking).seed == 1  # the handler caught the cancellation, and answered
        await settled(ends)


async def test_a_request_that_was_taken_just_before_serve_is_cancelled_fails_as_cancelled() -> None:
    async with channel() as ends:
        begun = 0

        async def never(question: Question) -> Answer:
            nonlocal begun
            begun += 1
            await asyncio.get_running_loop().create_future()
            raise AssertionError("nothing sets that")

        serving = asyncio.create_task(ends.server.serve(never))
        asking = asyncio.create_task(ends.client.request(Question(1)))
        await until(lambda: ends.server.statistics().in_hand == 1)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        with pytest.raises(PeerLostError, match="CancelledError"):
            await asking
        assert begun <= 1
        await settled(ends)


async def wanted(ends: Channel) -> tuple["asyncio.Task[Answer]", Request[Question]]:
    """Ask something, and take it."""
    asking = asyncio.create_task(ends.client.request(Question(1)))
    return asking, await anext(ends.server)


async def give_up(asking: "asyncio.Task[Answer]", request: Request[Question]) -> None:
    asking.cancel()
    await until(lambda: not request.is_wanted)


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_code_after_the_block_of_a_cancelled_request_is_not_cancelled() -> None:
    async with channel() as ends:
        asking, request = await wanted(ends)
        giving_up = asyncio.create_task(give_up(asking, request))
        async with request:
            await asyncio.get_running_loop().create_future()
        assert cancelling() == 0
        await asyncio.sleep(0)
        await giving_up
        await settled(ends)


async def test_a_block_that_catches_its_cancellation_continues() -> None:
    async with channel() as ends:
        asking, request = await wanted(ends)
        giving_up = asyncio.create_task(give_up(asking, request))
        async with request:
            with suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        assert cancelling() == 0
        await giving_up
        await settled(ends)


async def test_an_exception_that_replaces_the_cancellation_is_logged() -> None:
    with said() as lines:
        async with channel() as ends:
            asking, request = await wanted(ends)
            giving_up = asyncio.create_task(give_up(asking, request))
            async with request:
                try:
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    raise ValueError("the cleanup failed") from None
            assert cancelling() == 0
            await giving_up
            await settled(ends)
    assert any("the cleanup failed" in line for line in lines)


async def test_leaving_a_block_before_its_cancellation_arrives_removes_it() -> None:
    async with channel() as ends:
        asking, request = await wanted(ends)
        await give_up(asking, request)
        async with request:
            pass
        assert cancelling() == 0
        for _ in range(3):
            await asyncio.sleep(0)
        await settled(ends)


async def test_closing_the_server_inside_a_block_cancels_the_rest_of_the_block_only() -> None:
    async with channel() as ends:
        asking, request = await wanted(ends)
        asking_again = asyncio.create_task(ends.client.request(Question(2)))
        another = await anext(ends.server)
        async with request, another:
            await ends.server.aclose()
            await asyncio.get_running_loop().create_future()
        assert cancelling() == 0
        await asyncio.sleep(0)
        await asyncio.wait([asking, asking_again])
        assert asking.exception()
        assert asking_again.exception()


@pytest.mark.parametrize("first", ["client", "task"])
async def test_a_simultaneous_cancellation_of_the_task_propagates(first: str) -> None:
    begun, block = asyncio.Event(), CancelOnce()

    async def work() -> None:
        with block:
            begun.set()
            await asyncio.get_running_loop().create_future()
        raise AssertionError("the cancellation of the task was lost")

    working = asyncio.create_task(work())
    await begun.wait()
    cancels: list[Callable[[], object]] = [block.cancel, working.cancel]
    for cancel in cancels if first == "client" else reversed(cancels):
        cancel()
    await asyncio.wait([working])
    assert working.cancelled()


async def test_a_simultaneous_timeout_around_the_block_raises_timeout_error() -> None:
    block = CancelOnce()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            with block:
                block.cancel()
                limit.reschedule(0)
                await asyncio.get_running_loop().create_future()
    assert cancelling() == 0
