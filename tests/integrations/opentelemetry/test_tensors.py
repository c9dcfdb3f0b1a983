"""The spans of tensors and publications: their parents, waits, errors and cancellations, over every link."""

import asyncio
import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import baggage, context

from aiotensor import WouldBlockError
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.integrations.opentelemetry import SpanTracer, processing
from aiotensor.types import MAX_TRACE_VALUE
from tests.integrations.opentelemetry.spans import CALLS, Call, Recorder, begin_recording, one, recorded
from tests.pairs import endpoint, pair
from tests.selection import COMPLETE
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.processes.peers import State
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SLOW = 1 << 17  # elements of a tensor that a worker copies


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize(("call", "size"), [*((call, BIG) for call in CALLS), (CALLS[0], 3)])
async def test_the_call_that_sends_a_tensor_is_the_parent_of_its_delivery(
    call: Call, size: int, recorder: Recorder
) -> None:
    async with pair() as (sender, receiver):
        await sender.ready()
        with recorder.tracer.start_as_current_span("upload"):
            handle = await call(sender, pattern(0, size))
        assert torch.equal(await receiver.receive(handle), pattern(0, size))

    sent, delivered = (
        one(recorder.seen, "aiotensor send tensor"),
        one(recorder.seen, "aiotensor deliver tensor"),
    )
    assert sent.parent == one(recorder.seen, "upload").id
    assert (sent.kind, delivered.kind) == ("PRODUCER", "CONSUMER")
    assert (delivered.trace, delivered.parent) == (sent.trace, sent.id)
    name = f"{handle.sender}.{handle.message}.{handle.tensor}"
    for span in (sent, delivered):
        assert span.attributes["messaging.message.id"] == name
        assert span.attributes["messaging.message.body.size"] == size * 8
    assert sent.began <= delivered.ended


async def test_waits_for_a_permit_and_for_memory_have_spans(recorder: Recorder) -> None:
    async with pair(max_concurrent_videos=1, arena_bytes=BIG * 8) as (sender, receiver):
        first = await sender.send(pattern(0, BIG))
        second = asyncio.create_task(sender.send(pattern(1, BIG)))
        await until(lambda: sender.statistics().waiting == 1)
        tensor = await receiver.receive(first)
        await until(lambda: recorder.seen[-1].name == "aiotensor wait for a permit")
        assert sender.statistics().waiting == 1
        del tensor
        await receiver.receive(await second)

    sent = [span for span in recorder.seen if span.name == "aiotensor send tensor"]
    permit = one(recorder.seen, "aiotensor wait for a permit")
    memory = one(recorder.seen, "aiotensor wait for memory")
    assert permit.parent == memory.parent == sent[1].id
    assert permit.ended <= memory.began
    assert memory.attributes == {"aiotensor.nbytes": BIG * 8}


# Other processes


async def _publish(state: State, count: int) -> int:
    async with Publisher(state.endpoint) as publisher:
        await publisher.wait_for_subscribers(1)
        for _ in range(count):
            await publisher.publish(pattern(0, BIG))
        await publisher.drain()
    return count


async def test_a_received_publication_is_linked_to_the_span_of_its_publisher(recorder: Recorder) -> None:
    with endpoint() as place:
        async with peers.peers(place, 1) as [peer]:
            await peer.call(begin_recording)
            publishing = peer.start(_publish, 2)
            async with Subscriber(place, torch.Tensor) as subscriber:
                first = await subscriber.receive()
                with processing(first), recorder.tracer.start_as_current_span("forward"):
                    pass
                second = await subscriber.receive()
                del first, second
                await publishing
            there = await peer.call(recorded)

    published = [span for span in there if span.name == "aiotensor publish"]
    delivered = [span for span in recorder.seen if span.name == "aiotensor deliver publication"]
    assert [span.links for span in delivered] == [(span.id,) for span in published]
    assert [span.attributes["messaging.message.id"] for span in published] == ["0", "1"]
    assert {span.kind for span in published} == {"PRODUCER"}
    assert not {span.trace for span in published} & {span.trace for span in delivered}
    processed = one(recorder.seen, "aiotensor process")
    assert processed.links == (published[0].id,)
    assert one(recorder.seen, "forward").parent == processed.id


# Errors and cancellations


async def test_errors_are_recorded_in_the_span_of_the_call_and_of_its_wait(recorder: Recorder) -> None:
    async with pair(max_concurrent_videos=1, max_wait_s=0.5) as (sender, _):
        await sender.send(pattern(0, 3))
        with pytest.raises(WouldBlockError):
            await sender.send(pattern(1, 3))
        with pytest.raises(WouldBlockError):
            sender.send_nowait(pattern(2, 3))
        with pytest.raises(WouldBlockError):
            sender.post(pattern(2, 3))

    [sent, *failed] = [span for span in recorder.seen if span.name == "aiotensor send tensor"]
    assert sent.status == "UNSET"
    assert len(failed) == 3
    for span in [*failed, one(recorder.seen, "aiotensor wait for a permit")]:
        assert span.status == "ERROR"
        assert span.events == ("exception",)
        assert span.attributes["error.type"] == "aiotensor.errors.WouldBlockError"


# The fields of the context


async def test_baggage_is_sent_unless_it_is_too_long(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as (sender, receiver):
        for length in (10, MAX_TRACE_VALUE, MAX_TRACE_VALUE):
            token = context.attach(baggage.set_baggage("user", "x" * length))
            await sender.send(pattern(0, 3))
            context.detach(token)
        deliveries = [await anext(receiver) for _ in range(3)]

    with processing(deliveries[0]):
        assert baggage.get_baggage("user") == "x" * 10
    with processing(deliveries[1]):
        assert baggage.get_baggage("user") is None
    delivered = [span for span in recorder.seen if span.name == "aiotensor deliver tensor"]
    assert all(span.parent for span in delivered)
    [record] = [one for one in caplog.records if one.name == "aiotensor.integrations"]
    assert "baggage" in record.getMessage()


@settings(max_examples=200 if COMPLETE else 30)
@given(fields=st.dictionaries(st.sampled_from(["traceparent", "tracestate", "baggage", "b3"]), st.text()))
def test_any_context_of_a_peer_can_be_processed(fields: dict[str, str]) -> None:
    recorder = Recorder()
    tracer = SpanTracer(recorder.provider)
    arrived = tracer.arrived(fields)
    tracer.delivered("tensor", arrived, name="a name", nbytes=1)
    tracer.delivered("publication", arrived)
    tracer.answer(arrived).end()
    tracer.answer_batch([arrived, None]).end()
    assert not recorder.unfinished
    assert len(recorder.seen) == 4


# Copies of the context


async def test_a_delivered_context_can_be_copied_and_pickled(recorder: Recorder) -> None:
    async with pair() as (sender, receiver):
        await sender.send(pattern(0, 3))
        delivery = await anext(receiver)
        copied = copy.deepcopy(delivery)
        assert torch.equal(copied.tensor, pattern(0, 3))
    context = delivery.trace_context
    assert context is not None
    pickled = pickle.dumps(context)
    assert b"opentelemetry" not in pickled  # the process that loads it may lack OpenTelemetry
    assert context == copy.copy(context) == copied.trace_context == pickle.loads(pickled)

    with processing(copied):
        pass
    assert one(recorder.seen, "aiotensor process").parent == one(recorder.seen, "aiotensor send tensor").id
