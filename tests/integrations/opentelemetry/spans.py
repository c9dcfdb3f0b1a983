"""Spans of this process and of its children, as values that can be compared, and calls that have spans."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

from aiotensor import TensorHandle, TensorSender
from aiotensor.integrations.opentelemetry import instrument, uninstrument
from verification.processes.peers import State
from verification.waiting import until

Call = Callable[[TensorSender, torch.Tensor], Awaitable[TensorHandle]]


async def _send(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    return await sender.send(tensor)


async def _post(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    handle = sender.post(tensor)
    await sender.copied(handle)
    return handle


async def _send_in_message(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    async with sender.message() as message:
        return await message.send(tensor)


async def _send_allocated(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    allocated = await sender.allocate(tuple(tensor.shape), tensor.dtype)
    return await sender.send(allocated.copy_(tensor))


CALLS: tuple[Call, ...] = (_send, _post, _send_in_message, _send_allocated)


class Seen(NamedTuple):
    """A span that has ended, with the ids of its parent, or 0, and of the linked spans."""

    name: str
    kind: str
    trace: int
    id: int
    parent: int
    links: tuple[int, ...]
    status: str
    events: tuple[str, ...]
    began: int
    ended: int
    attributes: Mapping[str, Any]


class Recorder(SpanProcessor):
    """Record ended spans, and count open ones."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.unfinished: dict[int, str] = {}
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(self)
        self.tracer = self.provider.get_tracer("the application")

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        assert span.context is not None
        self.unfinished[span.context.span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        assert span.context is not None
        del self.unfinished[span.context.span_id]
        self.seen.append(
            Seen(
                span.name,
                span.kind.name,
                span.context.trace_id,
                span.context.span_id,
                0 if span.parent is None else span.parent.span_id,
                tuple(link.context.span_id for link in span.links),
                span.status.status_code.name,
                tuple(event.name for event in span.events),
                span.start_time or 0,
                span.end_time or 0,
                dict(span.attributes or {}),
            )
        )


class _Complaints(logging.Handler):
    """Collect what OpenTelemetry logs, such as the second end of a span."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def recording() -> Iterator[Recorder]:
    """Instrument this process, and record the spans of the block."""
    recorder = Recorder()
    complaints = _Complaints(logging.WARNING)
    logging.getLogger("opentelemetry").addHandler(complaints)
    instrument(recorder.provider)
    try:
        yield recorder
    finally:
        uninstrument()
        logging.getLogger("opentelemetry").removeHandler(complaints)
    assert not recorder.unfinished
    assert not complaints.said


async def begin_recording(state: State) -> None:
    """Instrument a child process."""
    state.others["recorder"] = state.stack.enter_context(recording())


async def recorded(state: State) -> list[Seen]:
    """Return the spans of a child process, once all have ended."""
    recorder: Recorder = state.others["recorder"]
    await until(lambda: not recorder.unfinished)
    return recorder.seen


def one(spans: Iterable[Seen], name: str) -> Seen:
    """Return the only span with this name."""
    [span] = [span for span in spans if span.name == name]
    return span


def all_of(spans: Iterable[Seen], name: str) -> list[Seen]:
    """Return all spans with this name, in the order of their ends."""
    return [span for span in spans if span.name == name]


def tree(spans: Iterable[Seen], parent: int = 0) -> dict[str, Any]:
    """Return the names of the spans below a parent, in the order of their beginnings, as nested mappings."""
    ordered = sorted(spans, key=lambda span: span.began)
    return {span.name: tree(ordered, span.id) for span in ordered if span.parent == parent}
