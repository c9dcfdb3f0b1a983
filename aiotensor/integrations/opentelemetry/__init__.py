"""Trace messages with OpenTelemetry. Requires opentelemetry-api.

    aiotensor.integrations.opentelemetry.instrument()

docs/operation.md describes the spans and their attributes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from aiotensor.integrations import not_installed

try:
    from opentelemetry import trace
except ModuleNotFoundError as error:
    raise not_installed(error, __name__, "opentelemetry-api") from None

from aiotensor.errors import UsageError
from aiotensor.integrations.opentelemetry.spans import HasTraceContext, SpanTracer
from aiotensor.runtime import tracing

__all__ = ["HasTraceContext", "instrument", "processing", "uninstrument"]


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
