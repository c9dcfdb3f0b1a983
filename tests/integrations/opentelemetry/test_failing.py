"""A tracing system that raises errors: calls succeed, and no permit, memory, handle or request is lost."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from aiotensor import RemoteError, WouldBlockError
from aiotensor.integrations.opentelemetry import instrument, processing, uninstrument
from aiotensor.runtime import tracing
from tests.cancelling import Attempt, cancel_everywhere
from tests.channel.parties import Question, channel, serving, settled
from tests.integrations.opentelemetry.spans import CALLS
from tests.pairs import pair
from verification import waiting
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Fault:
    """Counts the errors that a method of the tracing system has raised."""

    count = 0


@contextmanager
def faulty_tracing(method: str) -> Iterator[Fault]:
    """Instrument this process with a tracing system one method of which raises an error of a new type."""
    fault, error = Fault(), type("FaultError", (Exception,), {})
    processor, provider = SpanProcessor(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    owner: Any = {
        "should_sample": provider.sampler,
        "inject": propagate.get_global_textmap(),
        "extract": propagate.get_global_textmap(),
    }.get(method, processor)

    def fail(*_: object, **__: object) -> NoReturn:
        fault.count += 1
        raise error(f"{method} is broken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, fail)
        instrument(provider)
        try:
            yield fault
        finally:
            uninstrument()


@pytest.fixture(
    autouse=True,
    params=[
        *("on_start", "extract"),
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("on_end", "should_sample", "inject")),
    ],
)
def fault(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Fault]:
    """A fault in the tracing system of this process, which is logged once."""
    with faulty_tracing(request.param) as fault:
        # Reach it before the test: caplog keeps the traceback, with all tensors of the callers.
        tracer = tracing.tracer
        assert tracer is not None
        span = tracer.begin("publish", "unix:///tmp/engine")
        tracer.context()
        span.end()
        tracer.delivered("tensor", tracer.arrived({}))
        before = fault.count
        assert before
        yield fault
        assert fault.count > before
        assert trace.get_current_span() is trace.INVALID_SPAN
    records = [*caplog.get_records("setup"), *caplog.get_records("call")]
    events = [vars(one)["event"] for one in records if one.name == "aiotensor.integrations"]
    assert events == ["trace_failed"]


async def test_tensors_are_sent_and_waits_end() -> None:
    async with pair(max_concurrent_videos=2, arena_bytes=BIG * 8 * 2, max_wait_s=5) as (sender, receiver):
        await sender.ready()
        for call in CALLS * 2:  # more often than there are permits
            handle = await call(sender, pattern(0, BIG))
            assert torch.equal(await receiver.receive(handle), pattern(0, BIG))
            await waiting.settled(sender)

        first = [await sender.send(pattern(seed, BIG)) for seed in range(2)]
        with pytest.raises(WouldBlockError):
            sender.send_nowait(pattern(2, 3))
        sending = asyncio.create_task(sender.send(pattern(2, BIG)))
        await until(lambda: sender.statistics().waiting == 1)
        for seed, handle in enumerate(first):
            assert torch.equal(await receiver.receive(handle), pattern(seed, BIG))
        assert torch.equal(await receiver.receive(await sending), pattern(2, BIG))
        await sender.send(pattern(3, 3))
        delivery = await anext(receiver)
        with processing(delivery):
            assert torch.equal(delivery.tensor, pattern(3, 3))
        del delivery
        await waiting.settled(sender)
        assert sender.statistics().waiting == 0


async def test_requests_are_answered() -> None:
    async with channel(2, client={"max_wait_s": 5}) as ends, serving(ends.server):
        for seed in range(4):
            got = await ends.client.request(Question(seed, pattern(seed, BIG)))
            assert (got.seed, got.total) == (seed, int(pattern(seed, BIG).sum()))
            with pytest.raises(RemoteError):
                await ends.client.request(Question(seed, pattern(seed, 3), wish="raise"))
            await ends.client.send(Question(seed))

        async def attempt(attempt: Attempt) -> None:
            asking = attempt.start(ends.client.request(Question(1, pattern(1, BIG))))
            await asking.completed()
            await settled(ends)

        assert await cancel_everywhere(attempt, ends.client, ends.server)
