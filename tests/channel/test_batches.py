"""A server handles requests in batches."""

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from aiotensor import PeerLostError, RemoteError
from aiotensor.channel import MessageClient, MessageServer, Request
from tests.channel.parties import Answer, Channel, Question, answer, channel, place, said, settled
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_LONG_S = 60.0


def _ask(ends: Channel, *seeds: int, size: int = 3) -> list[asyncio.Task[Answer]]:
    """Begin requests with tensors."""
    return [asyncio.create_task(ends.client.request(Question(seed, pattern(seed, size)))) for seed in seeds]


async def _answer_all(batch: list[Request[Question]]) -> None:
    for request in batch:
        await request.answer(await answer(request.message))


async def _end(serving: asyncio.Task[None]) -> None:
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


@pytest.mark.usefixtures("way")
async def test_each_request_gets_the_result_for_its_message() -> None:
    sizes = []

    async def handle(questions: list[Question]) -> list[Answer]:
        sizes.append(len(questions))
        return [await answer(question) for question in questions]

    async with channel(32) as ends:
        serving = asyncio.create_task(ends.server.serve(handle, max_batch=8, batch_wait_s=_LONG_S))
        answers = await asyncio.gather(*_ask(ends, *range(16)), *_ask(ends, *range(16, 32), size=BIG // 100))
        assert [one.seed for one in answers] == list(range(32))
        assert [one.total for one in answers[:16]] == [int(pattern(seed, 3).sum()) for seed in range(16)]
        assert sizes == [8, 8, 8, 8]
        await settled(ends)
        await _end(serving)


async def test_a_batch_contains_the_requests_that_are_ready() -> None:
    async with channel() as ends:
        asking = _ask(ends, *range(5))
        await until(lambda: ends.server.statistics().waiting == 5)
        batches = ends.server.batches(3)
        for seeds in ([0, 1, 2], [3, 4]):
            batch = await anext(batches)
            assert [request.message.seed for request in batch] == seeds
            await _answer_all(batch)
        assert [(await asked).seed for asked in asking] == [0, 1, 2, 3, 4]


async def test_the_first_request_of_a_batch_waits_for_others_at_most_batch_wait_s() -> None:
    async with channel() as ends:
        batches = ends.server.batches(3, batch_wait_s=0.01)
        [asked] = _ask(ends, 0)
        await _answer_all(await anext(batches))
        assert (await asked).seed == 0


async def test_a_cancelled_request_leaves_its_batch() -> None:
    async with channel() as ends:
        batches = ends.server.batches(3, batch_wait_s=_LONG_S)
        next_batch = asyncio.ensure_future(anext(batches))
        first, second = _ask(ends, 0, 1, size=BIG)
        await until(lambda: ends.server.statistics().waiting == 2)
        assert ends.client.statistics().in_flight == 2  # waiting requests keep their permits
        first.cancel()
        await until(lambda: ends.server.statistics().waiting == 1)
        third, fourth = _ask(ends, 2, 3)
        batch = await next_batch
        assert [request.message.seed for request in batch] == [1, 2, 3]
        await _answer_all(batch)
        assert [(await asked).seed for asked in (second, third, fourth)] == [1, 2, 3]
        del batch, next_batch
        await settled(ends)


@pytest.mark.parametrize(
    ("result", "error"),
    [(KeyError("unknown"), "KeyError"), (object(), "TypeError")],
    ids=["an exception", "a value that cannot be encoded"],
)
async def test_a_result_that_is_not_an_answer_fails_its_request_only(result: object, error: str) -> None:
    async def handle(questions: list[Question]) -> list[object]:
        return [result if question.seed == 1 else await answer(question) for question in questions]

    async with channel() as ends:
        with said():
            serving = asyncio.create_task(ends.server.serve(handle, max_batch=3, batch_wait_s=_LONG_S))
            good, bad, other = await asyncio.gather(*_ask(ends, 0, 1, 2), return_exceptions=True)
        assert isinstance(good, Answer)
        assert isinstance(other, Answer)
        assert isinstance(bad, RemoteError)
        assert bad.type_name == error
        await _end(serving)


@pytest.mark.parametrize("problem", ["raises", "returns too little", "returns no list"])
async def test_an_error_of_the_handler_is_raised_in_every_client_and_logged_once(problem: str) -> None:
    async def handle(questions: list[Question]) -> Sequence[object]:
        if problem == "raises":
            raise ValueError("no memory on the GPU")
        return cast("Sequence[object]", None) if problem == "returns no list" else []

    async with channel() as ends:
        with said() as texts:
            serving = asyncio.create_task(ends.server.serve(handle, max_batch=3, batch_wait_s=_LONG_S))
            failed = await asyncio.gather(*_ask(ends, 0, 1, 2), return_exceptions=True)
        words = {
            "raises": "no memory on the GPU",
            "returns too little": "0 results for a batch of 3 messages",
            "returns no list": "must return a list of 3 results, got 'NoneType'",
        }
        for error in failed:
            assert isinstance(error, RemoteError)
            assert words[problem] in str(error)
        assert len(texts) == 1
        assert texts[0].startswith("answering a batch of 3 requests failed")
        await settled(ends)
        await _end(serving)


async def test_the_handler_is_cancelled_once_no_request_of_its_batch_is_wanted() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def handle(questions: list[Question]) -> list[Answer]:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    async with channel() as ends:
        serving = asyncio.create_task(ends.server.serve(handle, max_batch=2, batch_wait_s=_LONG_S))
        first, second = _ask(ends, 0, 1)
        await started.wait()
        first.cancel()
        await until(lambda: ends.server.statistics().in_hand == 1)
        assert not ended.is_set()
        second.cancel()
        await ended.wait()
        await settled(ends)
        await _end(serving)


@pytest.mark.parametrize(("limit", "batches"), [({"max_concurrent": 5}, [2, 2]), ({}, [2])])
async def test_max_concurrent_counts_the_requests_of_all_batches_and_is_one_batch_by_default(
    limit: dict[str, int], batches: list[int]
) -> None:
    go_on = asyncio.Event()
    running: list[int] = []

    async def handle(questions: list[Question]) -> list[Answer]:
        running.append(len(questions))
        await go_on.wait()
        return [await answer(question) for question in questions]

    async with channel(16) as ends:
        with pytest.raises(ValueError, match="max_concurrent must be at least max_batch, which is 2, got 1"):
            await ends.server.serve(handle, max_batch=2, max_concurrent=1)
        serving = asyncio.create_task(ends.server.serve(handle, max_batch=2, batch_wait_s=_LONG_S, **limit))
        asking = _ask(ends, *range(8))
        await until(lambda: running == batches and ends.server.statistics().waiting == 8 - sum(batches))
        for _ in range(10):
            await asyncio.sleep(0)
        assert running == batches
        go_on.set()
        assert [one.seed for one in await asyncio.gather(*asking)] == list(range(8))
        await _end(serving)


async def test_a_cancelled_wait_for_a_batch_loses_no_request() -> None:
    async with channel() as ends:
        batches = ends.server.batches(3, batch_wait_s=_LONG_S)
        waiting = asyncio.ensure_future(anext(batches))
        asking = _ask(ends, 0, 1)
        await until(lambda: ends.server.statistics().waiting == 2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        asking += _ask(ends, 2)
        batch = await anext(batches)
        assert [request.message.seed for request in batch] == [0, 1, 2]
        await _answer_all(batch)
        await asyncio.gather(*asking)


async def test_the_iteration_ends_when_the_server_is_closed() -> None:
    async with channel() as ends:

        async def collect() -> list[list[Request[Question]]]:
            return [batch async for batch in ends.server.batches(3, batch_wait_s=_LONG_S)]

        collecting = asyncio.create_task(collect())
        serving = asyncio.create_task(ends.server.serve(lambda _: asyncio.sleep(0, []), max_batch=3))
        await asyncio.sleep(0)
        await ends.server.aclose()
        assert await collecting == []
        await serving


async def test_an_invalid_limit_raises_value_error() -> None:
    with place() as here:
        async with MessageServer(here, Question) as server:
            for size, wait_s in ((0, 0.0), (-1, 0.0), (1, -1.0)):
                with pytest.raises(ValueError, match=r"max_batch|batch_wait_s"):
                    server.batches(size, batch_wait_s=wait_s)
                with pytest.raises(ValueError, match=r"max_batch|batch_wait_s"):
                    await server.serve(lambda _: asyncio.sleep(0, []), max_batch=size, batch_wait_s=wait_s)


async def test_requests_that_were_taken_for_a_batch_fail_when_serve_is_cancelled() -> None:
    with place() as here:
        async with MessageServer(here, list) as server, MessageClient(here, int) as client:
            small = asyncio.create_task(client.request([1]))
            await until(lambda: server.statistics().waiting == 1)
            large = asyncio.create_task(client.request([*range(200_000)]))  # which a thread decodes
            await until(lambda: server.statistics().waiting == 2)
            serving = asyncio.create_task(server.serve(_lengths, max_batch=2))
            await until(lambda: server.statistics().in_hand == 1)
            serving.cancel()
            with pytest.raises(PeerLostError):
                await small
            with pytest.raises(asyncio.CancelledError):
                await serving
            serving = asyncio.create_task(server.serve(_lengths, max_batch=2))
            assert await large == 200_000
            await server.aclose()
            await serving


async def _lengths(messages: Sequence[list[int]]) -> list[int]:
    return [len(message) for message in messages]
