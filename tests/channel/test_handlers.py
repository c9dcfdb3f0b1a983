"""How the work for a request ends: by exceptions, cancelled requests, and closed clients and servers."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

import anyio
import pytest

from aiotensor import ClosedError, PeerLostError
from aiotensor.channel import Request
from aiotensor.channel.cancelling import CancelOnce
from tests.channel.parties import Answer, Channel, Question, channel, said, settled, still_waits
from verification.inside import held_by_client
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# Exceptions


class _Stop(BaseException):
    """An exception of the application that no `except Exception` is meant to catch."""


async def test_an_exception_that_stops_a_handler_raises_peer_lost_error_at_the_client() -> None:
    with said() as texts:
        async with channel() as ends:
            asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG))))
            with pytest.raises(_Stop):
                async with await anext(ends.server):
                    raise _Stop
            with pytest.raises(PeerLostError, match="_Stop") as caught:
                await asking
            assert caught.value.pid == os.getpid()
            assert ends.server.statistics().failures == 1
            await settled(ends)
    assert not texts


async def test_a_request_dropped_before_its_block_is_lost_and_logged_if_it_needs_an_answer() -> None:
    with said() as texts:
        async with channel() as ends:
            await ends.client.send(Question(1, pattern(1, BIG)))
            request = await anext(ends.server)
            del request
            await settled(ends)
            assert ends.server.statistics().failures == 0
            assert not texts
            asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG))))
            request = await anext(ends.server)
            del request
            with pytest.raises(PeerLostError, match="dropped without an answer"):
                await asking
            await settled(ends)
    [text] = texts
    assert "answer each request in its block" in text


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


# Cancelled requests: as by `asyncio.Task.cancel`, work is cancelled once, and nothing else is


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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("end", ["the request is cancelled", "the client disconnects"])
async def test_a_handler_that_shields_its_work_is_cancelled_once(end: str) -> None:
    async with channel() as ends:
        handler = Shielded()
        serving = asyncio.create_task(ends.server.serve(handler))
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


# Closing an end, or losing the other one, ends every call that waits there


@pytest.mark.usefixtures("way")
@pytest.mark.promise(10)
async def test_closing_ends_waiting_calls_of_client_and_server() -> None:
    async with channel(2) as ends:
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(4)]
        request = await anext(ends.server)
        await until(lambda: ends.server.statistics().waiting == 2)
        assert ends.client.statistics().waiting == 1  # for a permit
        await ends.client.aclose()
        for call in (*asking, ends.client.request(Question(2))):
            with pytest.raises(ClosedError, match="this MessageClient was closed"):
                await call
        await until(lambda: not request.is_wanted)
        assert not await request.answer(Answer(1))
        assert ends.server.statistics().waiting == 0
        iterating = asyncio.create_task(anext(ends.server, None))

        await ends.server.aclose()
        assert await iterating is None
        assert [request async for request in ends.server] == []
        await ends.client.aclose()
        assert ends.server.statistics().clients_lost == 1


MANY = {"tensors": [pattern(seed, 3000) for seed in range(200)]}  # opened in several iterations of the loop


@pytest.mark.parametrize("closes", ["client", "server"])
async def test_closing_while_a_message_is_opened_ends_the_call_and_breaks_no_protocol(closes: str) -> None:
    with said() as texts:
        async with channel() as ends:
            more = MANY if closes == "server" else {}
            asking = asyncio.create_task(ends.client.request(Question(1, more=more)))
            if closes == "server":
                await ends.server.arrived()
                taking = asyncio.create_task(anext(ends.server, None))
                await until(lambda: ends.server.statistics().leases > 0)
                await ends.server.aclose()
                assert await taking is None
                with pytest.raises(PeerLostError, match="it closed the connection"):
                    await asking
            else:
                await (await anext(ends.server)).answer(Answer(1, more=MANY))
                await until(lambda: held_by_client(ends.client)["leases of answers"] > 0)
                await ends.client.aclose()
                with pytest.raises(ClosedError):
                    await asking
    assert not any("broke the protocol" in text for text in texts)


async def test_an_answer_that_waits_for_memory_when_the_server_closes_raises_closed_error() -> None:
    async with channel(server={"arena_bytes": BIG * 8 + 4096}) as ends:
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(2)]
        first, second = await anext(ends.server), await anext(ends.server)
        await first.answer(Answer(0, tensor=pattern(0, BIG)))
        kept = await asking[0]
        answering = asyncio.create_task(second.answer(Answer(1, tensor=pattern(1, BIG))))
        assert await still_waits(answering)
        await ends.server.aclose()
        with pytest.raises(ClosedError, match="this MessageServer was closed"):
            await answering
        with pytest.raises(PeerLostError):
            await asking[1]
        del kept, asking
