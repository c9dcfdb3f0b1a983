"""A tracing system that raises errors: calls succeed, and no permit, memory, handle or request is lost."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from aiotensor import RemoteError, WouldBlockError
from aiotensor.integrations.opentelemetry import instrument, processing, uninstrument
from aiotensor.runtime import tracing
from tests.cancelling import Attempt, cancel_everywhere
from tests.channel.parties import Question, answer, channel, settled
from tests.integrations.opentelemetry.spans import CALLS, serving
from tests.pairs import pair
from verification import waiting
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Fault:
    """Raise an error of a new type in one method of the tracing system.

    Args:
        method: the name of the method.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self._error = type("FaultError", (Exception,), {})
        self.count = 0

    def reach(self, method: str) -> None:
        """Raise the error if this is the method."""
        if method == self._method:
            self.count += 1
            raise self._error(f"{method} is broken")


class Faulty(SpanProcessor, Sampler, TextMapPropagator):
    """A span processor, sampler and propagator, one method of which fails."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._inner = propagate.get_global_textmap()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._fault.reach("on_start")

    def on_end(self, span: ReadableSpan) -> None:
        self._fault.reach("on_end")

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        self._fault.reach("should_sample")
        raise AssertionError("only used if it fails")

    def get_description(self) -> str:
        return "a sampler that fails"

    def inject(self, carrier: Any, context: Context | None = None, *args: Any, **options: Any) -> None:
        self._fault.reach("inject")
        self._inner.inject(carrier, context, *args, **options)

    def extract(self, carrier: Any, context: Context | None = None, *args: Any, **options: Any) -> Context:
        self._fault.reach("extract")
        return self._inner.extract(carrier, context, *args, **options)

    @property
    def fields(self) -> set[str]:
        return self._inner.fields


OTHERS = ["on_end", "should_sample", "inject"]


@contextmanager
def faulty_tracing(method: str) -> Iterator[Fault]:
    """Instrument this process with a tracing system one method of which fails."""
    fault, before = Fault(method), propagate.get_global_textmap()
    faulty = Faulty(fault)
    provider = TracerProvider(sampler=faulty if method == "should_sample" else None, shutdown_on_exit=False)
    provider.add_span_processor(faulty)
    propagate.set_global_textmap(faulty)
    instrument(provider)
    try:
        yield fault
    finally:
        uninstrument()
        propagate.set_global_textmap(before)


@pytest.fixture(
    autouse=True,
    params=["on_start", "extract", *(pytest.param(name, marks=pytest.mark.extended) for name in OTHERS)],
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
        with pytest.raises(WouldBlockError):
            sender.post(pattern(2, 3))
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
    async with (
        channel(max_concurrent_videos=2, client={"max_wait_s": 5}) as ends,
        serving(ends.server, answer),
    ):
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

        assert await cancel_everywhere(attempt, ends.sender, ends.receiver, ends.client, ends.server)
