"""Trace messages with OpenTelemetry. Requires opentelemetry-api.

    aiotensor.integrations.opentelemetry.instrument()

docs/operation.md describes the spans and their attributes.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Token
from functools import cached_property, lru_cache, wraps
from typing import ParamSpec, Protocol, TypeVar
from urllib.parse import urlsplit

import aiotensor
from aiotensor.errors import UsageError
from aiotensor.integrations import not_installed
from aiotensor.runtime import tracing
from aiotensor.runtime.logs import logger_of
from aiotensor.types import (
    MAX_TRACE_FIELDS,
    MAX_TRACE_NAME,
    MAX_TRACE_VALUE,
    Publication,
    TraceContext,
)

try:
    from opentelemetry import context, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
except ModuleNotFoundError as error:
    raise not_installed(error, __name__, "opentelemetry-api") from None

__all__ = ["HasTraceContext", "instrument", "processing", "uninstrument"]

logger = logger_of("integrations")

T = TypeVar("T")
D = TypeVar("D")
P = ParamSpec("P")

_KINDS: Mapping[tracing.Operation, SpanKind] = {
    "send tensor": SpanKind.PRODUCER,
    "send message": SpanKind.PRODUCER,
    "request": SpanKind.CLIENT,
    "publish": SpanKind.PRODUCER,
}


class HasTraceContext(Protocol):
    """A `Delivery`, `Publication` or `Request`."""

    @property
    def trace_context(self) -> Mapping[str, str] | None:
        """The trace context of the sender; None if there is none."""


def instrument(tracer_provider: trace.TracerProvider | None = None) -> None:
    """Create spans for all objects of this process, including open ones.

    Call it once in each process, before the first message. Objects of `aiotensor.blocking` are traced, too:
    the span of the calling thread is the parent. A process that is not instrumented ignores the trace context
    of its peers.

    The trace context is sent with the propagators of OpenTelemetry, as in HTTP headers: ``traceparent``,
    ``tracestate`` and ``baggage`` by default. At most 6 fields of at most 1024 characters are sent; other
    fields are omitted, and logged once.

    Args:
        tracer_provider: the provider of the tracer; None for the global one, which may be set later.

    Raises:
        UsageError: this process is instrumented already.
    """
    if tracing.tracer is not None:
        raise UsageError("aiotensor is instrumented already: call uninstrument() first")
    tracing.tracer = SpanTracer(tracer_provider)


def uninstrument() -> None:
    """Create no more spans; this has no effect if the process is not instrumented.

    Spans that have begun still end with their operation.
    """
    tracing.tracer = None


@contextmanager
def processing(*items: HasTraceContext) -> Iterator[trace.Span]:
    """Create a span for the processing of received items, and make it current during the ``with`` block.

    For a delivery or a request, the span belongs to the trace of its sender. For a publication, and for
    several items, it belongs to the current trace or begins one, and is linked to the spans of the senders.
    An exception in the block is recorded. The block of a `Request` creates its own span, and needs no other.

    Args:
        items: deliveries, publications or requests.

    Returns:
        the span; a span that is not recorded if this process is not instrumented.
    """
    tracer = tracing.tracer
    if not isinstance(tracer, SpanTracer):
        yield trace.INVALID_SPAN
        return
    span = tracer.process(items)
    try:
        yield span.inner
    except BaseException as error:
        span.end(error)
        raise
    span.end()


# Errors of the tracing system

# The types of the errors of the tracing system that were logged.
_logged: set[type[Exception]] = set()


def _guarded(otherwise: D) -> Callable[[Callable[P, T]], Callable[P, T | D]]:
    """Return a decorator: a failed function logs its error, once for each type, and returns `otherwise`."""

    def guard(function: Callable[P, T]) -> Callable[P, T | D]:
        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | D:
            try:
                return function(*args, **kwargs)
            # Samplers, span processors and propagators are third-party code, and may raise any error. It must
            # not reach the callers: they hold permits, memory and requests.
            except Exception as error:
                if type(error) not in _logged:
                    _logged.add(type(error))
                    logger.error(
                        "the tracing system failed, and spans are missing: %s",
                        error,
                        exc_info=error,
                        extra={"event": "trace_failed", "error": type(error).__name__, "reason": str(error)},
                    )
                return otherwise

        return guarded

    return guard


class _Arrival(dict[str, str]):
    """The trace context of an item that has arrived.

    Attributes:
        arrived_ns: the time of its arrival, in nanoseconds since the epoch.
        taken_ns: the time at which the application took it; None before that.
        batch: the span of the batch in which it was processed; None if there was none.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__(fields)
        self.arrived_ns = time.time_ns()
        self.taken_ns: int | None = None
        self.batch: SpanContext | None = None

    # A delivery can be hashed, and contains this object.
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    # `remote` can be neither pickled nor copied, and the process that unpickles may lack OpenTelemetry.
    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[dict[str, str]]]:
        return dict, (dict(self),)

    @cached_property
    def remote(self) -> Context:
        """The context of the sender, without anything of the current context."""
        return propagate.extract(self, Context())


def _arrival(context: Mapping[str, str]) -> _Arrival:
    """Return a trace context as it has arrived; a copy, or one of an application, arrives now."""
    return context if isinstance(context, _Arrival) else _Arrival(context)


class Operation:
    """A span that is current until it ends.

    Args:
        span: the span; None if there is none, so that nothing becomes current.
        parent: the context in which the span becomes the current one.

    Attributes:
        inner: the span.
    """

    __slots__ = ("_token", "inner")

    def __init__(self, span: trace.Span | None, parent: Context | None = None) -> None:
        self.inner = trace.INVALID_SPAN if span is None else span
        self._token: Token[Context] | None = None
        if span is not None:
            self._token = context.attach(trace.set_span_in_context(span, parent))

    def end(self, error: BaseException | None = None, *, name: str = "", nbytes: int = 0) -> None:
        """End the span, as `tracing.Span.end` does."""
        if self._token is not None:
            self._restore(self._token)
        _end(self.inner, error, name, nbytes)

    def _restore(self, token: Token[Context]) -> None:
        """Restore the previous span."""
        try:
            token.var.reset(token)
        except ValueError:  # the block of a request ends in another task or thread than it began
            if trace.get_current_span() is self.inner:  # this task inherited it
                before = token.old_value
                token.var.set(Context() if before is Token.MISSING else before)


_NOTHING = Operation(None)


@_guarded(None)
def _end(span: trace.Span, error: BaseException | None, name: str = "", nbytes: int = 0) -> None:
    """End a span, with the error of its operation if there is one."""
    try:
        span.set_attributes(_item(name, nbytes))
        if isinstance(error, Exception):
            kind = type(error)
            span.set_attribute("error.type", f"{kind.__module__}.{kind.__qualname__}")
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, f"{kind.__name__}: {error}"))
        elif error is not None:  # the client or the application has cancelled it, or the process exits
            span.set_attribute("aiotensor.cancelled", True)
    finally:
        span.end()


class SpanTracer:
    """Create spans with a tracer of OpenTelemetry; it implements `tracing.Tracer`.

    If the tracing system raises an error, the methods log it, and continue without the span or the context.

    Args:
        provider: the provider of the tracer; None for the global one.
    """

    def __init__(self, provider: trace.TracerProvider | None) -> None:
        self._tracer = trace.get_tracer("aiotensor", aiotensor.__version__, provider)
        self._has_omitted = False  # a field, which was logged

    @_guarded(_NOTHING)
    def begin(self, operation: tracing.Operation, destination: str) -> Operation:
        """Begin the span of a call, as `tracing.Tracer.begin` does."""
        name, kind = f"aiotensor {operation}", _KINDS[operation]
        return Operation(
            self._tracer.start_span(name, kind=kind, attributes=_attributes(operation, destination))
        )

    async def step(self, step: tracing.Step, awaitable: Awaitable[T], nbytes: int = 0) -> T:
        """Create a span for a wait, as `tracing.Tracer.step` does."""
        span = self._begin_step(step, nbytes)
        try:
            result = await awaitable
        except BaseException as error:
            _end(span, error)
            raise
        finally:
            # A future refers to its error, whose traceback would keep this frame and those of the callers
            # alive, with their tensors.
            del awaitable
        _end(span, None)
        return result

    @_guarded(trace.INVALID_SPAN)
    def _begin_step(self, step: tracing.Step, nbytes: int) -> trace.Span:
        attributes = {"aiotensor.nbytes": nbytes} if nbytes else None
        return self._tracer.start_span(f"aiotensor {step}", attributes=attributes)

    @_guarded(None)
    def context(self) -> TraceContext | None:
        """Return the current trace context, as `tracing.Tracer.context` does."""
        fields: dict[str, str] = {}
        propagate.inject(fields)
        fitting = [field for field in fields.items() if _fits(*field)]
        kept = dict(fitting[:MAX_TRACE_FIELDS])
        if len(kept) < len(fields) and not self._has_omitted:
            self._has_omitted = True
            omitted = ", ".join(fields.keys() - kept.keys())
            logger.warning(
                "fields of the trace context are not sent because they exceed a limit: %s",
                omitted,
                extra={"event": "trace_field_omitted", "fields": omitted},
            )
        return kept or None

    def arrived(self, context: TraceContext) -> Mapping[str, str]:
        """Return a trace context with the time of its arrival, as `tracing.Tracer.arrived` does."""
        return _Arrival(context)

    @_guarded(None)
    def delivered(
        self, item: tracing.Item, context: Mapping[str, str], *, name: str = "", nbytes: int = 0
    ) -> None:
        """Create the span from the arrival of an item until now, as `tracing.Tracer.delivered` does."""
        arrival = _arrival(context)
        arrival.taken_ns = time.time_ns()
        attributes = {**_operation("deliver", "receive"), **_item(name, nbytes)}
        # A publication has several subscribers. Each receives it in its own trace.
        is_shared = item == "publication"
        linked = arrival.remote if is_shared else None
        span = self._tracer.start_span(
            f"aiotensor deliver {item}",
            None if is_shared else arrival.remote,
            SpanKind.CONSUMER,
            attributes,
            _links([trace.get_current_span(linked).get_span_context()]),
            arrival.arrived_ns,
        )
        span.end(arrival.taken_ns)

    @_guarded(_NOTHING)
    def answer(self, context: Mapping[str, str] | None) -> Operation:
        """Begin the span of the work on a request, as `tracing.Tracer.answer` does."""
        remote, began = Context(), None
        links: tuple[Link, ...] = ()
        if context is not None:
            arrival = _arrival(context)
            remote, began, links = arrival.remote, arrival.taken_ns, _links([arrival.batch])
        attributes = _operation("answer")
        span = self._tracer.start_span("aiotensor answer", remote, SpanKind.SERVER, attributes, links, began)
        return Operation(span, remote)

    @_guarded(_NOTHING)
    def answer_batch(self, contexts: Sequence[Mapping[str, str] | None]) -> Operation:
        """Begin the span of the work on a batch, as `tracing.Tracer.answer_batch` does."""
        arrivals = [_arrival(one) for one in contexts if one is not None]
        span = self._tracer.start_span(
            "aiotensor answer batch",
            Context(),
            SpanKind.CONSUMER,
            {**_operation("answer", "process"), "messaging.batch.message_count": len(contexts)},
            _links([_sender_of(one) for one in arrivals]),
        )
        for one in arrivals:
            one.batch = span.get_span_context()
        return Operation(span, Context())

    def process(self, items: Sequence[HasTraceContext]) -> Operation:
        """Begin the span of the processing of received items."""
        contexts = [item.trace_context for item in items]  # not guarded: it fails for an item of another type
        return self._process(contexts, is_shared=any(isinstance(item, Publication) for item in items))

    @_guarded(_NOTHING)
    def _process(self, contexts: Sequence[Mapping[str, str] | None], *, is_shared: bool) -> Operation:
        arrivals = [_arrival(one) for one in contexts if one is not None]
        parent, links = None, _links([_sender_of(one) for one in arrivals])
        if len(arrivals) == len(contexts) == 1 and not is_shared:
            parent, links = arrivals[0].remote, ()
        attributes = _operation("process", "process")
        if len(contexts) != 1:
            attributes["messaging.batch.message_count"] = len(contexts)
        span = self._tracer.start_span("aiotensor process", parent, SpanKind.CONSUMER, attributes, links)
        return Operation(span, parent)


def _fits(name: str, value: str) -> bool:
    """Return whether a field of a trace context is within the limits of a frame."""
    return (
        len(name) <= MAX_TRACE_NAME and len(value) <= MAX_TRACE_VALUE and name.isascii() and value.isascii()
    )


def _sender_of(arrival: _Arrival) -> SpanContext:
    return trace.get_current_span(arrival.remote).get_span_context()


def _links(contexts: Sequence[SpanContext | None]) -> tuple[Link, ...]:
    return tuple(Link(one) for one in contexts if one is not None and one.is_valid)


def _operation(name: str, kind: str | None = None) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {"messaging.system": "aiotensor", "messaging.operation.name": name}
    return attributes if kind is None else {**attributes, "messaging.operation.type": kind}


def _item(name: str, nbytes: int) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "messaging.message.id": name,
        "messaging.message.body.size": nbytes,
    }
    return {key: value for key, value in attributes.items() if value}


@lru_cache(maxsize=256)  # an application has few endpoints
def _attributes(operation: tracing.Operation, destination: str) -> Mapping[str, str | int]:
    """Return the attributes of a call; they are not modified."""
    attributes = {**_operation(operation, "send"), "messaging.destination.name": destination}
    if destination.startswith("tcp://") and "," not in destination:
        parts = urlsplit(destination)
        if parts.hostname and parts.port:
            attributes |= {"server.address": parts.hostname, "server.port": parts.port}
    return attributes
