"""The spans of batches and of failed requests, and of blocks that do not end in the task that began them."""

import asyncio
import threading
from pathlib import Path

import pytest
from opentelemetry import trace

from aiotensor import RemoteError, blocking
from tests.channel.parties import Answer, Question, channel
from tests.integrations.opentelemetry.calls import serving
from tests.integrations.opentelemetry.spans import Recorder, all_of, one
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_the_span_of_a_batch_and_those_of_its_requests_are_linked(recorder: Recorder) -> None:
    async def work(questions: list[Question]) -> list[Answer | ValueError]:
        with recorder.tracer.start_as_current_span("forward"):
            return [Answer(one.seed) if one.seed else ValueError("no seed") for one in questions]

    async with channel() as ends:
        await ends.client.ready()
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(3)]
        await until(lambda: ends.server.statistics().waiting == 3)
        async with serving(ends.server, work, max_batch=3):
            await asyncio.wait(asking)
        assert [task.exception() is None for task in asking] == [False, True, True]

    batch, asked = one(recorder.seen, "aiotensor answer batch"), all_of(recorder.seen, "aiotensor request")
    assert batch.parent == 0
    assert set(batch.links) == {span.id for span in asked}
    assert batch.attributes["messaging.batch.message_count"] == 3
    assert one(recorder.seen, "forward").parent == batch.id
    answered = all_of(recorder.seen, "aiotensor answer")
    assert {span.parent for span in answered} == {span.id for span in asked}
    for span in answered:
        assert span.links == (batch.id,)
        is_of_error = span.parent == min(asked, key=lambda span: span.began).id
        assert span.status == ("ERROR" if is_of_error else "UNSET")
        assert span.began <= batch.began  # when the request was taken


def _check_failed_batch(recorder: Recorder) -> None:
    """Check the spans of a batch of two requests whose handler raised a `ValueError`."""
    batch, asked = one(recorder.seen, "aiotensor answer batch"), all_of(recorder.seen, "aiotensor request")
    answered = all_of(recorder.seen, "aiotensor answer")
    assert len(asked) == 2
    assert {span.parent for span in answered} == {span.id for span in asked}
    assert [span.links for span in answered] == [(batch.id,)] * 2
    for span in (batch, *answered):
        assert (span.status, span.attributes["error.type"]) == ("ERROR", "builtins.ValueError")


async def test_an_error_of_a_batch_is_recorded_in_its_span_and_in_those_of_its_requests(
    recorder: Recorder,
) -> None:
    async def work(questions: list[Question]) -> list[Answer]:
        raise ValueError("no batch today")

    async with channel() as ends:
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(2)]
        await until(lambda: ends.server.statistics().waiting == 2)
        async with serving(ends.server, work, max_batch=2):
            await asyncio.wait(asking)
        assert {type(task.exception()) for task in asking} == {RemoteError}
    _check_failed_batch(recorder)


def test_an_error_of_a_batch_in_a_thread_is_recorded_in_the_spans_of_its_requests(
    recorder: Recorder, folder: Path
) -> None:
    def work(questions: list[Question]) -> list[Answer]:
        raise ValueError("no batch today")

    address = f"ipc://{folder}/messages"
    with (
        blocking.MessageServer(address, Question) as server,
        blocking.MessageClient(address, reply_type=Answer) as client,
    ):
        client.ready()

        def ask() -> None:
            with pytest.raises(RemoteError):
                client.request(Question(1))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        while server.statistics().waiting < 2:
            threading.Event().wait(0.001)
        answering = threading.Thread(target=server.serve, args=(work,), kwargs={"max_batch": 2})
        answering.start()
        for thread in threads:
            thread.join()
        server.close()
        answering.join()
    _check_failed_batch(recorder)


@pytest.mark.parametrize("reason", ["no answer today", ValueError("no answer today")])
async def test_an_answer_with_an_error_is_recorded(reason: str | ValueError, recorder: Recorder) -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        async with await anext(ends.server) as request:
            assert await request.fail(reason)
        await asyncio.wait([asking])
        assert isinstance(asking.exception(), RemoteError)
    answered = one(recorder.seen, "aiotensor answer")
    kind = "Exception" if isinstance(reason, str) else "ValueError"
    assert (answered.status, answered.attributes["error.type"]) == ("ERROR", f"builtins.{kind}")


def test_an_answer_with_an_error_in_a_thread_is_recorded(recorder: Recorder, folder: Path) -> None:
    address = f"ipc://{folder}/messages"
    with (
        blocking.MessageServer(address, Question) as server,
        blocking.MessageClient(address, reply_type=Answer) as client,
    ):

        def fail() -> None:
            with next(iter(server)) as request:
                assert request.fail(ValueError("no answer today"))

        failing = threading.Thread(target=fail)
        failing.start()
        with pytest.raises(RemoteError):
            client.request(Question(1))
        failing.join()
    answered = one(recorder.seen, "aiotensor answer")
    assert (answered.status, answered.attributes["error.type"]) == ("ERROR", "builtins.ValueError")


async def test_a_cancelled_batch_ends_its_span_without_an_error(recorder: Recorder) -> None:
    async def work(questions: list[Question]) -> list[Answer]:
        await asyncio.get_running_loop().create_future()
        return []

    async with channel() as ends, serving(ends.server, work, max_batch=2):
        asking = asyncio.create_task(ends.client.request(Question(1)))
        await until(lambda: ends.server.statistics().in_hand == 1)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: not recorder.unfinished)
    batch = one(recorder.seen, "aiotensor answer batch")
    assert (batch.status, batch.attributes["aiotensor.cancelled"]) == ("UNSET", True)


async def test_a_block_may_end_in_another_task_than_it_began(recorder: Recorder) -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        request = await anext(ends.server)
        await asyncio.create_task(request.__aenter__())
        await request.reply(Answer(1))
        await asyncio.create_task(request.__aexit__(None, None, None))
        await asking
    assert one(recorder.seen, "aiotensor answer").status == "UNSET"


async def test_a_block_that_ends_in_another_task_leaves_no_ended_span_current_there(
    recorder: Recorder,
) -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        request = await anext(ends.server)

        async def leave() -> trace.Span:
            assert trace.get_current_span() is not engine  # it inherited the span of the block
            await request.reply(Answer(1))
            await request.__aexit__(None, None, None)
            return trace.get_current_span()

        async def enter() -> "asyncio.Task[trace.Span]":
            await request.__aenter__()
            return asyncio.create_task(leave())

        with recorder.tracer.start_as_current_span("engine") as engine:
            leaving = await asyncio.create_task(enter())
            assert await leaving is engine
        await asking
    assert one(recorder.seen, "aiotensor answer").status == "UNSET"
