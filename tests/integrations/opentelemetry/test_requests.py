"""The spans of requests and batches: the work of servers, waits, errors, cancellations and threads."""

import asyncio
import threading
from pathlib import Path

import pytest
from opentelemetry import trace

from aiotensor import RemoteError, UsageError, blocking
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.integrations.opentelemetry import instrument, processing, uninstrument
from tests.cancelling import Attempt, cancel_everywhere
from tests.channel.parties import Answer, Question, channel, serving, settled
from tests.integrations.opentelemetry.spans import Recorder, all_of, one, recording, tree
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.processes.peers import State
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# Work on requests


async def _ask(state: State, address: str) -> int:
    async with MessageClient(address, Answer) as client:
        return (await client.request(Question(7))).seed


async def test_the_work_on_a_request_of_a_client_without_tracing_begins_a_trace(
    recorder: Recorder, folder: Path
) -> None:
    address = f"unix://{folder}/engine.sock"
    async with (
        MessageServer(address, Question) as server,
        serving(server),
        peers.peers("", 1) as [peer],
    ):
        with recorder.tracer.start_as_current_span("not its parent"):
            assert await peer.call(_ask, address) == 7
    answered = one(recorder.seen, "aiotensor answer")
    assert answered.parent == 0
    assert answered.kind == "SERVER"


# Errors and cancellations


async def test_an_error_of_a_handler_is_recorded_on_both_sides(recorder: Recorder) -> None:
    async with channel() as ends, serving(ends.server):
        with pytest.raises(RemoteError):
            await ends.client.request(Question(1, wish="raise"))

    answered, asked = one(recorder.seen, "aiotensor answer"), one(recorder.seen, "aiotensor request")
    assert answered.status == asked.status == "ERROR"
    assert answered.events == asked.events == ("exception",)
    assert answered.attributes["error.type"] == "builtins.ValueError"
    assert asked.attributes["error.type"] == "aiotensor.errors.RemoteError"


async def test_a_cancelled_request_ends_the_spans_of_both_sides_without_an_error(recorder: Recorder) -> None:
    async def work(question: Question) -> Answer:
        await asyncio.get_running_loop().create_future()
        return Answer(0)

    async with channel() as ends, serving(ends.server, handler=work):
        asking = asyncio.create_task(ends.client.request(Question(1)))
        await until(lambda: ends.server.statistics().in_hand == 1)
        asking.cancel()
        await asyncio.wait([asking])
        await settled(ends)
        await until(lambda: not recorder.unfinished)

    for name in ("aiotensor request", "aiotensor answer"):
        span = one(recorder.seen, name)
        assert (span.status, span.attributes.get("aiotensor.cancelled")) == ("UNSET", True)


async def test_a_request_cancelled_anywhere_ends_all_its_spans(recorder: Recorder) -> None:
    async with channel() as ends, serving(ends.server):

        async def attempt(attempt: Attempt) -> None:
            asking = attempt.start(ends.client.request(Question(1, pattern(1, BIG), wish="3")))
            await asking.completed()
            await settled(ends)
            await until(lambda: not recorder.unfinished)

        assert await cancel_everywhere(attempt, ends.client, ends.server)
    assert any(span.attributes.get("aiotensor.cancelled") for span in recorder.seen)


# Threads


def test_the_span_of_a_thread_is_the_parent_of_its_calls(recorder: Recorder, folder: Path) -> None:
    with (
        blocking.TensorReceiver(f"unix://{folder}/tensors") as receiver,
        blocking.TensorSender(f"unix://{folder}/tensors") as sender,
    ):
        sender.ready()

        def upload(name: str) -> None:
            with recorder.tracer.start_as_current_span(name):
                receiver.receive(sender.send(pattern(0, BIG)))
                receiver.receive(sender.post(pattern(0, 3)))

        threads = [threading.Thread(target=upload, args=(name,)) for name in ("first", "second")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = tree(recorder.seen)
    assert sorted(found) == ["first", "second"]
    for name in found:
        sent = [span for span in recorder.seen if span.parent == one(recorder.seen, name).id]
        assert [span.name for span in sent] == ["aiotensor send tensor"] * 2
        delivered = [span for span in recorder.seen if span.parent in {one.id for one in sent}]
        assert [span.name for span in delivered].count("aiotensor deliver tensor") == 2
        # The call that received the tensor is linked to the delivery.
        links = [span.links for span in delivered if span.name == "aiotensor deliver tensor"]
        assert links == [(one(recorder.seen, name).id,)] * 2


def test_work_in_a_thread_is_below_the_span_of_the_client(recorder: Recorder, folder: Path) -> None:
    def work(question: Question) -> Answer:
        with recorder.tracer.start_as_current_span("forward"):
            if question.wish:
                raise ValueError(question.wish)
            return Answer(question.seed)

    with (
        blocking.MessageServer(f"unix://{folder}/engine.sock", Question) as server,
        blocking.MessageClient(f"unix://{folder}/engine.sock", Answer) as client,
    ):
        client.ready()
        thread = threading.Thread(target=server.serve, args=(work,))
        thread.start()
        assert client.request(Question(3)).seed == 3
        with pytest.raises(RemoteError):
            client.request(Question(3, wish="an error"))
        server.close()
        thread.join()

    asked, answered = (all_of(recorder.seen, f"aiotensor {name}") for name in ("request", "answer"))
    assert [span.parent for span in answered] == [span.id for span in asked]
    assert [span.parent for span in all_of(recorder.seen, "forward")] == [span.id for span in answered]
    assert [span.status for span in (*asked, *answered)] == ["UNSET", "ERROR"] * 2


# Batches, and blocks that end in other tasks


async def test_the_span_of_a_batch_and_those_of_its_requests_are_linked(recorder: Recorder) -> None:
    async def work(questions: list[Question]) -> list[Answer | ValueError]:
        with recorder.tracer.start_as_current_span("forward"):
            return [Answer(one.seed) if one.seed else ValueError("no seed") for one in questions]

    async with channel() as ends:
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(3)]
        await until(lambda: ends.server.statistics().waiting == 3)
        working = asyncio.create_task(ends.server.serve(work, max_batch=3))
        await asyncio.wait(asking)
        working.cancel()
        await asyncio.wait([working])
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


async def test_a_block_that_ends_in_another_task_leaves_no_ended_span_current_there(
    recorder: Recorder,
) -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        request = await anext(ends.server)

        async def leave() -> trace.Span:
            assert trace.get_current_span() is not engine  # it inherited the span of the block
            await request.answer(Answer(1))
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


# Instrumenting a process, and reverting it


async def test_a_process_that_is_not_instrumented_any_more_creates_no_spans() -> None:
    with recording() as recorder, pytest.raises(UsageError, match="call uninstrument"):
        instrument()
    uninstrument()
    async with channel() as ends, serving(ends.server):
        await ends.client.request(Question(1, pattern(1, 3)))
        with processing() as span:
            assert not span.is_recording()
    assert recorder.seen == []
